"""Compile the blocks of a stage with torch.compile: one graph for all lengths of rows, and safe to split in backward.

A block's class gets a mixin whose `forward` is the compiled one, below recomputation, so names, keys and hooks stay.
Attention and keyed dropout are not compiled: a graph ends before them and another begins behind. Private names of
torch's compiler are used in this file only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters

from dilatant.attention.hook import WHY_NOT_COMPILED
from dilatant.config.memory_modes import Compile
from dilatant.models.adapters.four_bit import FourBitLinear
from dilatant.models.core.parallel_linear import ParallelLinear
from dilatant.models.core.recompute import Recomputed, recompute
from dilatant.models.experts.grouped_experts import is_fused
from dilatant.models.mixed_class import mixed

PROVEN: frozenset[str] = frozenset()
"""Families of units that `auto` compiles: those whose compiled steps were compared with eager ones on a GPU. None was
yet; the slow tests compare the candidates on a CPU."""
SAFE = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""Settings of inductor. A delayed weight gradient keeps tensors of the graph that ran; by default, the graph would use
their memory again, and the gradient would be wrong without any error."""
SETTINGS = {**SAFE, "emulate_precision_casts": True}
"""With the rounding of eager blocks: fused operations otherwise round bf16 at fewer places, which differ between
forward and backward. Gradients of adapters were then off by up to twice as much."""
VARIANTS = 64
"""Graphs of one function: by kinds of layers, frozen or trained weights, training or evaluation."""
COMPILER_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)
_BLOCK = "compiled_block"


def compiles(how: Compile, device: torch.device, family: str) -> bool:
    """Return True if `train.compile` asks for compiled blocks of a unit of this family on this device."""
    return how == "blocks" or (how == "auto" and device.type == "cuda" and family in PROVEN)


def why_not(block: nn.Module) -> str | None:
    """Return the reason why a block runs eager, as far as its modules show it; None without one."""
    modules = list(block.modules())
    if any(isinstance(one, ParallelLinear) and (one.enter or one.leave) for one in modules):
        return "tensor-parallel layers communicate within the block"
    if any(map(is_fused, modules)):
        return "the numbers of its experts' rows decide what is computed"
    if any(isinstance(one, FourBitLinear) for one in modules):
        return "four-bit layers are unpacked by kernels that cannot be compiled"
    if isinstance(block, Recomputed) and block.how == "block_keep_attention":
        return "recomputation keeps the output of attention, which ends a graph"
    if any(isinstance(one, Recomputed) for one in modules[1:]):
        return "modules within the block are recomputed"
    return None


class Compiled:
    """Mixin for the class of a block: `forward` is compiled (see `CompiledBlocks`)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_BLOCK](*args, **kwargs)


class CompiledBlocks:
    """The blocks of one stage, which are compiled at their first call, until `close`. where: the stage, for warnings.

    A block that cannot be compiled as one piece around its attention runs as before once `settle` was called, and a
    warning says why. eager: the classes of such blocks, which all stages of a rank share, as they share graphs.
    backend: as in `torch.compile`. settings: of inductor. is_warm: set once the stage has run, and its blocks are
    compiled.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        where: str,
        eager: set[type[nn.Module]],
        backend: str = "inductor",
        settings: dict[str, Any] = SETTINGS,
    ) -> None:
        self.is_warm = False
        self._where = where
        self._eager = eager
        self._broken: set[type[nn.Module]] = set()
        self._warned: set[str] = set()
        self._blocks: dict[nn.Module, _Block] = {}
        for block in blocks:
            if (reason := why_not(block)) is not None:
                self._warn(reason)
                continue
            how = block.how if isinstance(block, Recomputed) else "none"
            recompute(block, "none")
            own = cast(Any, type(block))
            options = settings if backend == "inductor" else None
            plain = MethodType(own.forward, block)
            compiled = torch.compile(plain, dynamic=True, backend=backend, options=options)
            made = _Block(tuple(block.parameters()), own, plain, compiled, self._give_up, self._break, eager)
            self._blocks[block] = block.__dict__[_BLOCK] = made
            block.__class__ = mixed(own, Compiled)
            recompute(block, how)

    @property
    def num_compiled(self) -> int:
        """Number of blocks that are compiled, or will be at their first call."""
        return sum(block.kind not in self._eager for block in self._blocks.values())

    def give_up(self, error: Exception) -> None:
        """Run all blocks eager from now on, and warn of the `error`."""
        for block in self._blocks.values():
            self._give_up(block.kind, _first_line(error))

    def settle(self) -> None:
        """Run blocks whose graphs broke eager from now on. Call it while no backward is due: a block is recomputed as
        its forward ran, for checkpoint counts the tensors that both save."""
        self._eager |= self._broken

    def close(self) -> None:
        """Restore the blocks' own classes."""
        for module in self._blocks:
            how = module.how if isinstance(module, Recomputed) else "none"
            recompute(module, "none")
            module.__class__ = type(module).__mro__[2]
            recompute(module, how)
            del module.__dict__[_BLOCK]
        self._blocks = {}

    def _give_up(self, kind: type[nn.Module], reason: str) -> None:
        self._eager.add(kind)
        self._warn(reason)

    def _break(self, kind: type[nn.Module], reason: str) -> None:
        self._broken.add(kind)
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"train.compile: blocks of {self._where} run eager: {reason}", stacklevel=2)


@dataclass(frozen=True, slots=True)
class _Block:
    """The forwards of one block of class `kind`; `compiled` is not called once the class is among `eager`."""

    weights: tuple[nn.Parameter, ...]
    kind: type[nn.Module]
    plain: Callable[..., Any]
    compiled: Callable[..., Any]
    give_up: Callable[[type[nn.Module], str], None]
    broke: Callable[[type[nn.Module], str], None]
    eager: set[type[nn.Module]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.kind in self.eager:
            return self.plain(*args, **kwargs)
        before = dict(counters["graph_break"])
        try:
            with compiler_settings(), gradients_aside(self.weights):
                output = self.compiled(*args, **kwargs)
        except COMPILER_ERRORS as error:
            self.give_up(self.kind, _first_line(error))
            return self.plain(*args, **kwargs)
        for reason, count in counters["graph_break"].items():
            if count != before.get(reason) and WHY_NOT_COMPILED not in reason:
                self.broke(self.kind, f"its forward is no single graph ({_first_line(reason)})")
        return output


@contextmanager
def compiler_settings() -> Iterator[None]:
    """Context in which blocks are compiled and run, forward and backward."""
    with (
        torch._dynamo.config.patch(recompile_limit=VARIANTS, fail_on_recompile_limit_hit=True),
        torch._functorch.config.patch(donated_buffer=False),  # see `SAFE`
    ):
        yield


@contextmanager
def gradients_aside(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which `weights` have no gradients; those from before are back behind it.

    A graph ends at each weight that has a gradient of another dtype: what was compiled later than the first gradients
    of a step ran in pieces, which round otherwise."""
    before = [(weight, weight.grad) for weight in weights if weight.requires_grad]
    for weight, _ in before:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in before:
            weight.grad = gradient


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
