"""A plan says when its batch is too small for its devices, and which would not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dilatant.planning.plan_advice import _batch


def planned(warm_up: float, drain: float) -> Any:
    """A step of a second on four devices, which pipelines fill and drain for so many device seconds."""
    score = SimpleNamespace(seconds=1.0, idle_seconds={"warm-up": warm_up, "drain": drain, "imbalance": 1.0})
    winner = SimpleNamespace(score=score, plan=SimpleNamespace(ranks=range(4)))
    return SimpleNamespace(result=SimpleNamespace(winner=winner), problem=SimpleNamespace(global_batch=8))


@pytest.mark.parametrize(("warm_up", "drain", "says"), [(1.0, 1.0, "50 %"), (0.4, 0.3, None)])
def test_pipelines_that_fill_for_long_ask_for_a_larger_batch(warm_up, drain, says):
    found = [*_batch(planned(warm_up, drain))]
    assert bool(found) == (says is not None)
    for text in found:
        assert text.startswith("The global batch is small for 4 devices: pipelines fill and drain for 50 %")
        # Half of the step is work of 8 samples: with 9 times as much, the other half is a tenth.
        assert text.endswith("about 10 % with train.global_batch_size 72.")
