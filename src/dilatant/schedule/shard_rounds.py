"""Rounds of sharded units: which ranks take part in the collectives of an action that they do not run themselves.

Equal stages of a unit's replicas divide their weights or gradients. Each of their actions is a round of collectives, in
which all of these stages take part: mostly each with an action of its own, but replicas may have unlike numbers of
microbatches, or other orders of forwards and backwards. Every rank derives the same rounds from the step's schedule, by
executing it: an action runs as soon as its inputs exist, a round as soon as all stages are ready for the same kind of
action; where none can run, the earliest ready action begins, and the stages that are not ready only take part. The
rounds of all ranks hence follow one order, so they cannot deadlock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from dilatant.config.memory_modes import Shard
from dilatant.schedule.packed import KINDS
from dilatant.schedule.schedule import ActionKind
from dilatant.schedule.simulator.graph import ScheduleGraph

Joins = Mapping[int, tuple[tuple[int, ActionKind], ...]]
"""Index of an action of a rank (or their number) → the rounds that the rank joins before it: (its stage, kind)."""


def exchanges(kind: ActionKind, shard: Shard) -> bool:
    """Return True if actions of this kind exchange weights or gradients of a unit sharded like this."""
    return shard.startswith("weights") or (shard == "gradients" and kind in (ActionKind.B, ActionKind.W))


def shard_rounds(graph: ScheduleGraph, shard: Mapping[str, Shard]) -> dict[int, Joins]:
    """Return rank → its joins, for ranks that have any. shard: unit → what is sharded."""
    peers = {
        placed.index: (placed.unit, placed.position)
        for placed in graph.arrays.placed
        if shard.get(placed.unit, "none") != "none"
    }
    return _Execution(graph, peers, shard).run() if peers else {}


class _Execution:
    """Executes a schedule without durations. at: row by rank (its index in `packed.ranks`); `ready`: peers → stage →
    the op of a round that could begin."""

    def __init__(self, graph: ScheduleGraph, peers: Mapping[int, tuple[str, int]], shard: Mapping[str, Shard]) -> None:
        packed = graph.packed
        idle = [rank for rank in graph.arrays.ranks if rank not in packed.ranks]  # without any action
        self._ops, self._ranks = graph.row_op.tolist(), (*packed.ranks, *idle)
        self._first = [*packed.offsets[:-1].tolist(), *[0] * len(idle)]
        self._end = [*packed.offsets[1:].tolist(), *[0] * len(idle)]
        self._at = list(self._first)
        self._stage, self._kind = graph.stage.tolist(), [KINDS[code] for code in graph.kind.tolist()]
        index = {rank: number for number, rank in enumerate(self._ranks)}
        self._ranks_of = [[index[rank] for rank in placed.stage.ranks] for placed in graph.arrays.placed]
        self._waiting = [len(self._ranks_of[stage]) for stage in self._stage]
        self._inputs = [0] * graph.num_ops
        self._consumers: list[list[int]] = [[] for _ in range(graph.num_ops)]
        for source, target in zip(*(ends.tolist() for ends in graph.messages), strict=True):
            self._inputs[target] += 1
            self._consumers[source].append(target)
        self._position = [0] * graph.num_ops
        for position, op in enumerate(graph.order.tolist()):
            self._position[op] = position
        self._peers_of = {
            op: peers[stage]
            for op, (stage, kind) in enumerate(zip(self._stage, self._kind))
            if stage in peers and exchanges(kind, shard[peers[stage][0]])
        }
        self._stages: dict[tuple[str, int], list[int]] = defaultdict(list)
        for stage, group in peers.items():
            self._stages[group].append(stage)
        self._ready: dict[tuple[str, int], dict[int, int]] = {group: {} for group in self._stages}
        self._alone: deque[int] = deque()
        self._joins: dict[int, dict[int, list[tuple[int, ActionKind]]]] = {}

    def run(self) -> dict[int, Joins]:
        for rank in range(len(self._ranks)):
            self._arrive(rank)
        while True:
            if self._alone:
                self._finish(self._alone.popleft())
                continue
            whole = [group for group, ready in self._ready.items() if self._is_whole(group, ready)]
            if whole:
                self._begin(whole[0], self._kind[next(iter(self._ready[whole[0]].values()))])
                continue
            waiting = [op for ready in self._ready.values() for op in ready.values()]
            if not waiting:
                break
            first = min(waiting, key=self._position.__getitem__)
            self._begin(self._peers_of[first], self._kind[first])
        return {
            self._ranks[rank]: {index: tuple(rounds) for index, rounds in joins.items()}
            for rank, joins in self._joins.items()
        }

    def _is_whole(self, group: tuple[str, int], ready: Mapping[int, int]) -> bool:
        return len(ready) == len(self._stages[group]) and len({self._kind[op] for op in ready.values()}) == 1

    def _begin(self, group: tuple[str, int], kind: ActionKind) -> None:
        """Run a round of `kind`: with the ready actions of this kind, and all other stages of the group joining."""
        ready = self._ready[group]
        running = {stage: op for stage, op in ready.items() if self._kind[op] == kind}
        for stage in self._stages[group]:
            for rank in self._ranks_of[stage] if stage not in running else ():
                joins = self._joins.setdefault(rank, {})
                joins.setdefault(self._at[rank] - self._first[rank], []).append((stage, kind))
        for stage, op in running.items():
            del ready[stage]
            self._finish(op)

    def _finish(self, op: int) -> None:
        for target in self._consumers[op]:
            self._inputs[target] -= 1
            self._check(target)
        for rank in self._ranks_of[self._stage[op]]:
            self._at[rank] += 1
            self._arrive(rank)

    def _arrive(self, rank: int) -> None:
        if self._at[rank] < self._end[rank]:
            op = self._ops[self._at[rank]]
            self._waiting[op] -= 1
            self._check(op)

    def _check(self, op: int) -> None:
        if self._waiting[op] or self._inputs[op]:
            return
        group = self._peers_of.get(op)
        if group is None:
            self._alone.append(op)
        else:
            self._ready[group][self._stage[op]] = op
