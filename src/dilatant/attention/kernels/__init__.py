"""Attention kernels and the choice among them: SDPA, Triton, and plain PyTorch block by block."""
