"""What this model, its data and this hardware are, described and measured; a run's planning problem."""
