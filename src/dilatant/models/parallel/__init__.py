"""Tensor and expert parallelism of a stage's modules."""
