"""Plan, measure and finish one training step."""
