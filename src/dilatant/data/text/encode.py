"""Sample encoding: token ids with placeholders for media, labels, encoder inputs; checks of what users encoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dilatant.config.model import LANGUAGE
from dilatant.data.errors import MediaError, SampleError
from dilatant.data.media.pixels import EncoderInput, Pixels, as_array, concatenate_inputs
from dilatant.data.sample import EncodedSample, Media, Sample, content_digest
from dilatant.data.text.encoding import NO_LOSS, QUESTION, TOKENS, Encoding, grid_part
from dilatant.data.text.token_layout import Item, TokenLayout, lay_out, place_media, refuse_undesired


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """Sizes of a sample. tokens: unit → tokens that it processes, in the order of `Encoding.unit_names`. target_tokens:
    those with loss. content: see `EncodedSample.content_digest`. refusals: errors that hold at any `max_length`.
    is_desired: see `EncodedSample.desired`; True without a mark."""

    tokens: Mapping[str, int]
    target_tokens: int
    content: int
    refusals: tuple[SampleError, ...]
    is_desired: bool = True


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A sample up to the start of the assistant's last answer, and that answer as text."""

    sample: EncodedSample
    answer: str


def encode_sample(sample: Sample, encoding: Encoding, parts: frozenset[str] | None = None) -> EncodedSample:
    """Decode and tokenize a sample.

    parts: the parts to make; None for all. Without `TOKENS` or `QUESTION`, ids and labels are empty. The name of a unit
    decodes its media; `grid_part` of it computes only their sizes. `sizes` is always complete.
    Raises SampleError naming the sample: media missing or damaged, markers that do not match the media, too long, or
    nothing to learn.
    """
    if sample.encoded is not None:
        for refusal in find_problems(sample, encoding, deep=False):
            raise refusal
        return reduced(complete(sample.encoded, sample.id, encoding), encoding, parts)
    layout = lay_out(sample, encoding)
    for refusal in _refusals(sample, encoding, layout):
        raise refusal
    return _encoded(sample, encoding, layout, parts)


def encode_prompt(sample: Sample, encoding: Encoding) -> EncodedPrompt:
    """Encode a sample without its last answer, for generation. Its ids are a prefix of those of `encode_sample`.

    Raises SampleError naming the sample.
    """
    prompt, answer = _without_answer(sample, encoding)
    return EncodedPrompt(_encoded(prompt, encoding, lay_out(prompt, encoding, for_generation=True)), answer)


def _without_answer(sample: Sample, encoding: Encoding) -> tuple[Sample, str]:
    """Return the sample up to its last answer, and that answer's text. Raises SampleError if there is no question."""
    refuse_undesired(sample, encoding)
    turns, answer, unplaced = sample.turns, "", sample.unplaced
    if turns and turns[-1].role == "assistant":
        if not turns[-1].carries_loss:
            raise SampleError(sample.id, "its last answer is marked as not to be learned", "remove it from data.eval")
        answer = "".join(part for part in turns[-1].content if isinstance(part, str))
        if any(encoding.chat.template.reads(key) for key, _ in turns[-1].extras):
            answer = encoding.chat.last_answer(place_media(sample, encoding)[0], sample.tools)
        turns = turns[:-1]
        if encoding.targets:
            unplaced = _without_drawn(unplaced, answer, encoding)
    if not turns:
        raise SampleError(sample.id, "has no question, so nothing to answer", "remove it from data.eval")
    return Sample(sample.id, turns, unplaced, sample.tools), answer


def _without_drawn(unplaced: tuple[Media, ...], answer: str, encoding: Encoding) -> tuple[Media, ...]:
    """Return the media without those of the markers in the last answer, which are the last of their kind."""
    pattern, unit_of = encoding.markers["assistant"]
    left = list(unplaced)
    for marker in pattern.findall(answer):
        if marker not in unit_of:  # an escaped marker
            continue
        of_kind = [at for at, media in enumerate(left) if media.kind == unit_of[marker].kind]
        if of_kind:
            del left[of_kind[-1]]
    return tuple(left)


def find_problems(sample: Sample, encoding: Encoding, deep: bool) -> list[SampleError]:
    """Return every reason why `encode_sample` (or `encode_prompt`, if the sample is held out) would refuse the sample;
    with `deep` off, media are not decoded."""
    if (own := sample.encoded) is not None:
        tokens = len(own.input_ids)
        is_long = encoding.max_length is not None and tokens > encoding.max_length
        long = [too_long(sample.id, tokens, encoding.max_length or 0)] if is_long else []
        return [*long, *encoded_problems(own, sample.id, encoding)]
    try:
        layout = _lay_out_to_judge(sample, encoding)
    except SampleError as error:
        return [error]
    problems = list(_refusals(sample, encoding, layout))
    for item in layout.items if deep else ():
        try:
            _processed(sample, item)
        except SampleError as error:
            problems.append(error)
    return problems


