"""The run: trainer, optimizer, checkpoint, evaluation, export, metrics."""
