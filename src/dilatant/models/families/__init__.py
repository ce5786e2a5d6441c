"""Families of pretrained multimodal models: where their encoders, projectors and language models are."""