def measure_sample(sample: Sample, encoding: Encoding) -> SampleSizes:
    """Return the sizes that `encode_sample` would give, from headers alone. Raises SampleError naming the sample if
    tokens are unknown, or if it is held out and has no question; long samples are measured, not refused."""
    if (own := sample.encoded) is not None:
        for problem in encoded_problems(own, sample.id, encoding):
            raise problem
        whole = complete(own, sample.id, encoding)
        return SampleSizes(whole.sizes, whole.target_tokens, whole.content_digest, ())
    layout = _lay_out_to_judge(sample, encoding)
    return SampleSizes(
        layout.sizes(encoding),
        int(layout.targets.sum()),
        content_digest(layout.ids, layout.labels),
        tuple(_nothing_to_learn(sample, encoding, layout)),
        sample.desired is not False,
    )


def too_long(sample: str, tokens: int, max_length: int) -> SampleError:
    """Return the error of a sample with too many tokens."""
    return SampleError(
        sample,
        f"has {tokens} tokens, more than the {max_length} allowed",
        "raise 'data.max_length' (and 'train.row_tokens'), shorten it, or set 'data.on_error: skip'",
    )


def media_of(sample: Sample, encoding: Encoding) -> Iterator[tuple[int, int, Media, str]]:
    """Yield a sample's media in token order: position of the first token, number of tokens, the item, and its unit's
    name. An encoded sample has none. Raises SampleError naming the sample."""
    if sample.encoded is not None:
        return
    layout = lay_out(sample, encoding)
    at = 0
    for item in layout.items:
        at += int(np.argmax(layout.ids[at:] == item.unit.placeholder_id))
        yield at, item.merged_tokens, item.media, item.unit.name
        at += item.merged_tokens


def _refusals(sample: Sample, encoding: Encoding, layout: TokenLayout) -> Iterator[SampleError]:
    """Yield the errors of a sample whose parts are all readable."""
    if encoding.max_length is not None and len(layout.ids) > encoding.max_length:
        yield too_long(sample.id, len(layout.ids), encoding.max_length)
    yield from _nothing_to_learn(sample, encoding, layout)


def _nothing_to_learn(sample: Sample, encoding: Encoding, layout: TokenLayout) -> Iterator[SampleError]:
    answers = [part for turn in sample.turns if turn.role == "assistant" for part in turn.content]
    reads = encoding.chat.template.reads
    calls = any(reads(key) for turn in sample.turns if turn.role == "assistant" for key, _ in turn.extras)
    if encoding.train_on == "assistant" and not layout.targets.any():
        if answers and layout.is_cut:
            yield SampleError(
                sample.id,
                f"has no answer within its first {encoding.cuts_at} tokens, so nothing to learn",
                "raise 'data.max_length', or remove it",
            )
            return
        yield SampleError(
            sample.id, "has no assistant answer that carries loss, so nothing to learn", "add one or remove it"
        )
    elif answers and not calls and not any(isinstance(part, Media) or part.strip() for part in answers):
        yield SampleError(sample.id, "has only empty answers", "write one or remove it")


def _encoded(
    sample: Sample, encoding: Encoding, layout: TokenLayout, parts: frozenset[str] | None = None
) -> EncodedSample:
    media: dict[str, dict[str, list[EncoderInput]]] = {}
    for item in layout.items:
        if parts is None or item.unit.name in parts:
            made: Mapping[str, EncoderInput] = _processed(sample, item)
        elif grid_part(item.unit.name) in parts:
            made = item.grid
        else:
            continue
        collected = media.setdefault(item.unit.name, {})
        for name, values in made.items():
            collected.setdefault(name, []).append(values)
    together = {
        unit: {name: concatenate_inputs(values) for name, values in inputs.items()} for unit, inputs in media.items()
    }
    ids, labels, branch = layout.ids, layout.labels, layout.branch
    if parts is not None and QUESTION in parts:
        prompt = lay_out(_without_answer(sample, encoding)[0], encoding, for_generation=True)
        labels = _labels_of_answer(labels, len(prompt.ids), encoding)
    elif parts is not None and TOKENS not in parts:
        ids, labels, branch = ids[:0], labels[:0], None
    return EncodedSample(sample.id, ids, labels, together, layout.sizes(encoding), branch=branch)


def _labels_of_answer(labels: NDArray[np.int64], before: int, encoding: Encoding) -> NDArray[np.int64]:
    """Return the labels with loss on the last answer only, which begins at token `before`."""
    answer = np.where(np.arange(len(labels)) < before, NO_LOSS, labels)
    ends = np.flatnonzero(np.isin(answer, encoding.chat.stop_ids))
    if len(ends):  # text that a template writes after the answer is not scored
        answer[int(ends[0]) + 1 :] = NO_LOSS
    return answer


