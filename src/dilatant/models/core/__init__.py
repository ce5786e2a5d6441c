"""What every unit is made of: stages, weights by logical name, structure, and freezing."""
