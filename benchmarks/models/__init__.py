"""Whole models on one device: speed beside other trainers, start, predictions, and which families train."""
