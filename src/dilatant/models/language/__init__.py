"""The language model as a unit, and the optional features of its stages."""
