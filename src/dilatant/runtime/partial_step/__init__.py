"""Recovery of a partial step: which gradients of a failed step are still usable."""
