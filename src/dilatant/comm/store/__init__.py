"""The key-value store of a run: its server, client and token, and the handshake of new connections."""
