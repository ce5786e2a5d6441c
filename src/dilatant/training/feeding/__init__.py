"""Batches for the trainer: planned by sizes, decoded ahead, and handed over step by step."""
