"""One training step on one rank: receive rows, run stages, sync gradients and agree with the other ranks."""
