"""Partial-step recovery: determine which gradients of a failed step can be reused."""
