"""Between stages every row travels once in each direction, whatever their tensor- and context-parallel degrees."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from cases.engine_case import CASE, HIDDEN, build_model, build_samples
from dilatant.comm.comm import Comm
from dilatant.comm.group import Group
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.runtime import Runtime
from harness.worker_pool import Worker, WorkerPool

CASE_OF_EDGES = replace(
    CASE, language_layers=4, attention="causal", texts=tuple((3 + 4 * i, (i % 3,)) for i in range(6)), check=False
)


def _plan(degrees: tuple[tuple[int, int], ...]) -> Plan:
    """Vision in one stage, the language model in all others, at these (tp, cp)."""
    first, stages = 0, []
    for tp, cp in degrees:
        ranks = tuple(range(first, first := first + tp * cp))
        stages.append((ranks, tp, cp))
    cuts = [6 * n // (len(stages) - 1) for n in range(len(stages))]
    language = tuple(Stage(start, end, *stage) for (start, end), stage in zip(pairwise(cuts), stages[1:], strict=True))
    return Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, 5, *stages[0]),)),), ("language",)),
            UnitPlan("language", (Replica(language),)),
        )
    )


def _sent_bytes(worker: Worker, plan: Plan) -> tuple[Counter[str], float]:
    """What a rank sends along each edge in a step, and the step's gradient norm."""
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(build_model(CASE_OF_EDGES, "meta"), plan, comm, seed=5)
    sent = Counter[str]()
    send = Group.send

    def counted(group: Group, tensor: torch.Tensor, *given: Any) -> Any:
        if group.name.startswith("edge/"):
            sent[group.name.split("/")[1]] += tensor.numel() * tensor.element_size()
        return send(group, tensor, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "send", counted)
        norm = runtime.execute(build_samples(CASE_OF_EDGES)).grad_norm
    runtime.close()
    comm.close()
    return sent, norm


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param(((1, 1), (2, 1), (1, 1)), marks=pytest.mark.slow),
        pytest.param(((2, 1), (1, 2), (2, 1)), marks=pytest.mark.slow),
        ((1, 2), (2, 2)),
    ],
    ids=str,
)
def test_every_row_crosses_an_edge_once_in_each_direction(
    workers: WorkerPool, degrees: tuple[tuple[int, int], ...]
) -> None:
    plan = _plan(degrees)
    sent = sum((bytes_ for bytes_, _ in workers.run(_sent_bytes, len(plan.ranks), plan)), Counter[str]())
    samples = build_samples(CASE_OF_EDGES)
    images = sum(sample.sizes.get("vision", 0) for sample in samples)
    tokens = sum(sample.sizes["language"] for sample in samples)
    stages = len(plan.stages())
    rows = {"0-1": images, "1-0": images}
    for stage in range(1, stages - 1):
        rows |= {f"{stage}-{stage + 1}": tokens, f"{stage + 1}-{stage}": tokens}
    assert sent == {edge: count * HIDDEN * 4 for edge, count in rows.items()}


def test_rank_shares_encoder_rows_in_its_group_without_messages(workers: WorkerPool) -> None:
    """The encoder is on one of the two ranks of the language model: nothing travels between stages."""

    def plan(*ranks: int) -> Plan:
        language = Replica((Stage(0, 6, ranks, tp=len(ranks)),))
        return Plan(
            (
                UnitPlan("vision", (Replica((Stage(0, 5, ranks[:1]),)),), ("language",)),
                UnitPlan("language", (language,)),
            )
        )

    ((_, alone),) = workers.run(_sent_bytes, 1, plan(0))
    for sent, norm in workers.run(_sent_bytes, 2, plan(0, 1)):
        assert not sent
        assert norm == pytest.approx(alone, rel=1e-5)  # the numerics rule's bound for fp32
