"""Doing it: the step, the optimizer, checkpoints and the loop around them."""
