"""Entrain (thesis chapter 4)."""
