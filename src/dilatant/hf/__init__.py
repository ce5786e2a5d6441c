"""Hugging Face files: read stored weights, export models and adapters."""
