"""Encoders with their projectors."""
