"""Replay of a node trace: simulated throughput while nodes come and go."""
