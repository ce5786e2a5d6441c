"""A rank's trainable weights: those it updates, their gradient sync, and the check that replicas are equal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dilatant.comm.comm import Comm
from dilatant.cost.memory import Zero
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import BucketShard, Format, make_buckets, shard_of
from dilatant.plan.holdings import Holdings
from dilatant.runtime.state.equality import ComparedTensors, require_equal
from dilatant.runtime.state.gradient_sync import GradientSync
from dilatant.runtime.state.owned_weights import OwnedWeights
from dilatant.runtime.state.shared_groups import open_groups


@dataclass(frozen=True, slots=True, eq=False)
class BucketedWeights:
    """A rank's trainable weights. shares: its parts of buckets. owned: boxes it updates. sync: their gradient sync."""

    shares: tuple[BucketShard, ...]
    owned: OwnedWeights
    sync: GradientSync

    def require_equal(self, state: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        """Check that all holders of a weight have equal values, and all owners of a box equal `state` (kind → key →
        tensor shaped like the owned weight). Called by all ranks. Raises UserError."""

        def of_kind(tensors: Mapping[str, Tensor]) -> Callable[[Box], Tensor | None]:
            def state_of(box: Box) -> Tensor | None:
                key = box.key if box.key in self.owned.parameters else self.owned.held[box.name].key
                held = tensors.get(key)
                return None if held is None else held[self.owned.boxes[key].place(box)]

            return state_of

        states = [
            ComparedTensors(kind, of_kind(tensors), is_state=True) for kind, tensors in (state or {}).items()
        ]
        require_equal(self.owned.comm, self.shares, [ComparedTensors("weights", self.owned.view), *states])


def bucket_weights(
    comm: Comm,
    weights: Mapping[str, nn.Parameter],
    stages_of: Mapping[str, Collection[int]],
    holdings: Holdings,
    formats: Mapping[str, Format],
    bucket_bytes: int,
    zero: Zero = "none",
    node_of: Sequence[int] | None = None,
    exact: Mapping[str, Tensor] | None = None,
    masters: bool = True,
    before: OwnedWeights | None = None,
) -> BucketedWeights:
    """Bucket the trainable weights for ownership and gradient sync; called by all ranks, on which only `weights` and
    `stages_of` differ.

    weights: the trainable ones held here, by logical name. stages_of: this rank's stages that use them. formats: of
    every trainable weight on any rank. zero, node_of: see `shard_of`; without node_of all ranks are on one node. exact,
    masters, before: see `OwnedWeights`.
    """
    nodes = [0] * comm.size if node_of is None else node_of
    shares = tuple(
        shard_of(bucket, comm.rank, zero, nodes)
        for bucket in make_buckets(holdings, formats, formats, bucket_bytes)
        if comm.rank in bucket.ranks
    )
    open_groups(comm, shares)
    owned = OwnedWeights(comm, weights, holdings, shares, exact, masters, before)
    silent = frozenset(name for name in weights if comm.rank in holdings[name].silent)
    using = {name: frozenset(stages_of[name]) for name in weights}
    return BucketedWeights(shares, owned, GradientSync(comm, owned, using, shares, silent))
