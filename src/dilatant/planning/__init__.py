"""Planning a run: measure its model, data and devices, describe its planning problem, and choose its plan."""
