"""Held-out loss, generated answers, and their metrics."""
