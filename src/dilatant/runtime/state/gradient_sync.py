"""Gradient sync: every weight's gradient summed over the ranks that hold it, while others still compute.

Losses are divided by the target tokens of the whole batch, so the sum over holders is the batch's gradient, however
unequal their shares are. What is summed are buckets of cells with equal holders; a bucket starts when its last weight
has its last gradient of the step, and buckets start in one order everywhere (Oobleck, thesis 2.6.1, with buckets and
overlap; a tied weight is one logical weight with the holders of both ends). Where holders share the optimizer's state,
each receives the sum of its own boxes only: inside the node first, then across nodes, also while others compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dilatant.comm.comm import Comm
from dilatant.comm.errors import CommAborted, CommTimeout
from dilatant.comm.group import Pending
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import BucketShare
from dilatant.runtime.state.exact_sums import ExactGradients, to_numbers
from dilatant.runtime.state.owned_weights import OwnedWeights
from dilatant.runtime.state.shared_groups import group_of


@dataclass(slots=True)
class _Sum:
    """A bucket on its way. numbers: what `pending` fills: those of this rank's share, or of all. across: it is still to
    be summed with the same share on other nodes."""

    share: BucketShare
    numbers: Tensor
    pending: Pending
    across: bool = False


class GradientSync:
    """The buckets of one rank.

    owned: the weights held here, and what this rank updates of them. stages_of: logical name → own stages that use it.
    shares: of all buckets that this rank is in. silent: weights whose gradient another rank of this stage contributes.
    Each step: `begin`, `last_backward` around the last backward of a stage, `finish`.
    """

    def __init__(
        self,
        comm: Comm,
        owned: OwnedWeights,
        stages_of: Mapping[str, frozenset[int]],
        shares: Sequence[BucketShare],
        silent: Set[str] = frozenset(),
    ) -> None:
        self._comm = comm
        self._owned = owned
        self._stages_of = dict(stages_of)
        self._silent = silent
        self._shares = [share for share in shares if self._is_summed(share)]
        self._shares_of: dict[str, list[int]] = {}
        for number, share in enumerate(self._shares):
            for name in share.bucket.names:
                self._shares_of.setdefault(name, []).append(number)
        self._hooks = [
            owned.weights[name].register_post_accumulate_grad_hook(self._hook(name))
            for name in self._shares_of
        ]
        self._unfinished: dict[str, set[int]] = {}
        self._missing: list[int] = []
        self._unpacked: dict[str, int] = {}
        self._started: list[_Sum] = []
        self._crossed = 0  # of them, those that other nodes have or need nothing of any more
        self._beside = torch.cuda.Stream() if comm.world.is_on_device else None
        self._current: int | None = None
        self._earlier: dict[str, Tensor] = {}
        self._failed: CommAborted | CommTimeout | None = None
        self.exact: ExactGradients | None = None
        """Where gradients are added up as integers, which then are what is summed over ranks."""
        self.keeps = False
        """Whether this rank's own gradients stay beside the sums until `forget`, for those who do without others' in
        the end: as many numbers as it has trainable weights."""
        self._kept: dict[str, Tensor] = {}
        self._to_begin_with: Mapping[str, Tensor] = {}

    def begin_with(self, gradients: Mapping[str, Tensor]) -> None:
        """Gradients of the next step that this rank has already, by logical name; backwards add to them."""
        self._to_begin_with = gradients

    def local(self) -> dict[str, Tensor]:
        """This rank's own gradients of the step in hand, by logical name; those not kept are not there."""
        return {
            name: gradient
            for name in self._owned.weights
            if (gradient := self._own(name) if self._unpacked.get(name, 1) else self._kept.get(name))
            is not None
        }

    def forget(self) -> None:
        """The step is applied, or never will be: let go of this rank's own gradients."""
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
        """Start a step in which `stages` run a backward. Gradients that are there are kept and added to at the end."""
        running = set(stages)
        self._earlier = {}
        for key, parameter in self._owned.parameters.items():
            if parameter.grad is not None:
                self._earlier[key] = parameter.grad
                parameter.grad = None
        self._unfinished = {name: set(self._stages_of[name] & running) for name in self._shares_of}
        self._missing = [
            sum(bool(self._unfinished[name]) for name in share.bucket.names) for share in self._shares
        ]
        self._unpacked = {name: len(numbers) for name, numbers in self._shares_of.items()}
        self._started, self._crossed = [], 0
        self._failed = None
        self._kept = {}
        if self.exact is not None:
            self.exact.totals = {}
        for name, gradient in self._to_begin_with.items():
            self._set_own(name, gradient)
        self._to_begin_with = {}
        self._start_ready()

    def entering_last_backward(self, stage: int) -> None:
        """The next backward pass is the last one of `stage`: weights are complete as soon as it has passed them."""
        self._current = stage

    def left_last_backward(self, stage: int) -> None:
        """No gradient of `stage` is still to come. Raises what a sum that began in its last backward has raised."""
        self._current = None
        if self._failed is not None:
            raise self._failed
        for name, waiting in self._unfinished.items():
            if stage in waiting:
                self._complete(name, stage)
        self._start_ready()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all sums and leave them in `grad` of the owned weights; one that no holder used keeps none."""
        arrived: list[tuple[BucketShare, Tensor, Tensor]] = []
        self._start_ready(wait=True)
        self._cross(wait=True)
        waiting: list[_Sum | None] = list(self._started)
        self._started, self._crossed = [], 0
        for number, under_way in enumerate(waiting):
            assert under_way is not None
            waiting[number] = None  # so that a bucket is freed as soon as this rank's part of it is taken
            under_way.pending.wait()
            arrived.append(_numbers_and_flags(under_way.share, _own_part(under_way)))
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
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _is_summed(self, share: BucketShare) -> bool:
        """Whether a bucket has other holders, or a cell of a weight that has others elsewhere."""
        held = self._owned.held
        return len(share.bucket.ranks) > 1 or any(box != held[box.name] for box in share.bucket.boxes)

    def _hook(self, name: str):
        def accumulated(parameter: nn.Parameter) -> None:
            stage = self._current
            if stage is not None and stage in self._unfinished[name] and self._failed is None:
                self._complete(name, stage)
                try:
                    self._start_ready()
                except (CommAborted, CommTimeout) as error:  # the backward itself is as good as ever
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
            if self._beside is not None:  # a GPU needs collectives of all groups in one order everywhere
                self._cross()
        self._cross()

    def _crosses_before(self, share: BucketShare) -> bool:
        """Whether an earlier bucket is still to be summed by the group of this one. Groups need one order everywhere,
        and when a node has its sum is known to that node alone."""
        waiting = (one for one in self._started[self._crossed :] if one.across)
        return not _is_scattered(share) and any(one.share.alike == _ranks_of(share) for one in waiting)

    @torch.no_grad()
    def _cross(self, wait: bool = False) -> None:
        """Sum across nodes what a node has the sum of, in the order of buckets. A GPU does so beside what it computes,
        of each bucket before the next starts; a host looks whenever a bucket may start, and with `wait` waits."""
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
    def _start(self, share: BucketShare) -> _Sum:
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
            return _Sum(share, numbers, pending, across=len(share.alike) > 1)
        group = group_of(self._comm, _ranks_of(share))
        return _Sum(share, numbers, group.sum_(numbers, what))

    def _pack(self, share: BucketShare) -> Tensor:
        """The gradients of a bucket's cells, then a number for each cell that tells how many holders used it: unused
        everywhere is not the same as zero to AdamW. To be scattered: the same of every share, padded to equal lengths,
        each with the numbers of all cells."""
        weight = self._owned.weights[share.bucket.names[0]]
        dtype = weight.grad_dtype or weight.dtype
        like = weight.new_empty(0, dtype=dtype if self.exact is None else torch.int64)
        pieces, used = [], []
        for box in share.bucket.boxes:
            gradient = None if box.name in self._silent else self._own(box.name)
            used.append(float(gradient is not None))
            if gradient is None:
                pieces.append(like.new_zeros(box.size))
            else:
                pieces.append(gradient[self._owned.held[box.name].place(box)].flatten())
        flags = like.new_tensor(used)
        if not _is_scattered(share):
            return torch.cat([*pieces, flags])
        padding = like.new_zeros(share.width - min(share.sizes))
        rows = torch.cat(pieces).split(share.sizes)
        return torch.cat([piece for row in rows for piece in (row, padding[: share.width - len(row)], flags)])

    def _deliver(self, box: Box, gradient: Tensor) -> None:
        owned = self._owned.parameters.get(box.key)
        if self.exact is not None:
            weight = self._owned.weights[box.name]
            gradient = to_numbers(gradient, weight.grad_dtype or weight.dtype)
        if owned is not None:
            owned.grad = gradient
            return
        weight = self._owned.weights[box.name]  # of which this is one of several cells
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=gradient.dtype)
        weight.grad[self._owned.held[box.name].place(box)] = gradient


def _is_scattered(share: BucketShare) -> bool:
    return share.is_divided and share.even


def _ranks_of(share: BucketShare) -> tuple[int, ...]:
    """Who sums a bucket that is not scattered. Where other nodes cut elsewhere, everybody receives all of it."""
    return share.alike if share.even else share.bucket.ranks


def _own_part(under_way: _Sum) -> Tensor:
    """Numbers of this rank's share, perhaps padded, and of the use of all cells; in memory of its own."""
    share, numbers = under_way.share, under_way.numbers
    if not share.is_divided:
        return numbers
    if share.even:
        return numbers.clone()
    end = share.begins + sum(box.size for box in share.own)
    return torch.cat([numbers[share.begins : end], numbers[sum(share.sizes) :]])


def _numbers_and_flags(share: BucketShare, own: Tensor) -> tuple[BucketShare, Tensor, Tensor]:
    count = len(share.bucket.boxes)
    return share, own[:-count], own[-count:]


def _named(share: BucketShare) -> str:
    names, ranks = share.bucket.names, share.bucket.ranks
    return f"gradients of {names[0]} to {names[-1]} on ranks {ranks}"
