"""Feeding the trainer: batches planned by sizes, decoded ahead, and delivered step by step."""
