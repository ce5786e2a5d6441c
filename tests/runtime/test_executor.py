"""The executor apart from its numbers: divergence, failures, bounded buffers, no needless gradients, times."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases.engine_case import BATCHES, CASE, PLAN, build_model, build_samples
from dilatant import Encoder, MultimodalModel, ParallelSpec, parallelize
from dilatant.comm.comm import Comm
from dilatant.comm.errors import CommAborted
from dilatant.config.errors import UserError
from dilatant.models.language.language_stage import LanguageStage
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.executor import ActionFailed, Executor, _Piece
from dilatant.runtime.runtime import Execution, Runtime
from dilatant.runtime.state.holders import trainable_layers
from dilatant.runtime.step.agreement import Diverged
from dilatant.runtime.step.step_result import StepResult
from dilatant.runtime.step.unfinished_step import Ledger
from dilatant.schedule.families.families import gpipe, one_f_one_b, zero_bubble_h1
from dilatant.schedule.schedule import Action, ActionKind, Assignment, Schedule
from dilatant.schedule.simulator.graph import ScheduleError
from dilatant.schedule.trainability import trainability_of
from harness.worker_pool import Worker, WorkerPool
from oracles.engine_step import expected as oracle


# vision: embedding, 2 blocks, norm, projector on ranks 0 and 1; language: embedding, 2 blocks, head on rank 2.
def _schedule(runtime: Runtime, family: Any = one_f_one_b) -> Schedule:
    return family(PLAN, CASE.assignment, trainability_of(PLAN, trainable_layers(runtime.model.units)))


def _execute(runtime: Runtime, samples: Any, assignment: Assignment, schedule: Schedule) -> StepResult:
    return runtime.execute(samples, runtime.prepare(samples, assignment, schedule))


def _runtime(worker: Worker) -> tuple[Runtime, Comm]:
    comm = Comm(worker.store, worker.rank, worker.size)
    return Runtime(
        build_model(CASE, "meta"), PLAN, comm, seed=5, execution=Execution(look_ahead=1, check_transport=True)
    ), comm


def _one_rank_differs(worker: Worker) -> None:
    runtime, comm = _runtime(worker)
    samples, sent = build_samples(CASE), []
    _execute(runtime, samples, CASE.assignment, _schedule(runtime))  # opens the edges, so nothing waits for that
    for edge in runtime._transport._edges.values():
        edge.send = lambda *given: sent.append(given)
    schedule = _schedule(runtime, gpipe if worker.rank == 1 else one_f_one_b)
    with pytest.raises(Diverged, match="the schedule of rank 1 differs"):
        _execute(runtime, samples, CASE.assignment, schedule)
    assert not sent
    comm.close()


def test_rank_with_different_schedule_is_named_before_transfers(workers: WorkerPool) -> None:
    workers.run(_one_rank_differs, 3)


def _one_sample_is_broken(worker: Worker) -> None:
    runtime, comm = _runtime(worker)
    samples = build_samples(CASE)
    if worker.rank == 0:  # of a wrong shape, on the rank that encodes it
        pixels = torch.zeros(1, 5, 8, 8).numpy()
        samples[3] = replace(samples[3], media={"vision": {"pixel_values": pixels}})
    expected = (
        (ActionFailed, r"rank 0, vision replica 0 stage 0 \(layers 0 to 2\), F of microbatch 1 with samples .*sample-3")
        if worker.rank == 0
        else (CommAborted, "rank 0 failed: rank 0, vision replica 0 stage 0 .*sample-3")
    )  # fmt: skip
    with pytest.raises(expected[0], match=expected[1]):
        _execute(runtime, samples, CASE.assignment, _schedule(runtime))
    runtime.close()
    comm.close()


def test_failing_action_is_named_with_its_samples_on_every_rank(workers: WorkerPool) -> None:
    workers.run(_one_sample_is_broken, 3)


def _memory_runs_out(worker: Worker) -> None:
    runtime, comm = _runtime(worker)

    def run(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for stage in runtime._executor._stages.values():
        if stage.placed.unit == "vision":
            stage.module.run = run
    with pytest.raises((ActionFailed, CommAborted), match=r"CUDA out of memory; a smaller train\.row_tokens"):
        _execute(runtime, build_samples(CASE), CASE.assignment, _schedule(runtime))
    runtime.close()
    comm.close()


def test_where_memory_runs_out_the_remedies_are_named(workers: WorkerPool) -> None:
    workers.run(_memory_runs_out, 3)


def _loss_is_infinite(worker: Worker) -> None:
    runtime, comm = _runtime(worker)
    if "language.head.lm_head.weight" in runtime.parameters:
        with torch.no_grad():
            runtime.parameters["language.head.lm_head.weight"].fill_(float("nan"))
    result = _execute(runtime, build_samples(CASE), CASE.assignment, _schedule(runtime))
    assert math.isnan(result.loss)
    assert result.nonfinite_samples == tuple(f"sample-{number}" for number in range(6))
    comm.close()


def test_every_rank_knows_the_samples_of_a_nonfinite_loss(workers: WorkerPool) -> None:
    workers.run(_loss_is_infinite, 3)


def _one_rank_is_to_stop(worker: Worker, stopping: int | None) -> bool:
    runtime, comm = _runtime(worker)
    samples = build_samples(CASE)
    step = runtime.prepare(samples, CASE.assignment, _schedule(runtime))
    result = runtime.execute(samples, step, should_stop=lambda: worker.rank == stopping)
    comm.close()
    return result.should_stop


@pytest.mark.parametrize("stopping", [None, 1])
def test_where_one_rank_is_to_stop_all_do(workers: WorkerPool, stopping: int | None) -> None:
    assert workers.run(_one_rank_is_to_stop, 3, stopping) == [stopping is not None] * 3


def _count_messages(worker: Worker) -> tuple[list[str], bool]:
    runtime, comm = _runtime(worker)
    sent: list[str] = []
    transport_send = runtime._transport.send

    def send(message: Any, rows: Any) -> None:
        sent.append(f"{message.producer.kind}{message.producer.stage}-{message.consumer.stage}")
        transport_send(message, rows)

    runtime._transport.send = send  # type: ignore[method-assign]
    graphs: list[bool] = []
    for module in runtime.modules.values():
        module.register_forward_hook(
            lambda _, __, output: graphs.append(isinstance(output, torch.Tensor) and output.requires_grad)
        )
    _execute(runtime, build_samples(CASE), CASE.assignment, _schedule(runtime))
    runtime.close()
    comm.close()
    return sent, any(graphs)


def test_frozen_first_stage_has_no_graph_and_gets_no_gradient(workers: WorkerPool) -> None:
    (frozen, has_graph), (projector, _), (language, _) = workers.run(_count_messages, 3)
    assert frozen == ["F0-1"] * 3
    assert not has_graph
    assert projector == ["F1-2"] * 3
    assert language == ["B2-1"] * 3


def test_predictions_keep_nothing_for_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, builds_graph, run = build_model(CASE), [], LanguageStage.run

    def watched(stage: Any, *given: Any) -> Any:
        builds_graph.append(torch.is_grad_enabled())
        return run(stage, *given)

    runtime = parallelize(model, {name: ParallelSpec() for name in model.units}, colocated={"vision": "language"})
    monkeypatch.setattr(LanguageStage, "run", watched)
    runtime.predict(build_samples(CASE))
    runtime.close()
    assert builds_graph
    assert not any(builds_graph)


def test_clipping_scales_large_gradients_and_keeps_small_ones() -> None:
    model = build_model(CASE)
    runtime = parallelize(model, {name: ParallelSpec() for name in model.units}, colocated={"vision": "language"})
    norm = runtime.execute(build_samples(CASE)).grad_norm
    gradients = {name: p.grad.clone() for name, p in runtime.parameters.items() if p.grad is not None}
    assert runtime.clip_grad_norm_(2 * norm) == pytest.approx(norm)
    assert all(torch.equal(runtime.parameters[name].grad, grad) for name, grad in gradients.items())
    runtime.clip_grad_norm_(norm / 4, norm)
    for name, grad in gradients.items():
        # fp32, and torch adds 1e-6 to the norm
        torch.testing.assert_close(runtime.parameters[name].grad, grad / 4, rtol=1e-4, atol=0.0)
    runtime.close()


def test_row_pieces_from_several_senders_are_ordered_and_summed() -> None:
    """Samples 0, 1 and 2 have 1, 2 and 1 rows; all values of a message are its name, a power of ten."""
    counts = {2: 1, 0: 1, 1: 2}  # in the order wanted
    executor = Executor.__new__(Executor)
    executor._device = torch.device("cpu")
    executor._take = lambda message: torch.full(  # type: ignore[method-assign]
        (sum(counts[sample] for sample in message.samples), 2), float(message.name)
    )
    boundary = SimpleNamespace(width=2, dtype=torch.float32)

    def assembled(*messages: tuple[int, tuple[int, ...]]) -> list[float]:
        given = [SimpleNamespace(name=name, samples=samples) for name, samples in messages]
        return executor._assemble(given, counts, boundary)[:, 0].tolist()  # type: ignore[arg-type]

    assert assembled((1, (1, 2)), (10, (0, 1))) == [1, 10, 11, 11]
    assert assembled((1, (2, 0, 1)), (10, (1,)), (100, (2, 0, 1))) == [101, 101, 111, 111]
    assert assembled((1, (0,))) == [0, 1, 0, 0]


def test_gradients_for_rows_of_frozen_source_are_still_received() -> None:
    executor, taken = Executor.__new__(Executor), []
    executor._ledger = Ledger()
    executor._take = lambda message: taken.append(message.name)  # type: ignore[method-assign]
    executor._recorder = SimpleNamespace(computing=list, done=list)  # type: ignore[assignment]
    executor._unit_of_stage = {0: "vision", 1: "language"}
    action = Action(ActionKind.B, 0, 0, (0,))
    executor._pieces = {(0, 0, (0,)): _Piece({}, {"language": torch.zeros(1, 2)}, {})}
    producer = SimpleNamespace(stage=1)
    received = [SimpleNamespace(name=name, producer=producer) for name in ("first", "second")]
    stage = SimpleNamespace(outbound={"language": None}, inbound={}, sharded=None)
    routes = SimpleNamespace(received={action: received})
    executor._backward(stage, action, (0,), routes, False)  # type: ignore[arg-type]
    assert taken == ["first", "second"]
    assert not executor._pieces


def _most_receives(worker: Worker) -> int:
    runtime, comm = _runtime(worker)
    most = 0
    take = runtime._transport.receive

    def receive(message: Any) -> Any:
        nonlocal most
        rows = take(message)
        most = max(most, *(len(inbox._posted) for inbox in runtime._transport._inboxes.values()))
        return rows

    runtime._transport.receive = receive  # type: ignore[method-assign]
    _execute(runtime, build_samples(CASE), CASE.assignment, _schedule(runtime, gpipe))
    runtime.close()
    comm.close()
    return most


def test_receives_are_posted_no_further_ahead_than_asked(workers: WorkerPool) -> None:
    assert max(workers.run(_most_receives, 3)) == 1


def _forgets_backwards(worker: Worker) -> str:
    comm = Comm(worker.store, worker.rank, worker.size)
    every = one_f_one_b(PLAN, CASE.assignment).actions
    forwards = Schedule({rank: tuple(a for a in actions if a.kind == "F") for rank, actions in every.items()})
    # A rank that is late hears of it where it still builds.
    with pytest.raises((ScheduleError, CommAborted), match="have no backward") as refused:  # noqa: PT012
        runtime = Runtime(build_model(CASE, "meta"), PLAN, comm, seed=5)
        _execute(runtime, build_samples(CASE), CASE.assignment, forwards)
    comm.close()
    return refused.type.__name__


def test_schedule_missing_required_backwards_is_refused(workers: WorkerPool) -> None:
    # The first rank that finds out tells the others, which may not have looked yet.
    frozen, *others = workers.run(_forgets_backwards, 3)
    assert frozen == "CommAborted"
    assert "ScheduleError" in others


def _measure(worker: Worker) -> Any:
    runtime, comm = _runtime(worker)
    schedule = _schedule(runtime)
    for _ in range(2):
        result = _execute(runtime, build_samples(CASE), CASE.assignment, schedule)
    measured = runtime.measured()
    order = [action.action for action in measured if action.rank == worker.rank]
    assert order == list(schedule.actions[worker.rank])
    runtime.close()
    comm.close()
    return measured, result.loss


def test_actions_are_measured_in_order_and_shared_with_all_ranks(workers: WorkerPool) -> None:
    results = workers.run(_measure, 3)
    assert results[0] == results[1] == results[2]
    measured, _ = results[0]
    assert all(action.seconds > 0 and action.waited_seconds >= 0 for action in measured)
    by_rank = {rank: [a for a in measured if a.rank == rank] for rank in range(3)}
    for actions in by_rank.values():  # a rank does one thing at a time
        assert all(a.end <= b.start + 1e-4 for a, b in itertools.pairwise(actions))
    assert 1 in {a.waited_for for a in by_rank[2]}


def _most_kept_sends(worker: Worker) -> tuple[int, int]:
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(build_model(TRAINED, "meta"), PLAN, comm, seed=5)
    samples = build_samples(TRAINED)
    order = tuple((k,) for k in range(len(samples)))
    assignment = Assignment({"vision": (order,), "language": (order,)})
    kept = [0]
    transport_send = runtime._transport.send

    def send(message: Any, rows: Any) -> None:
        transport_send(message, rows)
        kept.append(sum(len(sending) for sending in runtime._transport._sending.values()))

    runtime._transport.send = send  # type: ignore[method-assign]
    _execute(runtime, samples, assignment, one_f_one_b(PLAN, assignment))
    runtime.close()
    comm.close()
    return max(kept), len(kept) - 1


TRAINED = replace(CASE, frozen=(), texts=((6, (1,)),) * 12)


def test_what_was_sent_is_let_go_long_before_the_step_ends(workers: WorkerPool) -> None:
    for most, sent in workers.run(_most_kept_sends, 3):
        assert sent >= 12
        assert most <= 6  # the depth of this pipeline, there and back


def _count_forwards(worker: Worker, family: Any) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    comm = Comm(worker.store, worker.rank, worker.size)
    case = replace(CASE, recompute="block")
    runtime = Runtime(build_model(case, "meta"), PLAN, comm, seed=5)
    runs: dict[str, int] = {}

    def count(name: str) -> Any:
        def counted(*_: Any) -> None:
            runs[name] = runs.get(name, 0) + 1

        return counted

    for index, module in runtime.modules.items():
        blocks = module.model.model.layers if index == 2 else module.model.encoder.layers
        for number, block in enumerate(blocks):
            block.mlp.register_forward_pre_hook(count(f"{index}.{number}"))
    _execute(runtime, build_samples(case), CASE.assignment, _schedule(runtime, family))
    gradients = {name: p.grad for name, p in runtime.parameters.items() if p.grad is not None}
    runtime.close()
    comm.close()
    return runs, gradients


@pytest.mark.parametrize("family", [one_f_one_b, zero_bubble_h1])
def test_blocks_recompute_once_and_frozen_blocks_never(workers: WorkerPool, family: Any) -> None:
    gradients: dict[str, torch.Tensor] = {}
    runs: dict[str, int] = {}
    for counted, own in workers.run(_count_forwards, 3, family):
        runs |= counted
        gradients |= own
    # Stage 0 and 1 hold the frozen encoder's blocks; three microbatches each.
    assert runs == {"0.0": 3, "0.1": 3, "2.0": 6, "2.1": 6}
    _, expected, _ = oracle(replace(CASE, recompute="none"), steps=1)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7, msg=name)


ALONE = Plan((UnitPlan("language", tuple(Replica((Stage(0, 4, (rank,)),)) for rank in (0, 1)), ()),))


def _replicas_differ(worker: Worker) -> None:
    case = replace(CASE, encoders=(), frozen=(), texts=((6, ()),) * 2, plan=ALONE)
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(build_model(case, "meta"), ALONE, comm, seed=5)
    samples = build_samples(case)
    if worker.rank == 1:
        samples[1] = replace(samples[1], id="another")
    assignment = Assignment({"language": (((0,),), ((1,),))})
    begun: list[int] = []
    runtime._sync.entering_last_backward = begun.append  # type: ignore[method-assign]
    with pytest.raises(Diverged, match=r"the global batch of rank \d differs"):
        _execute(runtime, samples, assignment, one_f_one_b(ALONE, assignment))
    assert not begun
    comm.close()


def test_replicas_without_messages_agree_before_gradient_sync(workers: WorkerPool) -> None:
    workers.run(_replicas_differ, 2)


def _gradients_of_frozen_rows(worker: Worker) -> list[bool]:
    case = replace(CASE, frozen=("vision",))
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(build_model(case, "meta"), PLAN, comm, seed=5)
    wanted: list[bool] = []

    def watch(module: Any) -> None:
        run = module.run

        def watched(data: Any, samples: Any, inbound: Any) -> Any:
            wanted.extend(rows.requires_grad for name, rows in inbound.items() if name != module.unit)
            return run(data, samples, inbound)

        module.run = watched

    for module in runtime.modules.values():
        watch(module)
    _execute(runtime, build_samples(case), CASE.assignment, _schedule(runtime))
    runtime.close()
    comm.close()
    return wanted


def test_rows_behind_which_nothing_trains_need_no_gradient(workers: WorkerPool) -> None:
    assert workers.run(_gradients_of_frozen_rows, 3) == [[], [], [False] * 3]


def _too_many_tokens(worker: Worker) -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 72), torch.nn.Unflatten(1, (6, 12)))
    stated: dict[str, Any] = {"kind": "image", "row_shape": (3, 8, 8), "width": 12, "input_name": "input"}
    encoder = Encoder(module, "linear", tokens_per_row=4, **stated)
    model = MultimodalModel(
        {"vision": encoder}, build_model(replace(CASE, encoders=(), frozen=())).language.model, seed=0
    )
    plan = Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, 2, (0,)),)),), ("language",)),
            UnitPlan("language", (Replica((Stage(0, 4, (0,)),)),)),
        )
    )
    comm = Comm(worker.store, worker.rank, worker.size)
    samples = [replace(s, media={"vision": {"input": s.media["vision"]["pixel_values"]}}) for s in build_samples(CASE)]
    runtime = Runtime(model, plan, comm)
    assignment = Assignment({"vision": (BATCHES,), "language": (BATCHES,)})
    with pytest.raises(UserError, match=r"vision gives rows of shape \[12, 16\] where \[8, 16\] were expected"):
        _execute(runtime, samples, assignment, one_f_one_b(plan, assignment))
    comm.close()


def test_a_module_that_gives_other_rows_than_are_stated_is_named(workers: WorkerPool) -> None:
    workers.run(_too_many_tokens, 1)


def _with_a_generator(worker: Worker) -> None:
    case = replace(CASE, encoders=(), frozen=(), texts=((6, ()),) * 4)
    case = replace(case, generators=(("height", 6, "linear", 0.0),), drawn=((1,), (0,), (2,), (1,)))
    units = (
        UnitPlan("language", (Replica((Stage(0, 4, (0,)),)),), ("height",)),
        UnitPlan("height", (Replica((Stage(0, 1, (0,)), Stage(1, 2, (0,)))),)),
    )
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(build_model(case, "meta"), Plan(units), comm, seed=5)
    samples = build_samples(case)
    said = runtime.predict(samples)
    assert [len(said[index].tokens) for index in range(4)] == [int((s.labels[1:] != -100).sum()) for s in samples]
    result = runtime.execute(samples)
    assert result.losses["height"] > 0
    assert result.loss == result.losses["language"]
    # What counts nothing gives no gradient, but a gradient of nothing.
    assert not any(p.grad.any() for n, p in runtime.parameters.items() if n.startswith("height"))
    numbers = samples[2].media["height"]["numbers"]
    samples[2] = replace(samples[2], media={"height": {"numbers": numbers[:1]}})
    with pytest.raises(UserError, match="'sample-2' has 4 places in its text, 2 for an item, but targets of 1 items"):
        runtime.execute(samples)
    comm.close()


def test_generator_skips_predictions_and_names_unfit_samples(workers: WorkerPool) -> None:
    workers.run(_with_a_generator, 1)
