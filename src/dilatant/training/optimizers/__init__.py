"""Optimizers: AdamW over logical parameter names, master weights, averages, and offload to the host."""
