"""Attention masks as one 64-bit word per token, block tables for the kernels, and balanced placement on ranks."""
