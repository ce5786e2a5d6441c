"""Cost model of plans: layer costs summed over stages and steps."""
