"""Gradients that survive the loss of ranks in a step count once: loss and gradients equal those of one process.

No layout here shards weights or gradients: such runs repeat the interrupted step whole (decision 338), which
`test_sharded_recovery` tests.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.drawn_steps import cases
from cases.engine_case import Case, build_model, build_samples
from dilatant.comm.comm import Comm
from dilatant.comm.errors import CommAborted
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.resilience.partial_step.decide_reuse import decide_reuse
from dilatant.resilience.partial_step.exchange import adopt_partial_step
from dilatant.resilience.partial_step.handover import export_gradients, read_exported_gradients
from dilatant.runtime.runtime import Execution, Recovery, Runtime
from dilatant.runtime.state.shared_weights import StateLayout
from dilatant.runtime.step.partial_step import AccumulationReport, LayerShare, LossShare, ReusePlan, patterns_of
from dilatant.schedule.assignment.step_assignment import Microbatching
from harness.checked_steps import COMMON, Allowed, assert_close, part_of
from harness.memberships import planner_like
from harness.worker_pool import Worker, WorkerPool
from oracles.engine_step import expected

Lost = tuple[int, int]
"""A rank, and how many actions it begins before it is lost; beyond its last one it is lost before the step counts."""


class _Ending:
    """A recorder whose rank is lost at an action."""

    def __init__(self, recorder: Any, after: int) -> None:
        self._recorder, self._left = recorder, after

    def start(self, *args: Any) -> None:
        self._left -= 1
        if self._left < 0:
            raise CommAborted("lost")
        self._recorder.start(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)


def _run(
    worker: Worker, case: Case, lost: list[Lost], zero: str, exact: bool = False, folder: Path | None = None
) -> dict[str, Any] | None:
    """Run a step that ranks are lost in. folder: receives the exported gradients of lost ranks."""
    samples = build_samples(case)
    rank, size, plan = worker.rank, worker.size, case.plan
    old: Runtime | None = None
    shares = []
    for generation in range(len(lost) + 1):
        comm = Comm(worker.store, rank, size, generation)
        before = old if old is not None and old.stays(plan, rank) else None
        runtime = Runtime(
            build_model(case, "meta") if before is None else before.model,
            plan,
            comm,
            seed=case.seed,
            layout=StateLayout(
                zero,  # type: ignore[arg-type]
                [rank % 2 for rank in range(size)],
                bucket_bytes=case.bucket_bytes,
            ),
            microbatching=Microbatching(alone=exact),
            execution=Execution(case.dtype, exact),
            recovery=Recovery(before, keeps_gradients=True),
        )
        if generation:
            left = [] if folder is None else read_exported_gradients(folder, generation - 1, 0, rank, size)
            adopt_partial_step(comm, 0, old, runtime, left)
            runtime.clear_gradients()
            step = runtime.plan_step(samples)
            shares.append(1.0 if step.salvaged is None else len(step.salvaged.missing) / len(samples))
        elif exact:
            step = runtime.plan_step(samples)
        else:
            step = runtime.prepare(samples, case.assignment, case.schedule)
        if generation == len(lost):
            break
        victim, after = lost[generation]
        victim %= size
        if victim == rank:
            runtime._executor._recorder = _Ending(runtime._recorder, after)  # type: ignore[assignment]
        with contextlib.suppress(CommAborted):
            comm.world.barrier("all being there")
            runtime.execute(samples, step, step_number=0)
        runtime.close()
        comm.close()
        gone = f"gone in {generation}"
        if victim == rank:
            if folder is not None:
                export_gradients(folder, generation, runtime.unfinished)
                worker.store.set(gone, b"")
            return None
        if folder is not None:
            worker.store.wait([gone], timedelta(seconds=60))
        old = runtime
        survivors = {each: each - (each > victim) for each in range(size) if each != victim}
        planner = planner_like(plan, num_microbatches=4)
        plan = planner.next(plan, survivors, range(size - 1)).plan
        rank, size = survivors[rank], size - 1
    result = runtime.execute(samples, step, step_number=0)
    owned = runtime.owned
    found = {
        "loss": result.loss,
        "losses": dict(result.losses),
        "norm": result.grad_norm,
        "gradients": {key: p.grad.clone() for key, p in owned.parameters.items() if p.grad is not None},
        "owns": {key: box.name for key, box in owned.boxes.items()},
        "again": shares,
    }
    runtime.close()
    comm.close()
    return found


def check(
    workers: WorkerPool, case: Case, lost: list[Lost], zero: str, exact: bool = False, gives: bool = False
) -> list[dict[str, Any]]:
    losses, gradients, _ = expected(case, steps=1)
    allowed = Allowed.of_case(case)
    with tempfile.TemporaryDirectory() as folder:
        left_in = Path(folder) if gives else None
        ended = workers.run(_run, len(case.plan.ranks), case, lost, zero, exact, left_in)
    results = [result for result in ended if result is not None]
    largest = max((g.abs().max().item() for g in gradients.values()), default=0.0)
    norm = sum(g.double().square().sum().item() for g in gradients.values()) ** 0.5
    for result in results:
        assert result["losses"] == pytest.approx(losses[0][1], rel=allowed.relative)
        assert result["norm"] == pytest.approx(norm, rel=allowed.relative)
        assert set(result["gradients"]) == {key for key, name in result["owns"].items() if name in gradients}
        for key, gradient in result["gradients"].items():
            wanted = part_of(gradients, key)
            assert_close(gradient, wanted, allowed.of(wanted, largest), f"gradient of {key}")
    return results


WEIGHTS = {"unit": [frozenset({"first", "tied"}), frozenset({"middle"}), frozenset({"last", "tied"})]}
TWO_REPLICAS = Plan((UnitPlan("unit", tuple(Replica((Stage(0, 2, (r,)), Stage(2, 3, (r + 1,)))) for r in (0, 2))),))


def _told(rank: int, first: int, end: int, samples: tuple[int, ...]) -> AccumulationReport:
    layers = (LayerShare(("unit", layer), (rank,), (1, 1, 1), samples) for layer in range(first, end))
    losses = (LossShare("unit", first, end, (rank,), samples, {"unit": 1.0}),) if end == 3 else ()
    return AccumulationReport(rank, 5, tuple(range(8)), tuple(layers), losses)


def _missing(salvage: ReusePlan) -> set[int]:
    return {*salvage.missing({"unit": [1] * 8}, WEIGHTS, {"unit": range(2, 3)})}


def test_sample_reruns_only_in_layers_that_lack_it() -> None:
    """The first of two replicas has lost its last stage, which a rank without gradients replaces."""
    told = [_told(0, 0, 2, (0, 1, 2)), None, _told(2, 0, 2, (4, 5)), _told(3, 2, 3, (4, 5, 6))]
    told[3] = replace(told[3], losses=tuple(LossShare("unit", 2, 3, (3,), each) for each in ((4, 5), (6,))))
    salvage = decide_reuse(told, 5, TWO_REPLICAS, WEIGHTS)
    assert salvage is not None
    assert _missing(salvage) == {0, 1, 2, 3, 6, 7}
    assert salvage.covered()["unit", 0] == {0, 1, 2, 4, 5}
    assert salvage.covered()["unit", 2] == {4, 5, 6}
    # The loss of 6 is known only as part of a sum with 4 and 5, so all three run again.
    told[3] = replace(told[3], losses=(LossShare("unit", 2, 3, (3,), (4, 5, 6)),))
    mixed = decide_reuse(told, 5, TWO_REPLICAS, WEIGHTS)
    assert mixed is not None
    assert _missing(mixed) == set(range(8))
    patterns = patterns_of(range(8), salvage.covered())
    assert len({patterns[sample] for sample in (0, 3, 4, 6)}) == 4
    assert patterns[0] == patterns[2]
    assert patterns[3] == patterns[7]


def test_gradients_of_other_steps_or_counted_twice_are_discarded() -> None:
    own, other = _told(0, 0, 2, (0, 1)), _told(2, 0, 2, (2,))
    assert decide_reuse([own, None, other, None], 4, TWO_REPLICAS, WEIGHTS) is None
    assert decide_reuse([own, None, replace(other, draws=(9,) * 8), None], 5, TWO_REPLICAS, WEIGHTS) is None
    assert decide_reuse([own, None, _told(2, 0, 2, (1,)), None], 5, TWO_REPLICAS, WEIGHTS) is None
    assert decide_reuse([own, None, other, None], 5, TWO_REPLICAS, WEIGHTS) is not None


def test_tied_weight_is_salvaged_only_if_its_layers_stay_apart() -> None:
    told = [_told(0, 0, 2, (0, 1)), _told(1, 2, 3, (0, 1, 2))]
    apart = Plan((UnitPlan("unit", (Replica((Stage(0, 2, (0,)), Stage(2, 3, (1,)))),)),))
    together = Plan((UnitPlan("unit", tuple(Replica((Stage(0, 3, (rank,)),)) for rank in (0, 1))),))
    kept, merged = (decide_reuse(told, 5, plan, WEIGHTS) for plan in (apart, together))
    assert kept is not None
    assert {layer for _, layer in kept.covered()} == {0, 1, 2}
    assert merged is not None
    assert {layer for _, layer in merged.covered()} == {1}


def test_shared_work_is_salvaged_only_if_its_ranks_stay_together() -> None:
    def told(rank: int, samples: tuple[int, ...]) -> AccumulationReport:
        return AccumulationReport(rank, 5, tuple(range(8)), (LayerShare(("unit", 1), (0, 1), (2, 1, 1), samples),), ())

    def plan(*stages: Stage) -> Plan:
        return Plan((UnitPlan("unit", tuple(Replica((stage,)) for stage in stages)),))

    both, apart = plan(Stage(0, 3, (0, 1), tp=2)), plan(Stage(0, 3, (0,)), Stage(0, 3, (1,)))
    alike = [told(0, (1, 2)), told(1, (1, 2))]
    assert decide_reuse(alike, 5, both, WEIGHTS) is not None
    assert decide_reuse(alike, 5, apart, WEIGHTS) is None
    assert decide_reuse([told(0, (1, 2)), told(1, (1,))], 5, both, WEIGHTS) is None
    assert decide_reuse([told(0, (1, 2)), None], 5, both, WEIGHTS) is None


def test_handover_counts_once_and_tied_weight_moves_once() -> None:
    told = [_told(0, 0, 3, (0, 1, 2))]
    alone = Plan((UnitPlan("unit", (Replica((Stage(0, 3, (0,)),)),)),))
    kept = decide_reuse(told, 5, alone, WEIGHTS, [(0, _told(1, 0, 3, (4, 5)))])
    assert kept is not None
    assert _missing(kept) == {3, 6, 7}
    assert {(move.source, move.target) for move in kept.moves} == {(0, 0), (1, 0)}
    assert len(kept.moves) == 2 * 4  # a tied weight once
    assert sum(share.values["unit"] for _, share in kept.losses) == 2.0
    assert decide_reuse(told, 5, alone, WEIGHTS, [(0, _told(1, 0, 3, (2, 4)))]) is None
    late = decide_reuse(told, 5, alone, WEIGHTS, [(0, replace(_told(1, 0, 3, (4, 5)), step=4))])
    assert late is not None
    assert _missing(late) == {3, 4, 5, 6, 7}


def test_what_ranks_tell_of_a_step_arrives_as_it_was() -> None:
    told = replace(_told(1, 0, 3, (0, 4)), unused=frozenset({"middle"}))
    assert AccumulationReport.from_json(told.to_json()) == told


def _several(case: Case) -> bool:
    return len(case.plan.ranks) > 1


def check_exact(workers: WorkerPool, case: Case, lost: list[Lost], zero: str, gives: bool) -> None:
    """Check that results have the same bits as those of one undisturbed rank."""
    layers = {name: len(unit.layers) for name, unit in build_model(case, "meta").units.items()}
    alone = Plan(
        tuple(
            UnitPlan(unit.name, (Replica((Stage(0, layers[unit.name], (0,)),)),), unit.feeds)
            for unit in case.plan.units
        )
    )
    (wanted,) = check(workers, replace(case, plan=alone), [], "none", exact=True)
    for result in check(workers, case, lost, zero, exact=True, gives=gives):
        assert result["loss"] == wanted["loss"]
        assert result["losses"] == wanted["losses"]
        assert result["norm"] == wanted["norm"]
        for key, gradient in result["gradients"].items():
            assert torch.equal(gradient, part_of(wanted["gradients"], key)), key


def _plain(case: Case) -> bool:
    return _several(case) and not case.tied and all(len(p.stage.ranks) == 1 for p in case.plan.stages())


LOSSES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 40)), min_size=1, max_size=2)


@settings(max_examples=1, **COMMON)
@given(case=cases().filter(_several), lost=LOSSES, zero=st.sampled_from(["none", "node", "all"]), gives=st.booleans())
def test_step_with_lost_ranks_has_undisturbed_gradients(
    workers: WorkerPool, case: Case, lost: list[Lost], zero: str, gives: bool
) -> None:
    check(workers, case, lost[: len(case.plan.ranks) - 1], zero, gives=gives)


@pytest.mark.slow
@settings(max_examples=60, **COMMON)
@given(case=cases().filter(_several), lost=LOSSES, zero=st.sampled_from(["none", "node", "all"]), gives=st.booleans())
def test_many_steps_that_lost_ranks_have_the_gradients_of_others(
    workers: WorkerPool, case: Case, lost: list[Lost], zero: str, gives: bool
) -> None:
    check(workers, case, lost[: len(case.plan.ranks) - 1], zero, gives=gives)


@settings(max_examples=1, **COMMON)
@given(case=cases().filter(_plain), lost=LOSSES, zero=st.sampled_from(["none", "node", "all"]), gives=st.booleans())
def test_deterministic_step_has_bits_of_one_rank_after_any_loss(
    workers: WorkerPool, case: Case, lost: list[Lost], zero: str, gives: bool
) -> None:
    check_exact(workers, case, lost[: len(case.plan.ranks) - 1], zero, gives)


@pytest.mark.slow
@settings(max_examples=60, **COMMON)
@given(case=cases().filter(_plain), lost=LOSSES, zero=st.sampled_from(["none", "node", "all"]), gives=st.booleans())
def test_many_deterministic_steps_have_the_bits_of_one_rank(
    workers: WorkerPool, case: Case, lost: list[Lost], zero: str, gives: bool
) -> None:
    check_exact(workers, case, lost[: len(case.plan.ranks) - 1], zero, gives)
