"""Agreement: all ranks hold the same Plan, Assignment and Schedule, or learn who does not, before anything moves."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch

from dilatant.runtime.comm import Comm

_BITS = 62


class Diverged(RuntimeError):
    """Ranks were about to run different steps; the message names them."""


def digest(*documents: str) -> int:
    """62 bits of the SHA-256 of `documents`."""
    joined = hashlib.sha256()
    for document in documents:
        joined.update(hashlib.sha256(document.encode()).digest())
    return int.from_bytes(joined.digest()[:8], "little") >> (64 - _BITS)


def agree(comm: Comm, values: dict[str, int]) -> None:
    """Return when every rank called this with equal `values` (name → integer of 62 bits, names equal everywhere).

    One small reduction when all agree. Raises Diverged on every rank otherwise, naming what differs and the ranks
    in the minority.
    """
    own = torch.tensor([*values.values(), *(-value for value in values.values())], dtype=torch.int64)
    widest = own.clone()
    comm.world.max_(widest, "agreement on the step").wait()
    count = len(values)
    if torch.equal(widest[:count], -widest[count:]):
        return
    gathered, pending = comm.world.gather(own[:count].clone(), "agreement on the step")
    pending.wait()
    rows = [tuple(row.tolist()) for row in gathered]
    common, _ = Counter(rows).most_common(1)[0]
    problems = []
    for index, name in enumerate(values):
        odd = [rank for rank, row in enumerate(rows) if row[index] != common[index]]
        if odd:
            listed = ", ".join(map(str, odd[:16])) + (", ..." if len(odd) > 16 else "")
            problems.append(f"{name} of rank {listed} differs from that of the others")
    raise Diverged(f"the ranks would not run the same step: {'; '.join(problems)}")
