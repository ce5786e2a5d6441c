"""Tiny models gain nothing from threads, and lose much where other processes want the cores."""

import torch

torch.set_num_threads(1)
