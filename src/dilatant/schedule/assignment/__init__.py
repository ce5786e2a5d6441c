"""Assign samples to replicas and microbatches."""