def _lay_out_to_judge(sample: Sample, encoding: Encoding) -> TokenLayout:
    """Lay out a sample; if it is held out, its question must have a layout, too. Raises SampleError."""
    if encoding.held_out:
        lay_out(_without_answer(sample, encoding)[0], encoding, for_generation=True)
    return lay_out(sample, encoding)


def _processed(sample: Sample, item: Item) -> dict[str, EncoderInput]:
    """Return the inputs of an item; none for a clip's later pieces. Raises SampleError, also if their size differs from
    the header's, which the index stores and other ranks compute with."""
    try:
        made = {} if item.size is None else item.unit.process(item.media, item.size)
        for name, promised in item.grid.items():
            if not np.array_equal(as_array(made[name]), as_array(promised)):
                raise MediaError(
                    f"{item.media.kind} {item.media.name!r} decodes to {name} {as_array(made[name]).tolist()}, but its "
                    f"header says {as_array(promised).tolist()}",
                    "replace the file or remove the sample",
                )
        return made
    except MediaError as error:
        raise error.of(sample.id) from None
    except (ValueError, MemoryError) as error:
        reason = "there is not enough memory" if isinstance(error, MemoryError) else error
        raise SampleError(
            sample.id,
            f"the processor of {item.unit.name!r} refuses {item.media.kind} {item.media.name!r}: {reason}",
            "replace the file or remove the sample",
        ) from None


def encoded_problems(sample: EncodedSample, name: str, encoding: Encoding) -> Iterator[SampleError]:
    """Yield the errors of a user's sample, apart from its length."""
    if encoding.pairs or sample.branch is not None:
        yield SampleError(name, "is encoded, and pairs are read from records alone", "give 'chosen' and 'rejected'")
        return
    ids, labels = np.asarray(sample.input_ids), np.asarray(sample.labels)
    if ids.ndim != 1 or ids.shape != labels.shape or {ids.dtype.kind, labels.dtype.kind} - {"i", "u"}:
        shown = f"input_ids {ids.dtype}{list(ids.shape)} and labels {labels.dtype}{list(labels.shape)}"
        yield SampleError(name, f"has {shown}", "give integers, [tokens] each")
        return
    if (ids < 0).any():
        yield SampleError(name, f"has the token {ids.min()}", "ids are 0 or more")
    if sample.sizes.get(LANGUAGE, len(ids)) != len(ids):
        yield SampleError(name, f"has {len(ids)} tokens, and {sample.sizes[LANGUAGE]} in its sizes", "correct them")
    encoders = {unit.name for unit in encoding.units}
    for unit in sorted({*sample.media, *sample.sizes} - {LANGUAGE}):
        if unit not in encoders:
            known = ", ".join(sorted(encoders)) or "none"
            yield SampleError(name, f"has inputs of {unit!r}, which is no encoder", f"there are {known}")
        elif (sample.sizes.get(unit, 0) > 0) != (unit in sample.media):
            yield SampleError(
                name,
                f"has media of {unit!r} without sizes[{unit!r}], or the reverse",
                "give the inputs and how many tokens the encoder processes",
            )
    if not (labels[1:] != NO_LOSS).any():
        yield SampleError(name, "has no label that carries loss, so nothing to learn", "add one or remove it")


def complete(sample: EncodedSample, name: str, encoding: Encoding) -> EncodedSample:
    """Return a user's sample under the name of its place, with int64 ids and labels, and the sizes of all units."""
    labels = np.array(sample.labels, np.int64)
    labels[:1] = NO_LOSS
    sizes = {unit: int(sample.sizes.get(unit, 0)) for unit in encoding.unit_names}
    media = {
        unit: {key: value if isinstance(value, Pixels) else np.asarray(value) for key, value in inputs.items()}
        for unit, inputs in sample.media.items()
    }
    return EncodedSample(name, np.asarray(sample.input_ids, np.int64), labels, media, {**sizes, LANGUAGE: len(labels)})


def reduced(sample: EncodedSample, encoding: Encoding, parts: frozenset[str] | None) -> EncodedSample:
    """Return the requested parts of a complete sample; see `encode_sample`. A unit's `grid_part` is all of its inputs:
    which of them are sizes is unknown."""
    if parts is None:
        return sample
    ids, labels = sample.input_ids, sample.labels
    if QUESTION in parts:  # the last run of targets
        carries = np.flatnonzero(labels != NO_LOSS)
        first = carries[max(np.flatnonzero(np.diff(carries) > 1) + 1, default=0)]
        labels = _labels_of_answer(labels, int(first), encoding)
    elif TOKENS not in parts:
        ids, labels = ids[:0], labels[:0]
    media = {unit: own for unit, own in sample.media.items() if not parts.isdisjoint((unit, grid_part(unit)))}
    return replace(sample, input_ids=ids, labels=labels, media=media)
