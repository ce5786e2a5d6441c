"""Recovery of a partial step between ranks: exchange, hand over and adopt its gradients."""
