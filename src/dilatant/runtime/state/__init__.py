"""Gradient sync, and sharded weights and optimizer state."""
