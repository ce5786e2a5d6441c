"""Schedule families: GPipe, 1F1B, eager, interleaved and zero-bubble schedules."""
