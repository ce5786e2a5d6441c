"""Hugging Face in and out: reading stored weights, exporting models and adapters."""
