"""What ranks that work together say to each other in a step, and what that costs."""
