"""Replay of a node trace: throughput while nodes come and go."""
