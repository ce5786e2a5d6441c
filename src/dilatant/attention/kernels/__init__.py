"""Attention kernels and the choice among them: SDPA, Triton, and blockwise PyTorch."""
