"""Sharded parameters: the boxes of weights that a rank updates, or holds for others if they are frozen, and their
all-gather."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dilatant.comm.comm import Comm
from dilatant.comm.group import Pending
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import BucketShard, Holdings
from dilatant.runtime.state.shared_groups import LAYERS, group_of


class OwnedWeights:
    """The boxes of trainable weights that this rank updates, as parameters by key (see `Box.key`).

    weights: the trainable weights held here, by logical name. shares: this rank's parts of its buckets.

    A weight with unsharded optimizer state is its own parameter. In a sharded weight, a contiguous fp32 box is a view
    of the weight; any other box is an fp32 master copy. Without `masters` (the optimizer keeps its own) boxes keep the
    weight's dtype: contiguous ones are views, others copies. exact: name → the weight's values before rounding, if
    known, or those of its part in `read`. primary_cells: key → the cells whose primary owner is this rank, which alone
    includes them in norms and writes them to checkpoints. pieces: key → the parts that one rank of every node owns (see
    `BucketShard`). before: the owned weights of the last generation; if this rank owns the same boxes (`stays`), the
    parameters are reused.
    sharded: weights that are not held whole between uses; their boxes are never views, and `gather` leaves them out
    (see `ShardedStage`). Of frozen weights, all are sharded, and nobody updates the boxes.
    """

    def __init__(
        self,
        comm: Comm,
        weights: Mapping[str, nn.Parameter],
        holdings: Holdings,
        shares: Sequence[BucketShard],
        exact: Mapping[str, Tensor] | None = None,
        masters: bool = True,
        before: OwnedWeights | None = None,
        sharded: Collection[str] = frozenset(),
        read: Mapping[str, Box] = MappingProxyType({}),
    ) -> None:
        self.comm = comm
        self._read = read
        self._keeps_masters = masters
        self.weights = dict(weights)
        self.held = {name: holdings[name].boxes[comm.rank] for name in weights}
        self.sharded = frozenset(sharded)
        cut = [share for share in shares if share.is_divided]
        divided = self._names_divided = frozenset(name for share in cut for name in share.bucket.names)
        self._divided = [share for share in cut if self.sharded.isdisjoint(share.bucket.names)]
        own = {box.key: box for name, box in self.held.items() if name not in divided}
        own |= {box.key: box for share in shares for box in share.own if box.name in divided}
        self.stays = before is not None and (before._names_divided, before.boxes) == (divided, own)
        kept = before.parameters if before is not None and self.stays else {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.boxes: dict[str, Box] = {}
        self.primary_cells: dict[str, tuple[Box, ...]] = {}
        self.pieces: dict[str, list[Box]] = {}
        self._copies: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            if name not in divided:
                self._own(self.held[name], weight)
                if not weight.numel() and holdings[name].ranks[0] == comm.rank:  # in no bucket
                    self.primary_cells[self.held[name].key] = (self.held[name],)
        for share in shares:
            for box in share.own:
                if box.name in divided:
                    self._own(box, self._part(box, exact or {}, kept.get(box.key)))
                if share.is_primary:
                    key = self._key_of(box)
                    self.primary_cells[key] = (*self.primary_cells.get(key, ()), box)
            for piece in share.pieces:
                box = next(box for box in share.own if box.name == piece.name and box.meet(piece) == piece)
                self.pieces.setdefault(self._key_of(box), []).append(piece)

    @property
    def is_divided(self) -> bool:
        """True if any optimizer state is sharded; every update must then be followed by `gather`."""
        return bool(self._names_divided)

    def view(self, box: Box) -> Tensor:
        """Return a cell of a weight held here as a view of the weight."""
        # `data`: autograd does not count writes to it, and sharded weights are gathered between forward and backward.
        return self.weights[box.name].data[self.held[box.name].place(box)]

    def squared_norm(self) -> float:
        """Return this rank's part of the squared norm of all gradients: every number is included on one rank."""
        own = [gradient for _, gradient in self.primary_parts({k: p.grad for k, p in self.parameters.items()})]
        if not own:
            return 0.0
        return float(torch.stack(torch._foreach_norm(own)).double().square().sum())

    def primary_parts(self, tensors: Mapping[str, Tensor | None]) -> Iterator[tuple[Box, Tensor]]:
        """Yield (cell, its part of the tensor) if this rank is the primary owner. tensors: shaped like the parameters;
        None is skipped."""
        for key, cells in self.primary_cells.items():
            tensor = tensors.get(key)
            if tensor is not None:
                box = self.boxes[key]
                yield from ((cell, tensor if cell == box else tensor[box.place(cell)]) for cell in cells)

    @torch.no_grad()
    def follow(self) -> None:
        """Copy the weights into the parameters that are copies of them, after the weights were loaded."""
        for key, view in self._copies.items():
            self.parameters[key].copy_(view)

    @torch.no_grad()
    def gather(self) -> None:
        """All-gather the updated weights from their owners to all holders; called by all ranks after every update."""
        if self._copies:
            torch._foreach_copy_([*self._copies.values()], [self.parameters[key] for key in self._copies])
        under_way: tuple[BucketShard, Tensor, Pending] | None = None
        for share in self._divided:  # one bucket is gathered while the previous one is unpacked
            started = self.start_gather(share)
            if under_way is not None:
                self.finish_gather(*under_way)
            under_way = started
        if under_way is not None:
            self.finish_gather(*under_way)

    def _key_of(self, box: Box) -> str:
        """Return the key of the parameter that has a box of a share."""
        return (box if box.name in self._names_divided else self.held[box.name]).key

    def forget_views(self) -> None:
        """Drop the views of the weights into which `gather` copies, since their memory is to be freed."""
        self._copies = {}

    def _own(self, box: Box, parameter: nn.Parameter) -> None:
        self.parameters[box.key] = parameter
        self.boxes[box.key] = box

    def _part(self, box: Box, exact: Mapping[str, Tensor], kept: nn.Parameter | None) -> nn.Parameter:
        if kept is not None and box.name in self.sharded:
            return kept  # the weight is as the last generation left it, without values
        view = self.view(box)
        if box.name not in self.sharded:
            if view.is_contiguous() and (view.dtype == torch.float32 or not self._keeps_masters):
                return self._as_held(view) if kept is None else kept
            self._copies[box.key] = view
        if kept is not None:
            return kept
        # A sharded stage is still on the host, so that its device never holds all of it.
        place = self.comm.device if box.name in self.sharded else view.device
        known = exact[box.name][self._read.get(box.name, self.held[box.name]).place(box)] if box.name in exact else view
        dtype = torch.float32 if self._keeps_masters else view.dtype
        own = torch.empty(box.shape, dtype=dtype, device=place).copy_(known)
        return self._as_held(own, self.weights[box.name].requires_grad)

    def _as_held(self, own: Tensor, trains: bool = True) -> nn.Parameter:
        parameter = nn.Parameter(own, trains)
        if own.dtype != torch.float32 and trains:
            parameter.grad_dtype = torch.float32
        return parameter

    @torch.no_grad()
    def start_gather(self, share: BucketShard, purpose: str = LAYERS) -> tuple[BucketShard, Tensor, Pending]:
        """Begin to all-gather a bucket; returns the arguments of `finish_gather`."""
        weight = self.weights[share.bucket.names[0]]
        own = weight.new_empty(share.width)
        start = 0
        for box in share.own:
            own[start : start + box.size].view(box.shape).copy_(self.parameters[box.key])
            start += box.size
        own[start:].zero_()
        flat = weight.new_empty(len(share.sharing) * share.width)
        names = share.bucket.names
        what = f"updated weights {names[0]} to {names[-1]} on ranks {share.sharing}"
        return share, flat, group_of(self.comm, share.sharing, purpose).all_gather(flat, own, what)

    @torch.no_grad()
    def finish_gather(self, share: BucketShard, flat: Tensor, pending: Pending) -> None:
        """Wait for a bucket and copy it into the weights held here."""
        pending.wait()
        if min(share.sizes) < share.width:
            rows = flat.view(len(share.sharing), -1)
            flat = torch.cat([row[:size] for row, size in zip(rows.unbind(), share.sizes)])
        start = 0
        for box in share.bucket.boxes:
            self.view(box).copy_(flat[start : start + box.size].view(box.shape))
            start += box.size
