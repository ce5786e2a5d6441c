"""Adapters: LoRA, DoRA and four-bit base weights."""
