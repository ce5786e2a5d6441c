"""Steps of a run: their number, and the random seed of each."""

from __future__ import annotations

import math
import random
from hashlib import sha256

import numpy as np
import torch

from dilatant.config import Config
from dilatant.planning.assemble import Samples


def count_steps(config: Config, samples: Samples, done: int = 0, drawn: int = 0) -> int:
    """Return the optimizer steps of the run: `train.steps`, or enough for `train.epochs` passes (default 1).

    done, drawn: steps already done, and the samples they took, in batches of any size. Raises UserError for data of
    unknown length.
    """
    if config.train.steps is not None:
        return config.train.steps
    passes = 1.0 if config.train.epochs is None else config.train.epochs
    left = max(0.0, passes * len(samples.train) - drawn)
    return max(1, done + math.ceil(left / config.train.global_batch_size))


def seed_step(seed: int, step: int) -> None:
    """Seed the global generators with a key of this step, so that a resumed run draws what the undisturbed one would.

    Training models draw by sample (`models.dropout`); this is for what is not intercepted, as Python's `random`.
    """
    key = int.from_bytes(sha256(f"{seed}/{step}".encode()).digest()[:4], "little")
    random.seed(key)
    np.random.seed(key)  # noqa: NPY002  # model code draws from the global generator, if any
    # `torch.manual_seed` takes milliseconds for devices that are not used.
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(key)
