"""Steps by size first: what a step holds and who does what is decided before a byte is decoded; then every rank decodes
only what its own stages use. Both happen ahead of the training path, in a thread.

    order of samples → sizes → without what is known to be bad → Assignment and Schedule → needs → decoded parts

Everything but the decoded parts is computed alike by all ranks, from the order and the index alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from threading import Lock
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.config.errors import UserError
from dilatant.config.model import LANGUAGE
from dilatant.data.index.sizes import SizesIndex
from dilatant.data.order.blend import Blend
from dilatant.data.order.sampler import Sampler, SamplerState
from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import QUESTION, TOKENS
from dilatant.data.workers.loader import GlobalBatch
from dilatant.data.workers.pool import Request, Source
from dilatant.data.workers.prefetch import Ahead

LOOK_AHEAD = 8
"""Steps whose samples are asked for, as memory permits, before the one that is being put together is complete: short
steps outlast a sample that takes long, or a worker that lost its processor. Below `cost_correction.INTERVAL`."""
FIRST_STEPS = 2
"""Beside them only the next one is decided, then one more ahead with each step: what all ranks of a machine decide at
once takes its cores from the first step, which after a loss everybody waits for."""

NAMED = 3
"""Samples of a step that are named as the slowest to decode."""
MEDIA_BYTES = 768
"""Of one encoder token: a patch of 16 x 16 pixels in three bytes. Where it is more, the source learns that."""

Step = TypeVar("Step")
Parts = Mapping[int, frozenset[str]]
"""Sample number in the step → parts of it."""
_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class IndexedData:
    """A data set whose sizes are known. name: what the source of decoded samples calls it. refused: sample → why it
    can never be trained on."""

    name: str
    samples: Blend
    index: SizesIndex
    refused: Mapping[int, str]

    def head(self, index: int, draw: int) -> EncodedSample:
        """What is known of a sample without reading it."""
        row = self.index.tokens[index].tolist()
        return EncodedSample(
            self.samples.name(index),
            _NOTHING,
            _NOTHING,
            {},
            dict(zip(self.index.units, row, strict=True)),
            draw,
            int(self.index.target_tokens[index]),
            int(self.index.content[index]),
            self.samples.source_of(index),
        )


@dataclass(frozen=True, slots=True)
class Draw:
    """The samples of step number `step` in their order: their indices, the number of the first one in the order of
    training, and the position after them."""

    step: int
    indices: NDArray[np.int64]
    first: int
    position: SamplerState
    epoch: float = 0.0


def draws(sampler: Sampler, position: SamplerState, begin: int, end: int | None) -> Iterator[Draw]:
    """Steps number `begin` to `end` of an order, or without end."""
    for step in count(begin) if end is None else range(begin, end):
        first = position.samples
        indices, position = sampler.take(position, sampler.global_batch_size)
        yield Draw(step, indices, first, position, sampler.epoch(position))


@dataclass(frozen=True, slots=True)
class StepInput(Generic[Step]):
    """A step, decided and decoded. batch: all its samples, of which only the parts that this rank needs are loaded."""

    batch: GlobalBatch
    step: Step


@dataclass(frozen=True, slots=True)
class _Draft(Generic[Step]):
    """A step, decided. indices: of `heads`."""

    draw: Draw
    indices: tuple[int, ...]
    heads: tuple[EncodedSample, ...]
    problems: tuple[str, ...]
    step: Step
    needs: Parts


@dataclass(slots=True)
class _Collected(Generic[Step]):
    """A draft with what was decoded for it, and what proved bad: index → why."""

    draft: _Draft[Step]
    loaded: dict[int, EncodedSample] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)


class Feed(Generic[Step]):
    """The steps of `draws`, decided by `plan` and decoded from `source` as `needs` says.

    plan: from the samples of a step, of which only sizes are known, and its number to what the runtime executes; the
    same on every rank. needs: from that to the parts that this rank uses. skips: samples that cannot be decoded are
    left out by all ranks together (see `found`), instead of raising UserError when their step is due. left_out: index →
    why, those that were before.
    """

    def __init__(
        self,
        data: IndexedData,
        draws: Iterable[Draw],
        source: Source,
        plan: Callable[[Sequence[EncodedSample], int], Step],
        needs: Callable[[Step], Parts],
        *,
        skips: bool = False,
        left_out: Mapping[int, str] | None = None,
        look_ahead: int = LOOK_AHEAD,
    ) -> None:
        self._data = data
        self._draws = iter(draws)
        self._source = source
        self._plan = plan
        self._needs = needs
        self._skips = skips
        self._look_ahead = look_ahead
        self.left_out: Mapping[int, str] = dict(left_out or {})
        """Samples that proved bad so far, index → why; belongs into a checkpoint."""
        self._lock = Lock()
        self._coming: _Collected[Step] | None = None
        self.waited_seconds = 0.0
        """How long whoever takes steps has waited for samples so far."""
        self._counted_seconds = 0.0
        self._ahead = Ahead(self._collect_all(), "dilatant-feed")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepInput[Step]:
        collected = self._fetch()
        if collected is None:
            raise StopIteration
        self._coming = None
        if self.left_out.keys() & set(collected.draft.indices):
            began = time.perf_counter()
            with self._lock:
                collected = self._again(collected)
            self.waited_seconds += time.perf_counter() - began
        if collected.bad:
            raise UserError(next(iter(collected.bad.values())))
        draft, waited = collected.draft, self.waited_seconds - self._counted_seconds
        self._counted_seconds = self.waited_seconds
        samples = tuple(collected.loaded.get(number, head) for number, head in enumerate(draft.heads))
        slowest = sorted(collected.loaded.values(), key=lambda sample: -sample.made_seconds)[:NAMED]
        batch = GlobalBatch(
            samples,
            draft.draw.position,
            draft.draw.epoch,
            draft.problems,
            waited,
            tuple((sample.id, sample.made_seconds) for sample in slowest),
        )
        return StepInput(batch, draft.step)

    def found(self) -> list[tuple[int, str]]:
        """Samples of the coming step that proved bad when this rank decoded them: (index, why).

        All ranks call it before a step and give the union of what they found to `leave_out`. Waits for that step where
        such samples are skipped; elsewhere there are none.
        """
        coming = self._fetch() if self._skips else None
        return [] if coming is None else [*coming.bad.items()]

    def leave_out(self, found: Iterable[tuple[int, str]]) -> None:
        """Leave samples out of the coming step and all after it: what all ranks found, in one order."""
        fresh = {index: why for index, why in found if index not in self.left_out}
        if fresh:
            self.left_out = {**self.left_out, **fresh}

    def close(self) -> None:
        """Stop working ahead. The source stays open."""
        self._ahead.close()
        self._source.forget(self._data.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fetch(self) -> _Collected[Step] | None:
        if self._coming is None:
            began = time.perf_counter()
            self._coming = next(self._ahead, None)
            self.waited_seconds += time.perf_counter() - began
        return self._coming

    def _collect_all(self) -> Generator[_Collected[Step]]:
        drafts: deque[_Draft[Step]] = deque()
        given = look_ahead = 0
        for draw in self._draws:
            with self._lock:
                drafts.append(self._draft(draw))
                self._ask(drafts[-1], drafts[-1].needs)
            if len(drafts) > look_ahead:
                yield self._collected(drafts.popleft())
                given += 1
                look_ahead = min(max(0, given - FIRST_STEPS), self._look_ahead)
        while drafts:
            yield self._collected(drafts.popleft())

    def _collected(self, draft: _Draft[Step]) -> _Collected[Step]:
        collected = _Collected(draft)
        with self._lock:
            self._take(collected, draft.needs)
        return collected

    def _draft(self, draw: Draw) -> _Draft[Step]:
        """Decide a step. Raises UserError where no sample is left."""
        bad = {**self._data.refused, **self.left_out} if self.left_out else self._data.refused
        indices = draw.indices.tolist()
        problems = tuple(bad[index] for index in indices if index in bad)
        kept = [(index, draw.first + place) for place, index in enumerate(indices) if index not in bad]
        if not kept:
            raise UserError(f"every sample of a batch is corrupt; the first: {problems[0]}")
        heads = tuple(self._data.head(index, number) for index, number in kept)
        step = self._plan(heads, draw.step)
        return _Draft(draw, tuple(index for index, _ in kept), heads, problems, step, self._needs(step))

    def _ask(self, draft: _Draft[Step], parts: Parts) -> None:
        self._source.ask(
            [
                Request(
                    draft.heads[number].draw,
                    draft.indices[number],
                    wanted,
                    self._data.name,
                    _bytes_of(draft.heads[number], wanted),
                )
                for number, wanted in parts.items()
            ]
        )

    def _take(self, collected: _Collected[Step], parts: Parts) -> None:
        """Wait for parts that were asked for. Raises UserError for a bad sample, unless these are skipped."""
        draft = collected.draft
        for number, wanted in parts.items():
            head = draft.heads[number]
            sample = self._source.take(self._data.name, head.draw)
            if isinstance(sample, UserError):
                if not self._skips:
                    raise sample
                collected.bad[draft.indices[number]] = str(sample)
                continue
            if dict(sample.sizes) != dict(head.sizes) or (
                TOKENS in wanted and _content(sample) != head.content
            ):
                raise UserError(
                    f"{head.id} is not what it was when its size was measured: its data changed while they are read; "
                    "resume, and it is measured anew"
                )
            held = collected.loaded.get(number, head)
            has_tokens = bool(wanted & {TOKENS, QUESTION})
            collected.loaded[number] = replace(
                held,
                input_ids=sample.input_ids if has_tokens else held.input_ids,
                labels=sample.labels if has_tokens else held.labels,
                media={**held.media, **sample.media},
                made_seconds=held.made_seconds + sample.made_seconds,
            )

    def _again(self, collected: _Collected[Step]) -> _Collected[Step]:
        """The same step without what has proved bad since it was decided: what is there already is kept."""
        draft = self._draft(collected.draft.draw)
        have = {
            collected.draft.heads[number].draw: (number, sample)
            for number, sample in collected.loaded.items()
        }
        again = _Collected(draft)
        missing: dict[int, frozenset[str]] = {}
        for number, wanted in draft.needs.items():
            before, sample = have.get(draft.heads[number].draw, (None, None))
            if sample is not None and before is not None:
                again.loaded[number] = sample
                wanted = wanted - collected.draft.needs[before]
            if wanted:
                missing[number] = wanted
        self._ask(draft, missing)
        self._take(again, missing)
        return again


def _bytes_of(head: EncodedSample, parts: frozenset[str]) -> int:
    """About what parts of a sample take: ids and labels, and media by the tokens that an encoder makes of them."""
    tokens = 16 * head.sizes[LANGUAGE] if parts & {TOKENS, QUESTION} else 0
    return tokens + MEDIA_BYTES * sum(head.sizes.get(unit, 0) for unit in parts)


def _content(sample: EncodedSample) -> int:
    return replace(sample, content=None).content_digest


def agree_on_bad(comm: Comm, found: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """What any rank found, for `Feed.leave_out`; called by all."""
    return merge_found(all_gather_object(comm, list(found)))


def merge_found(found: Iterable[Iterable[Sequence[Any]]]) -> list[tuple[int, str]]:
    """What ranks found, in one order and each sample once."""
    merged: dict[int, str] = {}
    for of_rank in found:
        for index, why in of_rank:
            merged.setdefault(int(index), str(why))
    return sorted(merged.items())
