"""Layouts of one or several units: cuts into stages, parallel degrees and recomputation."""
