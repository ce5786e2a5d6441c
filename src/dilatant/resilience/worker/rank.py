"""Resilient rank: in every generation, build a new trainer with the state of the previous one, and train."""

from __future__ import annotations

import contextlib
import copy
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from dilatant.comm.comm import Comm
from dilatant.comm.errors import CommAborted, CommTimeout
from dilatant.comm.launch import Worker
from dilatant.comm.rendezvous import end_generation
from dilatant.comm.store.store import Store, connect
from dilatant.config import Config, UserError
from dilatant.config.files.own_files import open_in_place
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.templates.copies import Redundancy
from dilatant.planning.layout import TrainingPlan
from dilatant.report.run_folder import RunFolder
from dilatant.report.say import say, warn
from dilatant.report.text.wording import listed
from dilatant.resilience.partial_step.exchange import adopt_gradients, inherit_state
from dilatant.resilience.partial_step.handover import export_gradients
from dilatant.resilience.processes.messages import Seat, StoreAt
from dilatant.resilience.protocol.agent import Rebuild
from dilatant.resilience.protocol.values import ASKED, GOES_ON, NO_STATE
from dilatant.resilience.state_transfer import StateLost
from dilatant.resilience.status import REBUILDS, RebuildRecord, write_history
from dilatant.resilience.worker.generation_plan import (
    TOO_LARGE,
    CannotGoOn,
    GenerationPlans,
    after_saving,
    idle_ranks,
    nodes_of,
    pipelines_text,
    publish_plan,
    report_failure,
)
from dilatant.resilience.worker.save_holdings import save_holdings
from dilatant.resilience.worker.worker_link import Fenced, RunEnded, WorkerLink
from dilatant.training.checkpoints.checkpoint import newest_valid
from dilatant.training.checkpoints.starting_point import StartingPoint, agreed_checkpoint
from dilatant.training.commit import RunMembership
from dilatant.training.feeding.decoding import PersistentPool, warm_up_next_owner
from dilatant.training.prepare import PreparedRun, prepare
from dilatant.training.rank import RunResult, Show, begin_folder, begin_state, console_for, train_to_end
from dilatant.training.stop_signal import StopSignal
from dilatant.training.trainer import Trainer

STORE_SECONDS = 30.0
"""Timeout for connecting to a store that was reachable a moment ago."""
LATER_SECONDS = 1.0
"""Delay after a generation begins before non-urgent work starts, so that no rank waits for it."""
FOLDER = "resilience"
_BEGUN = "resilience/begun"
"""Key in the run's store, set once the run has its own folder."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldState:
    """The state of the generation of `order`: its plan, and a trainer that no longer communicates once it is over.
    redundancy: copies of layers that the generation began with."""

    order: Rebuild
    trainer: Trainer
    planned: TrainingPlan
    redundancy: Redundancy

    @property
    def generation(self) -> int:
        return self.order.generation


def train_rank_resiliently(
    worker: Worker, config: Config, plan_json: str, start: StartingPoint, show: Show, seats: Sequence[Seat]
) -> RunResult | None:
    """Run a `ResilientRank` in the seat of this rank."""
    return ResilientRank(worker, config, plan_json, start, show, seats[worker.rank]).run()


class Stopwatch:
    """Records the seconds between `lap` calls by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._since
        self._since = now


