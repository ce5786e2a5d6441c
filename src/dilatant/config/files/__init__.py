"""File handling: paths, YAML text, durable writes, exports as sources, and trust in folders of other origin."""
