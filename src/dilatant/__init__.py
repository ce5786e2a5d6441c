"""Dilatant: plan, balance and train multimodal LLMs on any set of devices.

Importing this package imports neither torch nor transformers; names below are resolved on first use.
"""

__version__ = "0.1.0"
