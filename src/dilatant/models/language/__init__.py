"""The language model: its unit, its stages and their optional features."""
