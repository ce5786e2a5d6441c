"""Gradient sync: every logical weight's gradient summed over the ranks that hold it, while others still compute.

Losses are divided by the target tokens of the whole batch, so the sum over holders is the batch's gradient, however
unequal their shares are. Weights that follow each other in the backward pass and have equal holders share a bucket;
a bucket starts when its last weight has its last gradient of the step, and buckets start in one order everywhere
(Oobleck, thesis 2.6.1, with buckets and overlap; a tied weight is one logical weight with the holders of both ends).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dilatant.comm.comm import Comm
from dilatant.comm.group import Pending
from dilatant.config.errors import UserError
from dilatant.runtime.holders import Holders

_ROUNDING = 1e-9
"""Between sums of up to 1e9 positive float64 that ranks add in different orders; unlike draws differ far more."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights summed together: logical names in backward order, and the ranks that hold every one of them."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]


def make_buckets(
    holders: Holders, parameters: Mapping[str, Tensor], trainable: Iterable[str], bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Buckets of one dtype and at most `bucket_bytes` (or one weight), in the order in which they are reduced.

    holders: in layer order. parameters: all of them, also those on the meta device. Every rank knows all of this, so
    all cut alike.
    """
    chosen = set(trainable)
    buckets: list[Bucket] = []
    names: list[str] = []
    total = 0
    for name in [name for name in reversed(holders) if name in chosen]:
        parameter = parameters[name]
        if names and (
            holders[name] != holders[names[0]]
            or parameter.dtype != parameters[names[0]].dtype
            or total + parameter.nbytes > bucket_bytes
        ):
            buckets.append(Bucket(tuple(names), holders[names[0]]))
            names, total = [], 0
        names.append(name)
        total += parameter.nbytes
    if names:
        buckets.append(Bucket(tuple(names), holders[names[0]]))
    return tuple(buckets)


class GradientSync:
    """The buckets of one rank.

    parameters: the trainable weights held here, by logical name. stages_of: logical name → own stages that use it.
    Each step: `begin`, `last_backward` around the last backward of a stage, `finish`.
    """

    def __init__(
        self,
        comm: Comm,
        parameters: Mapping[str, nn.Parameter],
        stages_of: Mapping[str, frozenset[int]],
        buckets: Iterable[Bucket],
    ) -> None:
        self._comm = comm
        self._parameters = dict(parameters)
        self._stages_of = dict(stages_of)
        self._buckets = [b for b in buckets if comm.rank in b.ranks and len(b.ranks) > 1]
        # Opened in one order everywhere, so that no two ranks wait for each other in different groups.
        for ranks in sorted({bucket.ranks for bucket in self._buckets}):
            comm.group(_group_name(ranks), ranks)
        self._bucket_of = {name: i for i, b in enumerate(self._buckets) for name in b.names}
        self._hooks = [
            self._parameters[name].register_post_accumulate_grad_hook(self._hook(name))
            for name in self._bucket_of
        ]
        self._unfinished: dict[str, set[int]] = {}
        self._missing: list[int] = []
        self._started: list[tuple[Bucket, Tensor, Pending]] = []
        self._current: int | None = None
        self._earlier: dict[str, Tensor] = {}

    @torch.no_grad()
    def require_equal(self, tensors: Mapping[str, Tensor] | None = None, what: str = "weights") -> None:
        """Prove that all holders of a weight have the same; called by all ranks. Raises UserError naming what differs:
        gradients would be summed all the same, and mean nothing.

        tensors: of the trainable weights, by logical name (default: the weights themselves); a weight may have none,
        then on all ranks. Compares two sums for each, which unlike draws and unlike files do not share.
        """
        held: Mapping[str, Tensor] = self._parameters if tensors is None else tensors
        compared = []
        for bucket in self._buckets:
            device = self._parameters[bucket.names[0]].device
            own = torch.cat([_magnitudes(held.get(name), device) for name in bucket.names])
            widest = torch.cat([own, -own])
            group = self._comm.group(_group_name(bucket.ranks), bucket.ranks)
            compared.append((bucket, widest, group.max_(widest, f"comparing {bucket.names[0]} and others")))
        problems = []
        for bucket, widest, pending in compared:
            pending.wait()
            largest, smallest = widest[: len(widest) // 2], -widest[len(widest) // 2 :]
            # Written so that what is not a number differs.
            same = (largest - smallest <= _ROUNDING * largest.abs()).view(-1, 2).all(1).tolist()
            names = [name for name, equal in zip(bucket.names, same) if not equal]
            problems += [f"{name!r} on ranks {list(bucket.ranks)}" for name in names]
        if problems:
            raise UserError(
                f"{what} that replicas share differ between ranks: {', '.join(problems[:4])}"
                + (f" and {len(problems) - 4} more" if len(problems) > 4 else "")
                + "; every rank must build the model with the same seed and read the same files"
            )

    def begin(self, stages: Iterable[int]) -> None:
        """Start a step in which `stages` run a backward. Gradients that are there are kept and added to at the end."""
        running = set(stages)
        self._earlier = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._earlier[name] = parameter.grad
                parameter.grad = None
        self._unfinished = {name: set(self._stages_of[name] & running) for name in self._bucket_of}
        self._missing = [sum(bool(self._unfinished[n]) for n in b.names) for b in self._buckets]
        self._started = []
        self._start_ready()

    def entering_last_backward(self, stage: int) -> None:
        """The next backward pass is the last one of `stage`: weights are complete as soon as it has passed them."""
        self._current = stage

    def left_last_backward(self, stage: int) -> None:
        """No gradient of `stage` is still to come."""
        self._current = None
        for name, waiting in self._unfinished.items():
            if stage in waiting:
                self._complete(name, stage)
        self._start_ready()

    def finish(self) -> None:
        """Wait for all sums and leave them in `grad`; a weight that no holder used keeps no gradient."""
        flags, pieces = [], []
        for bucket, flat, pending in self._started:
            pending.wait()
            count = len(bucket.names)
            flags.append(flat[-count:])
            pieces.append((bucket, flat[:-count]))
        used = iter(torch.cat(flags).tolist() if flags else ())
        for bucket, flat in pieces:
            start = 0
            for name in bucket.names:
                parameter = self._parameters[name]
                end = start + parameter.numel()
                parameter.grad = flat[start:end].view_as(parameter) if next(used) else None
                start = end
        for name, gradient in self._earlier.items():
            parameter = self._parameters[name]
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        self._started, self._earlier = [], {}

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, name: str):
        def accumulated(parameter: nn.Parameter) -> None:
            stage = self._current
            if stage is not None and stage in self._unfinished[name]:
                self._complete(name, stage)
                self._start_ready()

        return accumulated

    def _complete(self, name: str, stage: int) -> None:
        self._unfinished[name].discard(stage)
        if not self._unfinished[name]:
            self._missing[self._bucket_of[name]] -= 1

    def _start_ready(self) -> None:
        while len(self._started) < len(self._buckets) and self._missing[len(self._started)] == 0:
            bucket = self._buckets[len(self._started)]
            self._started.append(self._start(bucket))

    @torch.no_grad()
    def _start(self, bucket: Bucket) -> tuple[Bucket, Tensor, Pending]:
        parameters = [self._parameters[name] for name in bucket.names]
        gradients = [p.grad for p in parameters]
        # One number a weight tells how many holders used it: unused everywhere is not the same as zero to AdamW.
        dtype = parameters[0].grad_dtype or parameters[0].dtype  # fp32 where weights are less
        used = torch.tensor(
            [float(g is not None) for g in gradients], dtype=dtype, device=parameters[0].device
        )
        flat = torch.cat(
            [
                p.new_zeros(p.numel(), dtype=dtype) if g is None else g.flatten()
                for p, g in zip(parameters, gradients)
            ]
            + [used]
        )
        for parameter in parameters:
            parameter.grad = None
        group = self._comm.group(_group_name(bucket.ranks), bucket.ranks)
        pending = group.sum_(
            flat, f"gradients of {bucket.names[0]} to {bucket.names[-1]} on ranks {bucket.ranks}"
        )
        return bucket, flat, pending


def _magnitudes(weight: Tensor | None, device: torch.device) -> Tensor:
    """Sums of absolute values and of squares: float64 [2], in little memory beside the weight's own; -1 for none."""
    total = torch.full((2,), -1.0 if weight is None else 0.0, dtype=torch.float64, device=device)
    if weight is None:
        return total
    for piece in weight.flatten().split(1 << 24):
        wide = piece.double()
        total += torch.stack([wide.abs().sum(), wide.square().sum()])
    return total


def squared_norm(parameters: Mapping[str, nn.Parameter], holders: Holders, rank: int) -> float:
    """The share of `rank` in the squared norm of all gradients: every logical weight counts at its first holder."""
    own = [
        parameter.grad
        for name, parameter in parameters.items()
        if parameter.grad is not None and holders[name][0] == rank
    ]
    if not own:
        return 0.0
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(own)])
    return float(norms.square().sum())


def _group_name(ranks: tuple[int, ...]) -> str:
    return "layers/" + "-".join(map(str, ranks))
