"""Measure the layers of a model on the devices at hand."""
