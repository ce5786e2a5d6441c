"""Cornstarch (thesis chapter 3, and the ICML text)."""
