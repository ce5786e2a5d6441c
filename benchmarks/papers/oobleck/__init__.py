"""Oobleck (thesis chapter 2)."""
