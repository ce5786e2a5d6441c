"""Engines: the runtime behind the interfaces of other training loops."""
