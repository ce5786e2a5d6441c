"""Extensions of a language model's stages: optional features with one interface.

Whoever builds a language-model unit lists the extensions that its config needs. Every stage calls all of them, in
order: `begin` (packed rows only), `embed` (on the first stage), `enter`, `leave`, and `send` (packed rows, but not on
the last stage).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dilatant.attention.context_parallel import ContextRanks
from dilatant.attention.hook import PLAN_KEYWORD
from dilatant.data.sample import EncodedSample
from dilatant.models.core.random_draws import KeyedDraws
from dilatant.models.core.sequence_parallel import TokenShards
from dilatant.models.core.stage import StepData
from dilatant.models.language.packed_row import PackedRow, Positions


@dataclass(frozen=True, slots=True)
class TextLayout:
    """The modules and token ids of a causal language model, for all its stages.

    container: path of the module that holds the blocks and that the head follows, in the model at `causal`, whose
    forward has the head. decoder: path of the text model; "" for the causal model itself. blocks: path of the list of
    blocks. placeholder_ids: unit → the id of the tokens that its rows replace. outputs: unit that takes rows from here
    → the id of the tokens whose last hidden states it takes. unembedded: ids whose embeddings are not looked up, which
    may lie outside of the vocabulary. positions: see `PackedRow.of`.
    """

    container: str
    decoder: str
    blocks: str
    placeholder_ids: Mapping[str, int]
    outputs: Mapping[str, int]
    unembedded: Sequence[int]
    positions: Positions | None = None
    causal: str = ""


@dataclass(frozen=True, slots=True)
class StageSpan:
    """The blocks `first <= block < end` of a stage. is_first: it holds the embedding; is_last: it holds the head."""

    first: int
    end: int
    is_first: bool = True
    is_last: bool = True


@dataclass(slots=True)
class LanguageForward:
    """One forward of a stage, which its extensions may change.

    decoder: the stage's slice of the text model; keywords: those of its forward. shards: sequence parallelism of the
    blocks. rows: unit → encoder rows [rows, hidden]. ids: [batch, tokens], on the first stage. hidden: the decoder's
    input [batch, tokens, width]; in `begin`, the received rows of this rank's tokens, [tokens, width]. Only for a
    packed row: data; samples; row, this rank's tokens; is_part, True if other ranks, with which blocks communicate, run
    other tokens of the microbatch; draws, in training, returns random numbers for the row's; losses by name. state:
    extension → what it keeps for `leave` or `send`. closing: contexts that are left after the blocks have run.
    """

    text: TextLayout
    span: StageSpan
    decoder: nn.Module
    shards: TokenShards | None
    rows: dict[str, Tensor]
    hidden: Tensor | None
    keywords: dict[str, Any]
    ids: Tensor | None = None
    data: StepData | None = None
    samples: Sequence[EncodedSample] = ()
    row: PackedRow | None = None
    is_part: bool = False
    draws: Callable[[], KeyedDraws] | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    state: dict[Any, Any] = field(default_factory=dict)
    closing: ExitStack = field(default_factory=ExitStack)

    @property
    def packed(self) -> PackedRow:
        """The packed row of this forward."""
        assert self.row is not None
        return self.row


class Extension:
    """One optional feature of a language model's stages; by default it changes nothing. An extension with weights is
    also a module, which the first stage holds as its attribute `part`."""

    part: str = ""

    def width(self, block: int) -> int:
        """Return the number of columns that stages append to the hidden states before `block`."""
        return 0

    def begin(self, forward: LanguageForward) -> None:
        """Change the packed row, the encoder rows, the received rows or the keywords before anything runs."""

    def embed(self, forward: LanguageForward, embeddings: Tensor) -> Tensor:
        """Change token embeddings [batch, tokens, width] before encoder rows are merged in."""
        return embeddings

    def enter(self, forward: LanguageForward) -> None:
        """Change the decoder, its input or its keywords before the blocks run."""

    def leave(self, forward: LanguageForward, hidden: Tensor) -> Tensor:
        """Change the hidden states after the blocks, [batch, tokens, width], or add losses."""
        return hidden

    def send(self, forward: LanguageForward, rows: Tensor) -> Tensor:
        """Change the rows for the next stage: hidden states of this rank's tokens of a packed row, [tokens, width]."""
        return rows


class ContextParallel(Extension):
    """Context parallelism: each of `ranks` runs its own tokens of every packed row. placement: the policy by which they
    are divided (see `attention.masks.placement`)."""

    def __init__(self, ranks: ContextRanks, placement: str) -> None:
        self.ranks = ranks
        self.placement = placement

    def begin(self, forward: LanguageForward) -> None:
        placeholders = [*forward.text.placeholder_ids.values()]
        row = forward.packed.shared(forward.keywords[PLAN_KEYWORD], self.ranks, placeholders, self.placement)
        forward.row, forward.keywords[PLAN_KEYWORD] = row, row.share
