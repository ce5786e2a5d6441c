"""Schedules: the Assignment and Schedule of a step, schedule families, and the simulator that times them."""
