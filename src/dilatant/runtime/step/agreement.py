"""Agreement: all ranks hold the same Plan, Assignment and Schedule, or learn who does not, before anything moves."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from dilatant.comm.comm import Comm
from dilatant.comm.gather import AsyncAllGather

_BITS = 62


class Diverged(RuntimeError):
    """Ranks were about to run different steps; the message names them."""


def digest(*documents: str | NDArray[np.int64]) -> int:
    """62 bits of the SHA-256 of `documents`: texts, and arrays by their bytes."""
    joined = hashlib.sha256()
    for document in documents:
        data = document.encode() if isinstance(document, str) else np.ascontiguousarray(document).data
        joined.update(len(data).to_bytes(8, "little"))
        joined.update(data)
    return int.from_bytes(joined.digest()[:8], "little") >> (64 - _BITS)


class Agreement:
    """Whether all ranks began a step with equal `values` (name → integer of 62 bits, names equal everywhere).

    Values travel while the rank computes; it must `require` them to be equal before it sends, awaits or sums anything.
    """

    def __init__(self, comm: Comm, values: Mapping[str, int]) -> None:
        self._names = list(values)
        own = torch.tensor([*values.values()], dtype=torch.int64)
        self._gathering: AsyncAllGather | None = AsyncAllGather(comm, own, "agreement on the step")

    def require(self) -> None:
        """Return when all agree; again and again, if need be. Raises Diverged on every rank otherwise, naming what
        differs and the ranks in the minority."""
        if self._gathering is None:
            return
        gathered = self._gathering.wait()
        self._gathering = None
        if bool((gathered == gathered[0]).all()):
            return
        rows = [tuple(row) for row in gathered.tolist()]
        common, _ = Counter(rows).most_common(1)[0]
        problems = []
        for index, name in enumerate(self._names):
            odd = [rank for rank, row in enumerate(rows) if row[index] != common[index]]
            if odd:
                listed = ", ".join(map(str, odd[:16])) + (", ..." if len(odd) > 16 else "")
                problems.append(f"{name} of rank {listed} differs from that of the others")
        raise Diverged(f"the ranks would not run the same step: {'; '.join(problems)}")