class ResilientRank:
    """One worker, whose rank may change between generations."""

    def __init__(
        self, worker: Worker, config: Config, plan_json: str, start: StartingPoint, show: Show, seat: Seat
    ) -> None:
        self._worker = worker
        self._config = config
        self._start = start
        self._show = show
        self._seat = seat
        self._store_at: StoreAt | None = None
        self._rank = worker.rank
        self._stop = StopSignal()
        self._link = WorkerLink(
            seat.port,
            seat.token,
            seat.index,
            self._unblock,
            config.resilience.lease_seconds / 4,
            self._stop.request,
            self._hand_over,
        )
        initial = TrainingPlan.from_json(plan_json)
        try:
            self._prepared: PreparedRun = prepare(config, initial)
        except UserError as error:
            self._link.lost(str(error))
            raise
        self._shards = bool(initial.shard)
        # Sums of sharded gradients are of all ranks of a node, of which each has a part.
        self._salvages = config.resilience.salvage and not self._shards
        self._folder = RunFolder(config.output_dir)
        self._pool = PersistentPool()
        self._shown_plan: TrainingPlan | None = None
        self._held: HeldState | None = None
        self._pending: HeldState | None = None
        self._trainers: list[Trainer] = []
        self._opened: list[Comm] = []
        self._is_joining = False
        self._later: threading.Timer | None = None
        self._spare: MultimodalModel | None = None
        self._is_torn = False
        self._mistake: UserError | None = None
        self._thin = ""
        self._plans = GenerationPlans(config, self._prepared, initial)
        self._plans.warm_up()
        self._link.warm()

    def run(self) -> RunResult | None:
        """Train; returns None if the run continues without this worker. Raises errors that stop the run for all
        workers, and RunEnded when there are too few nodes."""
        result: RunResult | None = None
        with contextlib.closing(self._pool), self._stop as stop:
            while True:
                try:
                    order = self._await_rebuild()
                    try:
                        result = self._generation(order, stop)
                        self._link.await_end("" if result.finished else self._thin or ASKED)
                        return result
                    except RunEnded:
                        raise
                    except Fenced:
                        pass
                    except Exception as error:
                        self._explain(error, order)
                except RunEnded:
                    ended = self._link.ended
                    if ended is not None and ended.is_out:
                        return None
                    if self._mistake is not None:
                        raise self._mistake from None
                    raise
                finally:
                    self._still()

    def _generation(self, order: Rebuild, stop: StopSignal) -> RunResult:
        """Join a generation and train in it to the end."""
        made = self._pending = self._made(order)
        self._link.await_activation(made.trainer.step)
        self._activate(made)  # from now on no rank returns to the previous generation
        self._later = threading.Timer(LATER_SECONDS, self._do_later, (made.trainer.comm,))
        self._later.daemon = True
        self._later.start()
        self._heed(made, stop)
        if made.trainer.rank == 0 and (idle := idle_ranks(made.planned.plan, order.members, order.workers)):
            why = (
                "weights are sharded within groups of nodes, of which these are not enough for another"
                if self._shards
                else "no pipelines that fit memory, with tensor parallelism as before, use exactly the nodes that are "
                "there"
            )
            say(console_for(self._show), f"idle until the next change: {listed(list(idle))}, since {why}")
        result = train_to_end(self._config, made.trainer, self._folder, self._show, stop)
        if made.trainer.rank == 0:
            self._show_plan()
        return result

    def _heed(self, made: HeldState, stop: StopSignal) -> None:
        """Do what the config asks for if some layers have fewer copies now."""
        if not made.redundancy.has_sunk:
            return
        shortage, then = made.redundancy.shortage, self._config.resilience.when_thin
        if made.trainer.rank == 0:
            warn(console_for(self._show), shortage)
        if then != "go_on":
            made.trainer.owes_save = True
        if then == "stop":
            self._thin = f"{shortage}; `dilatant resume` goes on with what is saved"
            stop.request()

    def _activate(self, made: HeldState) -> None:
        if self._held is not None:
            before, step = self._held.trainer.done.recent, made.trainer.step
            made.trainer.done.recent = tuple(metrics for metrics in before if metrics.step <= step)
            last = self._held.trainer.done.last
            made.trainer.done.last = last if last is not None and last.step <= step else None
        self._held, self._pending, self._is_torn = made, None, False
        made.trainer.runtime.clear_gradients()

    def _do_later(self, comm: Comm) -> None:
        """Copy the model for building the next generation, write plan and history, and prepare the decoding workers."""
        if self._spare is None:
            self._spare = copy.deepcopy(self._prepared.model)
        warm_up_next_owner(comm, self._config.data)
        if comm.rank == 0:
            self._show_plan()
            write_history(self._folder.path, self._config.output_dir)

    def _show_plan(self) -> None:
        """Write the run's current plan to its folder."""
        planned = None if self._held is None else self._held.planned
        if planned is not None and planned is not self._shown_plan:
            self._shown_plan = planned
            self._folder.write_text("plan.json", planned.to_json())

    def _await_rebuild(self) -> Rebuild:
        """Wait for the next generation, keeping the state; apply the last step if it turns out to be committed. A
        state in which an update was interrupted, for example by an out-of-memory error, counts as none."""
        if self._held is not None and self._held.trainer.is_torn:
            self._held = None
        held = self._held
        if held is None:
            order = self._link.await_rebuild(NO_STATE, 0, None)
        else:
            order = self._link.await_rebuild(held.generation, held.trainer.step, held.trainer.voted_step)
        if self._pending is not None and self._pending.generation == order.base:
            self._activate(self._pending)  # other nodes were ordered to run it
        self._pending = None
        held = self._held
        self._follow_store(held)
        if held is not None and held.generation == order.base and held.trainer.step == order.committed - 1:
            held.trainer.apply_voted()
        return order

    @property
    def _store(self) -> Store:
        assert self._worker.store is not None
        return self._worker.store

    def _follow_store(self, held: HeldState | None) -> None:
        """Connect to the current leader's store, and publish the plan there for planning the next generation. Raises
        RunEnded where the store cannot be reached: that ends this node only."""
        at = self._link.store_at or self._seat.store_at
        if at is None or at == self._store_at:
            return
        try:
            store = connect(at.host, at.port, self._seat.token, self._seat.on_one_machine, STORE_SECONDS)
        except UserError as error:
            self._link.lost(str(error))
            raise RunEnded(str(error)) from None
        self._store_at = at
        self._worker = replace(self._worker, store=store)
        if held is not None:
            publish_plan(self._store, held.order, held.planned)
            self._store.set(_BEGUN, b"")

    def _made(self, order: Rebuild) -> HeldState:
        """Build this rank's trainer for the generation, and fill it with the state that other ranks hold."""
        self._rank = order.first_rank + self._seat.index
        held = self._held if self._held is not None and self._held.generation == order.base else None
        watch, began = Stopwatch(), time.process_time()
        try:
            planned = self._plans.of(order, self._rank, self._store, self._link)
        except (CannotGoOn, UserError) as error:
            if order.base == NO_STATE:
                raise
            raise after_saving(error, self._saved(order, held)) from None
        watch.lap("plan")
        trainer = self._trainer(order, planned, order.base != NO_STATE, None if held is None else held.trainer)
        watch.lap("build")
        copied, pairs, given = 0, (0, 0), 0
        if order.base == NO_STATE:
            self._begin(trainer, planned)
        else:
            try:
                old = None if held is None else held.trainer
                copied = inherit_state(trainer, old, self._folder.checkpoints)
                watch.lap("copy")
                if self._salvages and not order.doubted:
                    pairs, given = adopt_gradients(trainer, old, order.base, self._handed_over)
                trainer.begin_steps()
                watch.lap("salvage")
            except StateLost:
                trainer.comm.world.barrier("the news that state is lost")
                self._still()
                trainer = self._trainer(order, planned, weights_follow=False, before=None)
                self._begin(trainer, planned)
                watch.lap("copy")
        redundancy = self._plans.redundancy(order, planned, self._store)
        kept, again = pairs
        record = RebuildRecord(
            order.generation,
            trainer.step,
            watch.laps,
            time.process_time() - began,
            copied,
            kept / max(1, kept + again),
            kept,
            again,
            given,
            trainer.state.stays,
            dict(redundancy.by_unit),
            redundancy.shortage,
            redundancy.has_sunk,
            idle_ranks(planned.plan, order.members, order.workers),
            pipelines_text(planned.plan),
        )
        if order.base != NO_STATE:
            costs = {f"{part}_seconds": seconds for part, seconds in watch.laps.items()}
            names = ("bytes_to_first_rank", "salvaged_share", "salvaged_pairs", "missing_pairs", "ranks_handed_over")
            trainer.recovery = {"ranks": trainer.comm.size, **{name: getattr(record, name) for name in names}, **costs}
        if trainer.rank == 0:
            with open_in_place(self._folder.path / FOLDER / REBUILDS) as file:
                file.write(msgspec.json.encode(record) + b"\n")
        return HeldState(order, trainer, planned, redundancy)

    def _saved(self, order: Rebuild, held: HeldState | None) -> str:
        """Save what this generation's ranks hold, since none of their plans can go on with it; return what is saved."""
        self._is_joining = True
        worker, seconds = self._worker, self._config.parallel.timeout_seconds
        size = sum(order.workers)
        comm = Comm(worker.store, self._rank, size, order.generation, worker.device, seconds)
        self._joined(comm)
        old, keep = None if held is None else held.trainer, self._config.train.keep_checkpoints
        try:
            step = save_holdings(comm, old, self._folder.checkpoints, keep)
            return f"step {step} is saved, and {GOES_ON}"
        except StateLost as lost:
            return f"what came after the newest checkpoint is lost, for no rank holds {lost}"

    def _trainer(self, order: Rebuild, planned: TrainingPlan, weights_follow: bool, before: Trainer | None) -> Trainer:
        """Build a trainer. If this rank's part is unchanged, it reuses the last trainer's model, whose weights stay
        untouched until all ranks are ready; otherwise it uses another copy, and the last trainer's memory is not freed
        until then: a GPU that cannot hold both has moved that to the host."""
        self._is_joining = True
        if self._link.is_fenced:
            raise Fenced
        places = tuple(nodes_of(order.workers))
        membership = RunMembership(
            order.generation, places, weights_follow, self._link, self._joined, order.reason, self._salvages, self._pool
        )
        worker = replace(self._worker, rank=self._rank, size=sum(order.workers))
        samples = self._prepared.samples
        stays = before is not None and before.runtime.stays(planned.plan, self._rank)
        if self._is_torn or before is None or not stays or before.state.is_on_host:
            self._make_room(before, planned)
            before = None
            model, self._spare = self._spare or copy.deepcopy(self._prepared.model), None
        else:
            model = before.runtime.model
        self._is_torn |= before is not None  # a partial build in the reused model cannot be undone
        checkpoints = self._folder.checkpoints
        trainer = Trainer(self._config, samples, model, planned, worker, checkpoints, membership, before)
        self._is_torn &= before is None
        self._trainers.append(trainer)
        return trainer

    def _make_room(self, before: Trainer | None, planned: TrainingPlan) -> None:
        """Move the last trainer's state to the host if this rank's device cannot hold it beside the new one. Not before
        a step that is still to be applied."""
        if before is None or self._worker.device.type == "cpu" or before.voted_step is not None:
            return
        parts = (before.runtime.plan, before.rank), (planned.plan, self._rank)
        if not before.state.is_on_host and not self._plans.planner.holds_both(*parts):
            before.state.to_host()

    def _joined(self, comm: Comm) -> None:
        self._opened.append(comm)
        self._is_joining = False

    def _begin(self, trainer: Trainer, planned: TrainingPlan) -> None:
        """Start without existing state: as configured, or, once the run has begun, from its newest checkpoint."""
        begun = self._store.check([_BEGUN])
        if trainer.rank == 0:
            shutil.rmtree(self._handed_over, ignore_errors=True)  # gradients of an earlier run
        checkpoint = self._start.checkpoint
        if begun and trainer.rank == 0:
            newest, _ = newest_valid(self._folder.checkpoints)
            checkpoint = checkpoint if newest is None else newest.path
        agreed = agreed_checkpoint(trainer.comm, checkpoint)
        begin_state(trainer, agreed is not None, self._show)
        if agreed is not None:
            trainer.restore(agreed)
        if trainer.rank == 0 and not begun:
            begin_folder(self._config, self._prepared, planned, self._folder, self._start.discards, self._show)
            self._store.set(_BEGUN, b"")

    @property
    def _handed_over(self) -> Path:
        return self._folder.path / FOLDER / "handed_over"

    def _hand_over(self) -> None:
        """Export this rank's gradients of the unfinished step, since the run continues without this rank. After a
        failure here, the others only lack these gradients."""
        held = self._held
        if held is not None and self._salvages:
            try:
                export_gradients(self._handed_over, held.generation, held.trainer.runtime.unfinished)
            except Exception as error:
                print(f"warning: this rank leaves, and could not hand over its gradients: {error}", flush=True)

    def _still(self) -> None:
        """End all communication and background work; the state is kept."""
        if self._later is not None:
            self._later.cancel()
        for trainer in self._trainers:
            with contextlib.suppress(Exception):
                trainer.close()
        for comm in self._opened:
            comm.close()
        self._trainers.clear()
        self._opened.clear()

    def _unblock(self, generation: int) -> None:
        """Interrupt everything that waits for other ranks in this generation; called by the link's thread."""
        is_joining = self._is_joining  # read before `_opened`: joining turns into open communication
        for comm in tuple(self._opened):  # in separate threads: the link must continue to receive
            end = partial(comm.abort, "this generation is over", notify_others=False)
            threading.Thread(target=end, name="dilatant-end", daemon=True).start()
        if is_joining:
            with contextlib.suppress(Exception), contextlib.closing(self._store.clone()) as store:
                end_generation(store, generation, self._rank, "this generation is over")

    def _explain(self, error: Exception, order: Rebuild) -> None:
        """Report why this rank cannot continue, unless its generation is over already. A plan that needed too much
        memory is recorded in either case."""
        is_too_large = any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__cause__))
        if is_too_large:
            with contextlib.suppress(Exception):
                self._store.append(TOO_LARGE, f"{order.generation}:{self._rank} ")
        if self._link.is_fenced:
            return
        if isinstance(error, UserError):
            self._mistake = error
        culprits = error.culprits if isinstance(error, CommTimeout) else ()
        node_of = nodes_of(order.workers)
        nodes = {order.members[node_of[rank]] for rank in culprits} - {self._seat.node}
        accuses = nodes.pop() if len(nodes) == 1 else None
        fatal = isinstance(error, UserError | CannotGoOn)
        named = str(error) if isinstance(error, CannotGoOn) else f"{type(error).__name__}: {error}"
        if not (fatal or is_too_large or isinstance(error, CommAborted | CommTimeout)):
            with contextlib.suppress(Exception):
                report_failure(self._store, order, named)
        self._link.broken(named, fatal, accuses)
