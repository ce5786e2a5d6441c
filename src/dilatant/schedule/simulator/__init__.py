"""Simulate a schedule: seconds, bubbles and memory."""
