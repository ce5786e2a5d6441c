"""Core of units: stages, weights by logical name, structure, and freezing."""
