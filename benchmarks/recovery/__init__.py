"""Losses of ranks and nodes: how soon training goes on, and what being ready for them costs."""
