"""Experts of a block: grouped products, and their adapters."""
