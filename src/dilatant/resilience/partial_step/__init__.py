"""Partial-step recovery between ranks: exchange, export and adopt gradients."""
