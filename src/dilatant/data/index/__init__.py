"""The sizes index: the tokens of every sample in every unit, with the statistics and checks computed from it."""
