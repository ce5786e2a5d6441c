"""Small values to everybody: JSON over the ranks' CPU group, for what happens once in a while."""

from __future__ import annotations

import json
from typing import Any

import torch

from dilatant.runtime.comm import Comm


def exchange(comm: Comm, value: Any) -> list[Any]:
    """Every rank's JSON value, by rank."""
    text = json.dumps(value).encode()
    lengths, pending = comm.world.gather(torch.tensor([len(text)]), "lengths of values")
    pending.wait()
    longest = max(int(length) for length in lengths)
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    gathered, pending = comm.world.gather(own, "values of all ranks")
    pending.wait()
    return [
        json.loads(bytes(row[: int(length)].numpy().tobytes()))
        for row, length in zip(gathered, lengths, strict=True)
    ]
