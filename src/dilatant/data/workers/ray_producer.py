"""Ray producer: a process of a Ray cluster that makes samples."""

from __future__ import annotations

import os
import pickle
import warnings

import numpy as np

from dilatant.config.environment import compute_in_one_thread
from dilatant.data.media.freed_memory import keep_freed_memory
from dilatant.data.workers.pool import SampleRequest
from dilatant.data.workers.pool_answer import answer
from dilatant.data.workers.pool_wire import Encoded, pack_arrays, to_frame


class Producer:
    """Ray actor that makes samples. job: pickled (data sets by name, encoding)."""

    def __init__(self, job: bytes) -> None:
        compute_in_one_thread()
        keep_freed_memory()
        warnings.simplefilter("ignore")  # libraries' warnings name neither the sample nor the remedy
        self._datasets, self._encoding = pickle.loads(job)

    def greet(self) -> str:
        """Return the name of this process in messages."""
        return f"process {os.getpid()} on {os.uname().nodename}"

    def make(self, draw: int, index: int, parts: list[str], dataset: str) -> tuple[bytes, np.ndarray]:
        """Return the reply as a pool worker frames it, and the bytes of a sample's arrays: uint8 [bytes]."""
        request = SampleRequest(draw, index, frozenset(parts), dataset)
        message, arrays = answer(0, request, self._datasets, self._encoding)
        held = pack_arrays(message, arrays) if isinstance(message, Encoded) else b""
        return to_frame(message), np.frombuffer(held, np.uint8)
