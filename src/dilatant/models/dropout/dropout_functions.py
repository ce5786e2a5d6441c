"""Intercepted random functions of torch while a stage runs: dropout is keyed, other functions are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dilatant.config.errors import UserError
from dilatant.models.core.random_draws import DoesNotFit, KeyedDraws


@dataclass(slots=True)
class ForwardState:
    """The state of a forward of one microbatch through a stage of `unit`.

    trains: layers with a trainable weight; other layers drop nothing. shapes: place → the shape per token or item seen
    there in any microbatch. layer: the running layer; "" in code that belongs to another stage's layer, None outside of
    layers. outermost: the module at whose exit no layer runs any more. calls: layer → index of its last draw.
    keeps_layers: the model supports LayerDrop, but its config disables it.
    """

    unit: str
    draws: KeyedDraws
    trains: frozenset[str]
    shapes: dict[str, tuple[int, ...]]
    layer: str | None = None
    outermost: nn.Module | None = None
    calls: dict[str, int] = field(default_factory=dict)
    has_drawn: bool = False
    keeps_layers: bool = False

    def again(self) -> ForwardState:
        """Copy the current state, for the recomputation of a layer."""
        return replace(self, calls=dict(self.calls))

    def drops(self, what: str) -> bool:
        """Return True if the running layer drops anything. Raises UserError outside of layers."""
        self.has_drawn = True
        if self.layer is None:
            raise UserError(
                f"{self.unit}: {what} outside of its layers (in a callback, or between blocks), where no key says "
                "what it drops; let the encoder, the projector or a block call it, or set it to 0"
            )
        return self.layer in self.trains

    def next_place(self) -> str:
        """Return the key of the next draw: layer and call index."""
        assert self.layer
        number = self.calls[self.layer] = self.calls.get(self.layer, -1) + 1
        return f"{self.layer}/{number}"

    def uniform(self, what: str, shape: torch.Size, device: torch.device) -> Tensor:
        """Return the numbers of this call. Raises UserError if they cannot be assigned to samples."""
        place = self.next_place()
        try:
            numbers, each = self.draws.uniform(place, shape, device)
        except DoesNotFit:
            raise self.misfit(what, shape) from None
        self.require_same(place, each, what, shape)
        return numbers

    def require_same(self, place: str, each: tuple[int, ...], what: str, shape: torch.Size) -> None:
        """Raise UserError if a token or item had another shape at this place before: then its match was accidental."""
        if self.shapes.setdefault(place, each) != each:
            raise self.misfit(what, shape)

    def misfit(self, what: str, shape: torch.Size) -> UserError:
        """Return the error for a tensor that is not divided by samples."""
        parts = f"{self.draws.total} {'tokens of a row' if self.draws.packed else 'items'}"
        return UserError(
            f"{self.layer}: {what} of a tensor of shape {[*shape]}, in which {parts} cannot be told apart; what is "
            "dropped would change with the layout, so set it to 0"
        )


class InterceptsDropout(TorchFunctionMode):
    """Context in which dropout functions draw keyed numbers, and other random functions raise UserError."""

    def __init__(self, running: ForwardState) -> None:
        super().__init__()
        self._running = running

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self._running, func, *args, **(kwargs or {}))


class _Masked(torch.autograd.Function):
    """Dropout that saves one byte per element for backward, as torch's own does."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return values.mul(keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return gradient.mul(keep).mul_(ctx.scale), None, None


