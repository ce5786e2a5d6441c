"""The cost model summed over the stages of a plan."""
