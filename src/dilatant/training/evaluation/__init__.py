"""Evaluation: held-out loss, generated answers, and their metrics."""
