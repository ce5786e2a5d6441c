"""Cost of a layer on a tensor- and context-parallel group, from the cost of one tensor-parallel rank's shard.

Context parallelism is modelled: with balanced placement a rank has 1/cp of the linear and quadratic terms, and the
whole constant term. The collectives of both are modelled from the links of the hardware.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dilatant.cost.analytic import (
    LayerShape,
    cached_collective_seconds,
    collective_seconds,
    exchange_seconds,
    gathered_bytes,
)
from dilatant.cost.hardware import GroupLinks
from dilatant.cost.layer import ZERO, LayerCost
from dilatant.cost.model import Degree
from dilatant.cost.quadratic import Quadratic

_FORTH, _BACK = ("forward", "recompute"), ("input_gradient", "first_trainable")
"""Passes that wait for collectives; weight gradients need nothing from other ranks."""
_WITHOUT = (
    "weight_gradient", "attention_bytes", "activation_bytes", "frozen_bytes", "weight_bytes", "checkpoint_bytes",
    "output_bytes", "row_bytes", "row_working_bytes", "common_bytes",
)  # fmt: skip
_WORKING = ("working_bytes", "frozen_working_bytes", "forward_bytes")
"""Measured bytes that also include the gathered tokens of all ranks."""


def group_cost(
    share: LayerCost, shape: LayerShape, links: GroupLinks, dtype: str, degree: Degree
) -> LayerCost:
    """Return a layer's cost at `degree`, (tp, cp); `share` is the cost of its shard at (tp, 1) without collectives.

    `shape`: of the whole layer. `links`: carry the group's collectives, none of which is overlapped.
    """
    tp, cp = degree
    gathered = gathered_bytes(shape, dtype, tp, cp)
    added = {
        **dict.fromkeys(_FORTH, collective_seconds(shape, links, dtype, tp, cp)),
        **dict.fromkeys(_BACK, collective_seconds(shape, links, dtype, tp, cp, backward=True)),
        **dict.fromkeys(_WITHOUT, ZERO),
        "attention": cached_collective_seconds(shape, links, dtype, tp, cp),
        **{name: gathered for name in _WORKING if getattr(share, name) != ZERO},
    }
    exchange = exchange_seconds(shape, links, dtype, tp, cp)
    own: dict[str, Any] = {
        name: (_of_row(getattr(share, name), cp) + more).rounded() for name, more in added.items()
    }
    dense = tuple((tokens, seconds / cp) for tokens, seconds in share.dense_seconds)
    return replace(share, **own, expert_exchange=exchange.rounded(), dense_seconds=dense)


def _of_row(curve: Quadratic, cp: int) -> Quadratic:
    return Quadratic(curve.a / cp, curve.b / cp, curve.c)
