"""Generators: diffusion losses, denoisers of diffusers cut in stages, and sampling."""
