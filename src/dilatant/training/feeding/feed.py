"""Prefetcher of steps: a step is planned from sample sizes before a byte is decoded; then every rank decodes only what
its own stages use. Both happen in a thread, ahead of training.

    order of samples → sizes → without known bad samples → Assignment and Schedule → requirements → decoded parts

Everything but the decoded parts is computed alike by all ranks, from the order and the index alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.config.errors import UserError
from dilatant.config.model import LANGUAGE
from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import QUESTION, TOKENS
from dilatant.data.workers.batches import GlobalBatch
from dilatant.data.workers.pool import SampleRequest, SampleSource
from dilatant.training.feeding.step_data import IndexedData, StepSamples, StreamedData

FIRST_STEPS = 2
"""Number of first steps during which only one step is planned ahead; after these the look-ahead grows by one per step.
All ranks of a machine plan at once, which takes cores from the first step, and after a loss everybody waits for
that."""

NAMED = 3
"""Number of samples of a step that are named as the slowest to decode."""
MEDIA_BYTES = 768
"""Estimated bytes of one encoder token: a patch of 16 x 16 pixels in three bytes. The source learns of larger ones."""

T = TypeVar("T")
Step = TypeVar("Step")
Parts = Mapping[int, frozenset[str]]
"""Sample number in the step → its parts."""


@dataclass(frozen=True, slots=True)
class StepInput(Generic[Step]):
    """A planned and decoded step. batch: all its samples, of which only the parts that this rank needs are loaded."""

    batch: GlobalBatch
    step: Step


@dataclass(slots=True)
class _PlannedStep(Generic[Step]):
    """A planned step. heads: its samples' metadata; indices: of these samples in the data set. loaded: what was decoded
    so far; bad: the samples that proved bad, index → why."""

    draw: StepSamples
    indices: tuple[int, ...]
    heads: tuple[EncodedSample, ...]
    problems: tuple[str, ...]
    step: Step
    parts: Parts
    loaded: dict[int, EncodedSample] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)


class Prefetcher(Generic[T]):
    """Iterate over `source` in a background thread, with one item ready and the next one in production.

    An exception of `source` is raised in the consumer at its position; the iterator is then exhausted.
    """

    def __init__(self, source: Generator[T]) -> None:
        self._source = source
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=1)
        self._closing = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="dilatant-feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._over or self._closing.is_set():
            raise StopIteration
        kind, value = self._ready.get()
        if kind == "item":
            return value
        self._over = True
        raise value if kind == "error" else StopIteration

    def close(self) -> None:
        """Close `source` in its thread and wait for the thread to end. Idempotent."""
        self._closing.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()  # the thread may wait for space in the queue
            except queue.Empty:
                self._thread.join(timeout=0.01)
        with suppress(queue.Full):
            self._ready.put_nowait(("end", None))  # for a consumer in another thread

    def _run(self) -> None:
        try:
            with closing(self._source) as source:
                for item in source:
                    self._ready.put(("item", item))
                    if self._closing.is_set():
                        return
            self._ready.put(("end", None))
        except BaseException as error:
            self._ready.put(("error", error))


class StepPrefetcher(Generic[Step]):
    """Iterator over the steps of `draws`, planned by `plan` and decoded from `source` as `requirements` says.

    plan: maps a step's samples, of which only sizes are known, and its number to what the runtime executes; the same on
    every rank. requirements: maps that to the parts that this rank uses. skips: samples that are refused, or cannot be
    decoded, are left out by all ranks together (see `found`), instead of raising UserError when their step is due.
    left_out: index → why, of samples left out before.
    """

    def __init__(
        self,
        data: IndexedData | StreamedData,
        draws: Iterable[StepSamples],
        source: SampleSource,
        plan: Callable[[Sequence[EncodedSample], int], Step],
        requirements: Callable[[Step], Parts],
        *,
        skips: bool = False,
        left_out: Mapping[int, str] | None = None,
        look_ahead: int | None = None,
    ) -> None:
        self._data = data
        self._draws = iter(draws)
        self._source = source
        self._plan = plan
        self._requirements = requirements
        self._skips = skips
        self._look_ahead = data.look_ahead if look_ahead is None else look_ahead
        self.left_out: Mapping[int, str] = dict(left_out or {})
        """Samples that proved bad so far, index → why; to be stored in checkpoints."""
        self._lock = threading.Lock()
        self._coming: _PlannedStep[Step] | None = None
        self.waited_seconds = 0.0
        """Seconds that the consumer has waited for samples so far."""
        self._counted_seconds = 0.0
        self._oldest = 0  # the lowest index of a stream that may still be due
        self._ahead = Prefetcher(self._collect_all())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepInput[Step]:
        planned = self._fetch()
        if planned is None:
            raise StopIteration
        self._coming = None
        if self.left_out.keys() & set(planned.indices):
            began = time.perf_counter()
            with self._lock:
                planned = self._again(planned)
            self.waited_seconds += time.perf_counter() - began
        if planned.bad:
            raise UserError(next(iter(planned.bad.values())))
        if isinstance(self._data, StreamedData):
            self._oldest = planned.draw.first
        waited = self.waited_seconds - self._counted_seconds
        self._counted_seconds = self.waited_seconds
        samples = tuple(planned.loaded.get(number, head) for number, head in enumerate(planned.heads))
        slowest = sorted(planned.loaded.values(), key=lambda sample: -sample.made_seconds)[:NAMED]
        batch = GlobalBatch(
            samples,
            planned.draw.position,
            planned.draw.epoch,
            planned.problems,
            waited,
            tuple((sample.id, sample.made_seconds) for sample in slowest),
        )
        return StepInput(batch, planned.step)

    def found(self) -> list[tuple[int, str]]:
        """Return the samples of the coming step that proved bad when this rank measured or decoded them: (index, why).

        All ranks call this before a step and pass the union of their results to `leave_out`. Waits for that step if
        such samples are skipped; otherwise there are none.
        """
        coming = self._fetch() if self._skips else None
        if coming is None:
            return []
        found, refused = dict(coming.bad), self._data.refused
        if self._data.known:  # measured by this rank's own requests, which may be refused for being slow
            found |= {index: refused[index] for index in coming.draw.indices.tolist() if index in refused}
        return [*found.items()]

    def leave_out(self, found: Iterable[tuple[int, str]]) -> None:
        """Leave samples out of the coming step and all after it. found: by any rank, in the same order on all."""
        fresh = {index: why for index, why in found if index not in self.left_out}
        if fresh:
            known = {index: why for index, why in self.left_out.items() if index >= self._oldest}
            self.left_out = {**known, **fresh}

    def close(self) -> None:
        """Stop prefetching. The source stays open."""
        self._ahead.close()
        self._source.forget(self._data.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fetch(self) -> _PlannedStep[Step] | None:
        if self._coming is None:
            began = time.perf_counter()
            self._coming = next(self._ahead, None)
            self.waited_seconds += time.perf_counter() - began
        return self._coming

    def _collect_all(self) -> Generator[_PlannedStep[Step]]:
        drafts: deque[_PlannedStep[Step]] = deque()
        given = look_ahead = 0
        for draw in self._draws:
            with self._lock:
                drafts.append(self._draft(draw))
                self._ask(drafts[-1], drafts[-1].parts)
            if len(drafts) > look_ahead:
                yield self._decoded(drafts.popleft())
                given += 1
                look_ahead = min(max(0, given - FIRST_STEPS), self._look_ahead)
        while drafts:
            yield self._decoded(drafts.popleft())

    def _decoded(self, draft: _PlannedStep[Step]) -> _PlannedStep[Step]:
        if not self._skips:
            refused = self._data.refused.keys() - self.left_out.keys()
            if bad := [index for index in draft.draw.indices.tolist() if index in refused]:
                raise UserError(self._data.refused[bad[0]])
        with self._lock:
            self._take(draft, draft.parts)
        return draft

    def _draft(self, draw: StepSamples) -> _PlannedStep[Step]:
        """Plan a step. Raises UserError if no sample is left."""
        bad = {**self._data.refused, **self.left_out} if self.left_out else self._data.refused
        indices = draw.indices.tolist()
        problems = tuple(bad[index] for index in indices if index in bad)
        kept = [(index, draw.first + place) for place, index in enumerate(indices) if index not in bad]
        if not kept:
            several = f"every sample of a batch is corrupt; the first: {problems[0]}"
            raise UserError(several if self._skips else problems[0])
        heads = tuple(self._data.head(index, number) for index, number in kept)
        step = self._plan(heads, draw.step)
        missing = {
            number: rest for number, parts in self._requirements(step).items() if (rest := parts - self._data.known)
        }
        return _PlannedStep(draw, tuple(index for index, _ in kept), heads, problems, step, missing)

    def _ask(self, draft: _PlannedStep[Step], parts: Parts) -> None:
        self._source.ask(
            [
                SampleRequest(
                    draft.heads[number].draw,
                    draft.indices[number],
                    wanted,
                    self._data.name,
                    _bytes_of(draft.heads[number], wanted),
                    self._data.undecoded(draft.indices[number]),
                )
                for number, wanted in parts.items()
            ]
        )

    def _take(self, draft: _PlannedStep[Step], parts: Parts) -> None:
        """Wait for the parts that were requested. Raises UserError for a bad sample, unless bad samples are skipped."""
        for number, wanted in parts.items():
            head = draft.heads[number]
            sample = self._source.take(self._data.name, head.draw)
            if isinstance(sample, UserError):
                if not self._skips:
                    raise sample
                draft.bad[draft.indices[number]] = str(sample)
                continue
            if dict(sample.sizes) != dict(head.sizes) or (
                TOKENS in wanted and replace(sample, content=None).content_digest != head.content
            ):
                if isinstance(self._data, IndexedData):
                    self._data.index.forget(draft.indices[number])
                raise UserError(
                    f"{head.id} is not what it was when its size was measured: its data or media changed; start again "
                    "or resume, and it is measured anew"
                )
            held = draft.loaded.get(number, head)
            has_tokens = bool(wanted & {TOKENS, QUESTION})
            draft.loaded[number] = replace(
                held,
                input_ids=sample.input_ids if has_tokens else held.input_ids,
                labels=sample.labels if has_tokens else held.labels,
                branch=sample.branch if has_tokens else held.branch,
                media={**held.media, **sample.media},
                made_seconds=held.made_seconds + sample.made_seconds,
            )

    def _again(self, before: _PlannedStep[Step]) -> _PlannedStep[Step]:
        """Plan the step again without samples that proved bad since; what is decoded already is kept."""
        draft = self._draft(before.draw)
        have = {before.heads[number].draw: (number, sample) for number, sample in before.loaded.items()}
        missing: dict[int, frozenset[str]] = {}
        for number, wanted in draft.parts.items():
            if (known := have.get(draft.heads[number].draw)) is not None:
                draft.loaded[number] = known[1]
                wanted = wanted - before.parts[known[0]]
            if wanted:
                missing[number] = wanted
        self._ask(draft, missing)
        self._take(draft, missing)
        return draft


def _bytes_of(head: EncodedSample, parts: frozenset[str]) -> int:
    """Estimate the bytes of a sample's parts: ids and labels, and media by the encoder tokens that they become."""
    tokens = 16 * head.sizes[LANGUAGE] if parts & {TOKENS, QUESTION} else 0
    return tokens + MEDIA_BYTES * sum(head.sizes.get(unit, 0) for unit in parts)


def gather_bad_samples(comm: Comm, found: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Gather the bad samples that any rank found, for `StepPrefetcher.leave_out`; called by all ranks."""
    return merge_bad_samples(all_gather_object(comm, list(found)))


def merge_bad_samples(found: Iterable[Iterable[Sequence[Any]]]) -> list[tuple[int, str]]:
    """Merge the bad samples that ranks found, in one order and each once."""
    merged: dict[int, str] = {}
    for of_rank in found:
        for index, why in of_rank:
            merged.setdefault(int(index), str(why))
    return sorted(merged.items())
