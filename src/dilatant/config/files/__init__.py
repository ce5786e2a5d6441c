"""Files that Dilatant reads and writes itself: paths, YAML text, durable writes, and which folders are trusted."""
