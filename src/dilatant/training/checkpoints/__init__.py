"""Checkpoints: written in the background, published as a whole, read under any plan."""
