"""Gradient sync: sum every weight's gradient over its holders while other stages compute.

Losses are divided by the target tokens of the global batch, so the sum over holders is the batch's gradient, however
the samples are divided. Cells with equal holders form buckets. The sum of a bucket starts when all its gradients are
complete, in the same order on all ranks (Oobleck thesis, 2.6.1, plus buckets and overlap; a tied weight is one logical
weight with the holders of both layers). If holders shard the optimizer state, each gets only the sum of its own boxes:
first within the node, then across nodes, also overlapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dilatant.comm.comm import Comm
from dilatant.comm.errors import CommAborted, CommTimeout
from dilatant.comm.group import Pending
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import BucketShard
from dilatant.runtime.state.exact_sums import ExactGradients, to_numbers
from dilatant.runtime.state.owned_weights import OwnedWeights
from dilatant.runtime.state.shared_groups import group_of


@dataclass(slots=True)
class _BucketSum:
    """A bucket in flight. numbers: the buffer that `pending` fills, for this rank's shard or the whole bucket. across:
    the sum over the nodes' equal shards has not started."""

    share: BucketShard
    numbers: Tensor
    pending: Pending
    across: bool = False


class GradientSync:
    """Reduces the buckets of one rank. In each step call `begin`, `entering_last_backward` and `left_last_backward`
    around the last backward of each stage, and `finish`.

    owned: the weights held here and the parts that this rank updates. stages_of: logical name → this rank's stages that
    use it. shares: its parts of buckets. duplicates: weights whose gradient another rank of the stage contributes.
    """

    def __init__(
        self,
        comm: Comm,
        owned: OwnedWeights,
        stages_of: Mapping[str, frozenset[int]],
        shares: Sequence[BucketShard],
        duplicates: Set[str] = frozenset(),
    ) -> None:
        self._comm = comm
        self._owned = owned
        self._stages_of = dict(stages_of)
        self.duplicates = duplicates
        self._shares = [share for share in shares if self._is_summed(share)]
        self._shares_of: dict[str, list[int]] = {}
        for number, share in enumerate(self._shares):
            for name in share.bucket.names:
                self._shares_of.setdefault(name, []).append(number)
        self._hooks = [
            owned.weights[name].register_post_accumulate_grad_hook(self._hook(name)) for name in self._shares_of
        ]
        self._unfinished: dict[str, set[int]] = {}
        self._missing: list[int] = []
        self._unpacked: dict[str, int] = {}
        self._started: list[_BucketSum] = []
        self._crossed = 0  # number of first entries that need no sum across nodes or have started it
        # `world` is for CPU tensors, whatever the device of the other groups.
        self._beside = torch.cuda.Stream() if comm.device.type == "cuda" else None
        self._current: int | None = None
        self._earlier: dict[str, Tensor] = {}
        self._failed: CommAborted | CommTimeout | None = None
        self.exact: ExactGradients | None = None
        """If set, gradients are accumulated and summed over ranks as integers."""
        self.keeps = False
        """Keep this rank's own gradients in addition to the sums until `forget`, for partial-step recovery if other
        ranks are lost; one more number per trainable weight of the rank."""
        self._kept: dict[str, Tensor] = {}
        self._to_begin_with: Mapping[str, Tensor] = {}

    def begin_with(self, gradients: Mapping[str, Tensor]) -> None:
        """Set the gradients, by logical name, that the next step starts from; its backwards add to them."""
        self._to_begin_with = gradients

    def local(self) -> dict[str, Tensor]:
        """Return this rank's own gradients of the current step by logical name; after reduction only if `keeps`."""
        return {
            name: gradient
            for name in self._owned.weights
            if (gradient := self._own(name) if self._unpacked.get(name, 1) else self._kept.get(name)) is not None
        }

    def forget(self) -> None:
        """Drop this rank's own gradients, after the step was applied or abandoned."""
        self._kept = {}
        if self.exact is not None:
            self.exact.totals = {}

    def _own(self, name: str) -> Tensor | None:
        return self._owned.weights[name].grad if self.exact is None else self.exact.totals.get(name)

    def _set_own(self, name: str, gradient: Tensor | None) -> None:
        if self.exact is None:
            self._owned.weights[name].grad = gradient
        elif gradient is None:
            self.exact.totals.pop(name, None)
        else:
            self.exact.totals[name] = gradient

    def begin(self, stages: Iterable[int]) -> None:
        """Start a step in which `stages` run a backward. Existing gradients are kept and added at the end."""
        running = set(stages)
        self._earlier = {}
        for key, parameter in self._owned.parameters.items():
            if parameter.grad is not None:
                self._earlier[key] = parameter.grad
                parameter.grad = None
        self._unfinished = {name: set(self._stages_of[name] & running) for name in self._shares_of}
        self._missing = [sum(bool(self._unfinished[name]) for name in share.bucket.names) for share in self._shares]
        self._unpacked = {name: len(numbers) for name, numbers in self._shares_of.items()}
        self._started, self._crossed = [], 0
        self._failed = None
        self.forget()
        for name, gradient in self._to_begin_with.items():
            self._set_own(name, gradient)
        self._to_begin_with = {}
        self._start_ready()

    def entering_last_backward(self, stage: int) -> None:
        """Announce the last backward of `stage`: each weight is complete as soon as its gradient is accumulated."""
        self._current = stage

    def left_last_backward(self, stage: int) -> None:
        """Mark the gradients of `stage` as complete. Raises the error of a sum started in its last backward."""
        self._current = None
        if self._failed is not None:
            raise self._failed
        for name, waiting in self._unfinished.items():
            if stage in waiting:
                self._complete(name, stage)
        self._start_ready()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all sums and store them in `grad` of the owned weights; weights without any user get no gradient."""
        arrived: list[tuple[BucketShard, Tensor, Tensor]] = []
        self._start_ready(wait=True)
        self._cross(wait=True)
        waiting: list[_BucketSum | None] = list(self._started)
        self._started, self._crossed = [], 0
        for number, under_way in enumerate(waiting):
            assert under_way is not None
            waiting[number] = None  # frees a bucket as soon as this rank's part of it is copied
            under_way.pending.wait()
            own, count = _own_part(under_way), len(under_way.share.bucket.boxes)
            arrived.append((under_way.share, own[:-count], own[-count:]))
        flags = iter(torch.cat([flags for _, _, flags in arrived]).tolist() if arrived else ())
        for share, numbers, _ in arrived:
            used = [next(flags) for _ in share.bucket.boxes]
            start = 0
            for box, cell in zip(share.own, share.cells):
                if used[cell]:
                    self._deliver(box, numbers[start : start + box.size].view(box.shape))
                start += box.size
        if self.exact is not None:
            for name in self._owned.weights.keys() - self._shares_of.keys():
                if (total := self.exact.totals.get(name)) is not None:
                    weight = self._owned.weights[name]
                    weight.grad = to_numbers(total, weight.grad_dtype or weight.dtype)
        for key, gradient in self._earlier.items():
            parameter = self._owned.parameters[key]
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        self._earlier = {}

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _is_summed(self, share: BucketShard) -> bool:
        """Return True if the bucket has other holders, or contains only part of a weight held here."""
        held = self._owned.held
        return len(share.bucket.ranks) > 1 or any(box != held[box.name] for box in share.bucket.boxes)

    def _hook(self, name: str):
        def accumulated(parameter: nn.Parameter) -> None:
            stage = self._current
            if stage is not None and stage in self._unfinished[name] and self._failed is None:
                self._complete(name, stage)
                try:
                    self._start_ready()
                except (CommAborted, CommTimeout) as error:  # the backward itself is still valid
                    self._failed = error

        return accumulated

    def _complete(self, name: str, stage: int) -> None:
        self._unfinished[name].discard(stage)
        if not self._unfinished[name]:
            for number in self._shares_of[name]:
                self._missing[number] -= 1

    def _start_ready(self, wait: bool = False) -> None:
        while len(self._started) < len(self._shares) and self._missing[len(self._started)] == 0:
            share = self._shares[len(self._started)]
            if self._crosses_before(share):
                self._cross(wait)
                if self._crosses_before(share):
                    break
            self._started.append(self._start(share))
            if self._beside is not None:  # a GPU needs collectives in one order on all ranks
                self._cross()
        self._cross()

    def _crosses_before(self, share: BucketShard) -> bool:
        """Return True if the group of this bucket must first sum an earlier bucket across nodes. A group needs the same
        order on all ranks, but only each node knows when its own sum is complete."""
        waiting = (one for one in self._started[self._crossed :] if one.across)
        return not _is_scattered(share) and any(one.share.alike == _ranks_of(share) for one in waiting)

    @torch.no_grad()
    def _cross(self, wait: bool = False) -> None:
        """Start sums across nodes in bucket order, where the node's own sum is complete. A GPU uses a second stream,
        each bucket before the next starts; a CPU polls whenever a bucket may start, and blocks if `wait`."""
        while self._crossed < len(self._started):
            one = self._started[self._crossed]
            if one.across:
                if self._beside is None and not (wait or one.pending.is_done):
                    return
                with nullcontext() if self._beside is None else torch.cuda.stream(self._beside):
                    one.pending.wait()
                    group = group_of(self._comm, one.share.alike)
                    one.pending = group.sum_(one.numbers, _named(one.share))
                    one.across = False
            self._crossed += 1

    @torch.no_grad()
    def _start(self, share: BucketShard) -> _BucketSum:
        numbers = self._pack(share)
        for name in share.bucket.names:
            self._unpacked[name] -= 1
            if not self._unpacked[name]:
                own = self._own(name)
                if self.keeps and own is not None:
                    self._kept[name] = own
                self._set_own(name, None)
        what = _named(share)
        if _is_scattered(share):
            flat, group = numbers, group_of(self._comm, share.sharing)
            numbers = flat.view(len(share.sharing), -1)[share.sharing.index(self._comm.rank)]
            pending = group.reduce_scatter(numbers, flat, what)
            return _BucketSum(share, numbers, pending, across=len(share.alike) > 1)
        group = group_of(self._comm, _ranks_of(share))
        return _BucketSum(share, numbers, group.sum_(numbers, what))

    def _pack(self, share: BucketShard) -> Tensor:
        weight = self._owned.weights[share.bucket.names[0]]
        dtype = weight.grad_dtype or weight.dtype
        like = weight.new_empty(0, dtype=dtype if self.exact is None else torch.int64)
        return pack_gradients(
            share, self._owned.held, lambda name: None if name in self.duplicates else self._own(name), like
        )

    def _deliver(self, box: Box, gradient: Tensor) -> None:
        owned = self._owned.parameters.get(box.key)
        if self.exact is not None:
            weight = self._owned.weights[box.name]
            gradient = to_numbers(gradient, weight.grad_dtype or weight.dtype)
        if owned is not None:
            owned.grad = gradient
            return
        weight = self._owned.weights[box.name]  # `box` is one of several cells of the weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=gradient.dtype)
        weight.grad[self._owned.held[box.name].place(box)] = gradient


def pack_gradients(
    share: BucketShard, held: Mapping[str, Box], gradient_of: Callable[[str], Tensor | None], like: Tensor
) -> Tensor:
    """Concatenate the gradients of a bucket's cells and, for each cell, a count of the holders that used it. AdamW
    treats an unused weight differently from a zero gradient. For reduce-scatter, shards are padded to equal length, and
    the counts of all cells follow each shard.

    held: name → the box held here, whose gradient `gradient_of` returns, or None. like: gives dtype and device.
    """
    pieces, used = [], []
    for box in share.bucket.boxes:
        gradient = gradient_of(box.name)
        used.append(float(gradient is not None))
        if gradient is None:
            pieces.append(like.new_zeros(box.size))
        else:
            pieces.append(gradient[held[box.name].place(box)].flatten())
    flags = like.new_tensor(used)
    if not _is_scattered(share):
        return torch.cat([*pieces, flags])
    padding = like.new_zeros(share.width - min(share.sizes))
    rows = torch.cat(pieces).split(share.sizes)
    return torch.cat([piece for row in rows for piece in (row, padding[: share.width - len(row)], flags)])


def _is_scattered(share: BucketShard) -> bool:
    return share.is_divided and share.even


def _ranks_of(share: BucketShard) -> tuple[int, ...]:
    """Return the ranks that all-reduce an unscattered bucket: all holders, if nodes shard the bucket differently."""
    return share.alike if share.even else share.bucket.ranks


def _own_part(under_way: _BucketSum) -> Tensor:
    """Return this rank's shard, perhaps padded, and all cells' use counts, as a copy that lets the bucket be freed."""
    share, numbers = under_way.share, under_way.numbers
    if not share.is_divided:
        return numbers
    if share.even:
        return numbers.clone()
    end = share.begins + sum(box.size for box in share.own)
    return torch.cat([numbers[share.begins : end], numbers[sum(share.sizes) :]])


def _named(share: BucketShard) -> str:
    names, ranks = share.bucket.names, share.bucket.ranks
    return f"gradients of {names[0]} to {names[-1]} on ranks {ranks}"
