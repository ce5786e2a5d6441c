"""The key-value store of a run: its server, its client, its token, and connections without the token."""
