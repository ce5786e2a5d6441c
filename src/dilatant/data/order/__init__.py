"""The order of samples: blends of sources, samplers, and their resumable state."""
