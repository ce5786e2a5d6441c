"""Layouts of one unit, or of several: cuts into stages, degrees, and recomputation."""
