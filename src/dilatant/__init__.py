"""Dilatant: plan, balance and train multimodal LLMs on any set of devices.

Importing this package imports neither torch nor transformers.
"""

__version__ = "0.1.0"
