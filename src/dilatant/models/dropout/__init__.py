"""Dropout whose random numbers are keyed by seed, sample and layer."""
