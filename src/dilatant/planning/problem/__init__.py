"""A run's planning problem: its model, data and devices as values."""
