"""The coordinator and the agents as processes, and how they talk."""
