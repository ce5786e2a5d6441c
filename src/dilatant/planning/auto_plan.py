"""Automatic planning (`parallel: auto`): the plan that a run makes for itself."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from rich.console import Console

from dilatant.comm.store.store import Store
from dilatant.config import Config, UserError, load_config
from dilatant.config.environment import LaunchPlace
from dilatant.config.plan import ClusterConfig
from dilatant.data.readers.python_records import is_map_style
from dilatant.plan.plan import Plan
from dilatant.planning.layout import TrainingPlan
from dilatant.planning.planning_process import PlanningJob, plan_in_process
from dilatant.planning.problem.planned_hardware import devices_per_node
from dilatant.report.run_folder import RunFolder
from dilatant.report.say import say, show_progress

_KEY = "plan"
_SIGNS = "plan/signs"
_LOOK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices that a run may use. launcher: what started a process for each, all of which must be used; empty if the
    run starts its own ranks."""

    nodes: int
    per_node: int
    launcher: str = ""

    @property
    def count(self) -> int:
        return self.nodes * self.per_node

    def cluster(self, config: ClusterConfig) -> ClusterConfig:
        """Return these devices with the config's hardware; the config's groups are kept if they have as many."""
        if config.num_devices == self.count:
            return config
        return config.model_copy(update={"groups": None, "nodes": self.nodes, "gpus_per_node": self.per_node})


def is_planned_here(config: Config, place: LaunchPlace | None) -> bool:
    """Return True if the run plans for itself: on request, or by default with more than one device."""
    parallel = config.parallel
    if parallel.is_laid_out:
        return False
    if parallel.auto is not None:
        return parallel.auto
    return place is not None or torch.cuda.device_count() > 1


def devices_at_hand(config: Config, place: LaunchPlace | None) -> Devices:
    """Return one device for each process of an outer launcher, else those of this machine."""
    if place is None:
        return Devices(1, devices_per_node(config.cluster))
    # Machines with different numbers of processes count as smaller, equal machines: links are not taken for faster
    # than they are.
    alike = math.gcd(place.local_size, place.size)
    return Devices(place.size // alike, alike, place.launcher)


def choose_plan(
    config: Config,
    devices: Devices,
    folder: RunFolder,
    continues: bool,
    console: Console,
    sign: Callable[[], None] = lambda: None,
) -> TrainingPlan | None:
    """Return the plan to train with and print what it is and why; None for one device, which needs no plan.

    continues: the run resumes from a checkpoint; it keeps its plan if the number of devices is the same. sign:
    heartbeat, called now and then for a launcher that waits. Raises UserError.
    """
    if devices.count == 1:
        say(console, "one device: nothing to plan")
        return None
    if continues:
        kept, why = _previous_plan(folder, devices.count)
        if kept is not None:
            say(console, f"trains on as it was planned before ({folder.path / 'plan.json'})")
            return kept
        if why:
            say(console, f"planned anew: {why}")
    own = config.part("train_data")
    if any(source.streaming for source in config.data.train) or (own and not is_map_style(own.value)):
        raise UserError(
            "parallel: auto plans by the sizes of samples, which a stream does not tell ahead; do not stream, name a "
            "layout (parallel.units), or train in one process (parallel: single)"
        )
    job = PlanningJob(
        config.model_copy(update={"cluster": devices.cluster(config.cluster)}), devices.launcher, folder.path
    )
    with show_progress(console, "planning") as show:

        def progress(text: str) -> None:
            sign()
            show(text)

        chosen = plan_in_process(job, progress)
    for line in chosen.lines:
        say(console, line)
    return TrainingPlan.from_json(chosen.plan_json)


def _previous_plan(folder: RunFolder, devices: int) -> tuple[TrainingPlan | None, str]:
    """Return the plan that this run trained with before, or why it does not fit this many devices."""
    path = folder.path / "plan.json"
    try:
        if load_config(folder.config, trust_remote_code=True).parallel.is_laid_out:
            return None, ""  # laid out by hand before, to be planned now
        plan = TrainingPlan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UserError):
        return None, ""
    except ValueError as error:
        return None, f"{path}: {error}"
    if len(plan.plan.ranks) <= plan.plan.ranks[-1]:
        return None, "the last plan left ranks idle"
    before = _planned_devices(folder, plan)
    if before != devices:
        return (None, f"the run had {before} {'device' if before == 1 else 'devices'}, and there are {devices} now")
    return plan, ""


def _planned_devices(folder: RunFolder, plan: TrainingPlan) -> int:
    """Return the number of devices that the plan was made for, of which a first plan may leave some idle."""
    first = folder.path / "plan"
    with suppress(OSError, UserError, ValueError):
        planned = Plan.from_json((first / "plan.json").read_text(encoding="utf-8"))
        if len(planned.ranks) == len(plan.plan.ranks):  # else recovery made the plan
            cluster = load_config(first / "config.yaml", trust_remote_code=True).cluster
            return cluster.num_devices or cluster.nodes * (cluster.gpus_per_node or len(plan.plan.ranks))
    return len(plan.plan.ranks)


def share_plan(
    store: Store, rank: int, timeout_seconds: float, choose: Callable[[Callable[[], None]], TrainingPlan | None]
) -> TrainingPlan | None:
    """Return what `choose` found on rank 0 to all ranks of an outer launcher, before any of them builds anything.

    choose: gets a heartbeat function to call while it works. All ranks raise its UserError, and one if rank 0 sends no
    heartbeat for `timeout_seconds`.
    """
    if rank == 0:
        try:
            plan = choose(lambda: _sign(store))
        except UserError as error:
            store.set(_KEY, json.dumps({"refused": str(error)}))
            raise
        except BaseException:
            store.set(_KEY, json.dumps({"refused": "rank 0 failed while it planned"}))
            raise
        store.set(_KEY, json.dumps({"plan": None if plan is None else plan.to_json()}))
        return plan
    answer = json.loads(_await(store, timeout_seconds))
    if "refused" in answer:
        raise UserError(answer["refused"])
    return None if answer["plan"] is None else TrainingPlan.from_json(answer["plan"])


def _sign(store: Store) -> None:
    store.add(_SIGNS, 1)


def _await(store: Store, timeout_seconds: float) -> bytes:
    waited, signs = 0.0, 0
    while waited < timeout_seconds:
        try:
            store.wait([_KEY], timedelta(seconds=_LOOK_SECONDS))
        except TimeoutError:
            now = store.add(_SIGNS, 0)
            waited, signs = (waited + _LOOK_SECONDS, signs) if now == signs else (0.0, now)
            continue
        return store.get(_KEY)
    raise UserError(
        f"rank 0 has planned for over {timeout_seconds:g} s without a sign; raise parallel.timeout_seconds, or plan "
        "once with `dilatant plan` and name the file in parallel.plan"
    )
