"""Training runs: trainer, feeding, optimizers, checkpoints, evaluation, metrics."""
