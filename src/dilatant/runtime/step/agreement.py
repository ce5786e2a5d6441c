"""Agreement: before a step exchanges data, verify that all ranks hold the same Plan, Assignment and Schedule."""

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
    """Ranks were about to run different steps; the message names the ranks."""


def digest(*documents: str | NDArray[np.int64]) -> int:
    """Return 62 bits of the SHA-256 of `documents`: strings, and arrays by their bytes."""
    joined = hashlib.sha256()
    for document in documents:
        data = document.encode() if isinstance(document, str) else np.ascontiguousarray(document).data
        joined.update(len(data).to_bytes(8, "little"))
        joined.update(data)
    return int.from_bytes(joined.digest()[:8], "little") >> (64 - _BITS)


class Agreement:
    """Check that all ranks start a step with equal `values` (name → integer of 62 bits, the same names on every rank).

    The values are gathered while the rank computes; it must call `require` before it sends, awaits or sums anything.
    """

    def __init__(self, comm: Comm, values: Mapping[str, int]) -> None:
        self._names = list(values)
        own = torch.tensor([*values.values()], dtype=torch.int64)
        self._gathering: AsyncAllGather | None = AsyncAllGather(comm, own, "agreement on the step")

    def require(self) -> None:
        """Return when all ranks agree; may be called repeatedly. Otherwise raises Diverged on every rank, naming the
        differing values and the ranks in the minority."""
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
