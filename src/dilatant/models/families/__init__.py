"""Families of pretrained multimodal models: their encoders, projectors, language models and media units."""
