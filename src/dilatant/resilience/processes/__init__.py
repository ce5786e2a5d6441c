"""The coordinator and the agents as processes, and the connections between them."""
