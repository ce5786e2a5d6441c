"""Cost models: layer costs and their fits, the frozen rule, memory, hardware and links, as values."""
