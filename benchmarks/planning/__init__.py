"""Planners, schedules and the simulator: how fast they are, and how near to measured and published steps."""
