"""Sharded weights and gradients of a stage: between uses a rank holds only its rows of each block (ZeRO 2 and 3).

The rows are the boxes whose optimizer state the rank owns, so an update needs no exchange. Under `shard: weights` an
action gathers a block before its forward and before its backward, while the previous block computes, and releases it
afterwards; under `weights_by_step` the first action that uses it gathers it, and the end of the step releases it.
Weights outside blocks (embedding, head, projector) are whole during the action. Gradients are reduce-scattered block by
block in every backward, and accumulated in the boxes. Frozen weights are gathered alike and sum nothing; blocks before
the first one with a gradient are gathered in forwards only.

Members of a group must run the same collectives in the same order. So an action always runs all collectives of its kind
in one fixed order, whatever its forward uses, and replicas without an action take part in those of others
(`schedule.shard_rounds`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.comm.group import Pending
from dilatant.config.memory_modes import Shard
from dilatant.plan.buckets import BucketShard
from dilatant.runtime.state.gradient_sync import pack_gradients
from dilatant.runtime.state.owned_weights import OwnedWeights
from dilatant.runtime.state.shared_groups import SHARDS, group_of
from dilatant.schedule.schedule import ActionKind
from dilatant.schedule.shard_rounds import exchanges

_OUTSIDE = 0
"""Number of the group of weights outside blocks; block `n` is group `n + 1`."""


class ShardedStage:
    """The sharded buckets of one stage on this rank. Run every action of the stage in `running`, and those of other
    replicas in `take_part`; call `begin` and `finish` in each step.

    owned, fixed: the boxes of trained and of frozen weights. blocks: modules that run one after the other. shares: this
    rank's parts of the stage's sharded buckets. shard: what is sharded. duplicates: see `GradientSync`. forward_only:
    number of first blocks without a backward.
    """

    def __init__(
        self,
        owned: OwnedWeights,
        fixed: OwnedWeights,
        blocks: Sequence[nn.Module],
        shares: Sequence[BucketShard],
        shard: Shard,
        duplicates: Set[str],
        forward_only: int,
    ) -> None:
        self._comm = owned.comm
        self._owned, self._fixed = owned, fixed
        self._forward_only = forward_only
        self._shard = shard
        self._gathers = shard.startswith("weights")
        self._here: set[int] = set()  # groups whose weights stay until the step ends
        self._duplicates = duplicates
        place: dict[nn.Parameter, int] = {}
        for number, block in enumerate(blocks, 1):
            for weight in block.parameters():
                place[weight] = _OUTSIDE if weight in place else number
        self._groups: list[list[BucketShard]] = [[] for _ in range(len(blocks) + 1)]
        self._group_of_weight: dict[nn.Parameter, int] = {}
        for share in shares:
            weights = [*self._weights_of(share)]
            numbers = {place.get(weight, _OUTSIDE) for weight in weights}
            number = numbers.pop() if len(numbers) == 1 else _OUTSIDE
            self._groups[number].append(share)
            self._group_of_weight |= dict.fromkeys(weights, number)
        self._sums: dict[int, Tensor] = {}
        self._reducing: list[tuple[BucketShard, Tensor, Pending]] = []
        self._gathering: dict[int, list[tuple[BucketShard, Tensor, Pending]]] = {}
        self._kind: ActionKind | None = None
        self._order: list[int] = []
        self._at = 0
        self._handles: list[Any] = []
        for number, block in enumerate(blocks, 1):
            self._handles += [
                block.register_forward_pre_hook(partial(self._before_block, number)),
                block.register_forward_hook(partial(self._behind_block, number)),
            ]

    def begin(self) -> None:
        """Start a step or an evaluation without gradients, and without weights of before."""
        self._sums = {}
        self.release_all()

    @contextmanager
    def running(self, kind: ActionKind) -> Iterator[None]:
        """Context of an action: blocks that run inside have their weights, and their gradients are summed. After an
        error the runtime can only be closed."""
        if not exchanges(kind, self._shard):
            yield
            return
        self._open(kind)
        yield
        self._close()

    def take_part(self, kind: ActionKind) -> None:
        """Take part in the collectives of an action that other replicas run, without computing anything."""
        with self.running(kind):
            pass

    def reached(self, weight: nn.Parameter | None) -> None:
        """Announce that the gradient of `weight` is computed next, outside a backward (W), in backward order."""
        if weight is not None:
            self._enter(self._group_of_weight.get(weight, _OUTSIDE))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all gradient sums of the step and store them in `grad` of the owned parameters. Weights that no rank
        used get no gradient."""
        self._settle()
        self.release_all()
        shares = [share for group in self._groups for share in group if id(share) in self._sums]
        crossing = [
            group_of(self._comm, share.alike, SHARDS).sum_(self._sums[id(share)], _what("gradients", share))
            for share in shares
            if len(share.alike) > 1
        ]
        for pending in crossing:
            pending.wait()
        flags = [self._sums[id(share)][share.width :] for share in shares]
        counts = iter(torch.cat(flags).tolist() if flags else ())
        for share in shares:
            numbers, used, start = self._sums.pop(id(share)), [next(counts) for _ in share.bucket.boxes], 0
            for box, cell in zip(share.own, share.cells):
                if used[cell]:
                    gradient = numbers[start : start + box.size].view(box.shape)
                    self._owned.parameters[box.key].grad = gradient
                start += box.size

    @torch.no_grad()
    def gather_all(self) -> None:
        """Gather all weights of the stage; called by all replicas. `release_all` undoes it."""
        self.release_all()
        for number in range(len(self._groups)) if self._gathers else ():
            self._launch(number)
            self._arrive(number)

    def release_all(self) -> None:
        """Release all weights of the stage; their boxes are in the owned parameters."""
        self._here.clear()
        for number in range(len(self._groups)):
            self._release(number)

    def close(self) -> None:
        """Remove the hooks from the blocks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_block(self, number: int, module: nn.Module, args: Any) -> None:
        self._enter(number)

    def _behind_block(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._enter(number))

    @torch.no_grad()
    def _open(self, kind: ActionKind) -> None:
        blocks = range(1, len(self._groups))
        self._order = [_OUTSIDE, *(blocks if kind == ActionKind.F else reversed(blocks[self._forward_only :]))]
        self._kind, self._at = kind, 0
        self._launch(_OUTSIDE)
        self._launch_next()
        self._arrive(_OUTSIDE)

    @torch.no_grad()
    def _close(self) -> None:
        while self._at + 1 < len(self._order):
            self._advance()
        if self._at:
            self._leave(self._order[self._at])
        self._leave(_OUTSIDE)
        self._kind = None

    @torch.no_grad()
    def _enter(self, number: int) -> None:
        """Make the weights of a block available: run all collectives that come before its use."""
        if self._kind is None or number == _OUTSIDE:
            return
        place = self._order.index(number)
        if place < self._at:
            raise RuntimeError(
                "a block ran again, or in another order than the model lists its blocks, so its weights are not here; "
                "leave out train.shard for this unit"
            )
        while self._at < place:
            self._advance()

    def _advance(self) -> None:
        if self._at:
            self._leave(self._order[self._at])
        self._at += 1
        self._arrive(self._order[self._at])
        self._launch_next()

    def _launch_next(self) -> None:
        if self._at + 1 < len(self._order):
            self._launch(self._order[self._at + 1])

    def _launch(self, number: int) -> None:
        if self._gathers and self._kind != ActionKind.W and number not in self._here:
            self._gathering[number] = [self._owner(share).start_gather(share, SHARDS) for share in self._groups[number]]

    def _arrive(self, number: int) -> None:
        if self._shard == "weights_by_step" and self._gathering.get(number):
            self._here.add(number)
        messages = deque(self._gathering.pop(number, ()))
        while messages:  # each is freed as soon as its weights are filled
            share = messages[0][0]
            for weight in self._weights_of(share):
                weight.untyped_storage().resize_(weight.nbytes)
            self._owner(share).finish_gather(*messages.popleft())

    def _leave(self, number: int) -> None:
        if self._kind in (ActionKind.B, ActionKind.W):
            self._scatter(number)
        if number not in self._here:
            self._release(number)

    def _release(self, number: int) -> None:
        for share in self._groups[number] if self._gathers else ():
            for weight in self._weights_of(share):
                weight.untyped_storage().resize_(0)

    def _scatter(self, number: int) -> None:
        """Begin to sum the gradients of a group over the ranks that share it, and drop this rank's own."""
        self._settle()
        trained = [share for share in self._groups[number] if self._owner(share) is self._owned]
        for share in trained:
            weight = self._owned.weights[share.bucket.names[0]]
            like = weight.new_empty(0, dtype=weight.grad_dtype or weight.dtype)
            flat = pack_gradients(share, self._owned.held, self._gradient_of, like)
            own = like.new_empty(flat.numel() // len(share.sharing))
            group = group_of(self._comm, share.sharing, SHARDS)
            self._reducing.append((share, own, group.reduce_scatter(own, flat, _what("gradients", share))))
        for share in trained:
            for weight in self._weights_of(share):
                weight.grad = None

    def _settle(self) -> None:
        """Wait for the sums in flight, and add them to those of earlier actions."""
        for share, own, pending in self._reducing:
            pending.wait()
            if id(share) in self._sums:
                self._sums[id(share)] += own
            else:
                self._sums[id(share)] = own
        self._reducing = []

    def _gradient_of(self, name: str) -> Tensor | None:
        return None if name in self._duplicates else self._owned.weights[name].grad

    def _weights_of(self, share: BucketShard) -> Iterator[nn.Parameter]:
        weights = self._owner(share).weights
        return (weights[name] for name in share.bucket.names)

    def _owner(self, share: BucketShard) -> OwnedWeights:
        return self._owned if share.bucket.names[0] in self._owned.weights else self._fixed


def _what(content: str, share: BucketShard) -> str:
    names = share.bucket.names
    return f"{content} of {names[0]} to {names[-1]} on ranks {share.sharing}"
