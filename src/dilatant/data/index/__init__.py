"""The sizes index: the tokens of every sample in every unit, and what is computed from them."""
