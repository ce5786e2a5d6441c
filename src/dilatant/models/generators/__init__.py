"""Generators: diffusion losses, denoisers of diffusers cut into stages, and sampling."""
