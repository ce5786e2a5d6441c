"""Authenticated connections of a run's processes: handshake, frames, and a server's event loop. Imports no torch."""
