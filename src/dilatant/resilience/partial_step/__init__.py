"""Recovery of a partial step between ranks: exchange, export and adopt its gradients."""
