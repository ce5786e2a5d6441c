"""The papers' tables, computed again: one file a paper."""