def _scale(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def _dropout_by(what: str, cut: Callable[[torch.Size], torch.Size]) -> Any:
    def drop(
        running: ForwardState,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or not 0 < p <= 1:
            return func(input, p, training, inplace)
        if not running.drops(what):
            return input
        keep = running.uniform(what, cut(input.shape), input.device) < 1 - p
        return input.mul_(keep * _scale(p)) if inplace else _Masked.apply(input, keep, _scale(p))

    return drop


_dropout = _dropout_by("dropout", lambda shape: shape)


def _torch_dropout(running: ForwardState, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(running, functional.dropout, input, p, train)


def _channels(shape: torch.Size) -> torch.Size:
    return torch.Size((*shape[:2], *(1 for _ in shape[2:])))


def _alpha_dropout_by(cut: Callable[[torch.Size], torch.Size]) -> Any:
    def drop(
        running: ForwardState,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool = False,
        inplace: bool = False,
    ) -> Tensor:
        if not training or not 0 < p < 1:
            return func(input, p, training, inplace)
        if not running.drops("alpha dropout"):
            return input
        keep = running.uniform("alpha dropout", cut(input.shape), input.device) < 1 - p
        low = -1.7580993408473766  # SELU's limit for large negative numbers
        scale = ((1 - p) * (1 + p * low**2)) ** -0.5
        output = torch.where(keep, input, low) * scale - scale * low * p
        return input.copy_(output) if inplace else output

    return drop


def _attention(
    running: ForwardState,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run attention with dropout sample by sample in a packed row, each under its own part of the mask."""
    what = "dropout of attention weights"
    if not 0 < dropout_p <= 1 or not running.drops(what):
        return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if is_causal:
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    whole = torch.Size((*query.shape[:-1], key.shape[-2]))
    if not running.draws.packed:
        numbers = running.uniform(what, whole, query.device)
        return _drop_weights(query, key, value, attn_mask, numbers, dropout_p, scale)
    total = running.draws.total
    if query.ndim != 4 or query.shape[0] != 1 or whole[-2:] != (total, total):
        raise running.misfit(what, whole)
    place = running.next_place()
    running.require_same(place, (*whole[1:-2], -1, -1), what, whole)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-2], total, total)
    outputs, start = [], 0
    for index, (_, length) in enumerate(running.draws.segments):
        own = slice(start, start := start + length)
        outputs.append(
            _drop_weights(
                query[..., own, :],
                key[..., own, :],
                value[..., own, :],
                None if attn_mask is None else attn_mask[..., own, own],
                running.draws.of_segment(index, place, (*whole[:-2], length, length), query.device),
                dropout_p,
                scale,
            )
        )
    return torch.cat(outputs, dim=-2)


def _drop_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, numbers: Tensor, p: float, scale: float
) -> Tensor:
    scores = query @ key.transpose(-2, -1) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return _Masked.apply(weights, numbers < 1 - p, _scale(p)) @ value


def _refuse(name: str) -> Any:
    def refuse(running: ForwardState, func: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if running.keeps_layers and func is torch.rand and args == ([],):
            # The draw of LayerDrop: transformers 5.17 draws even at rate 0.
            return func(*args, **kwargs, generator=torch.Generator())
        raise UserError(
            f"{running.layer or running.unit}: {name} draws random numbers that belong to no sample (noise, layers "
            "left out by chance), so they would change with the layout; switch this off in the model's config, or "
            "give the function a generator of its own"
        )

    return refuse


_RANDOM = {
    torch: (
        *("bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like"),
        *("randn", "randn_like", "randperm", "rrelu", "dropout_", "alpha_dropout", "feature_dropout"),
    ),
    Tensor: (
        *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial"),
        *("normal_", "random_", "uniform_"),
    ),
    functional: ("gumbel_softmax", "rrelu"),
}
_HANDLERS: dict[Any, Any] = {
    **{getattr(owner, name): _refuse(name) for owner, names in _RANDOM.items() for name in names},
    functional.dropout: _dropout,
    torch.dropout: _torch_dropout,
    **dict.fromkeys(
        (functional.dropout1d, functional.dropout2d, functional.dropout3d),
        _dropout_by("dropout of channels", _channels),
    ),
    functional.alpha_dropout: _alpha_dropout_by(lambda shape: shape),
    functional.feature_alpha_dropout: _alpha_dropout_by(_channels),
    functional.scaled_dot_product_attention: _attention,
}
