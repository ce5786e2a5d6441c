"""Every mask kind shows a query the right keys: `visible` over the mask's words against rules over named tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.attention import mask_kinds
from cases.attention.mask_strategies import MODALITIES, prepended_rows, ragged_masks, rows
from dilatant.attention.masks import packing
from dilatant.attention.masks.mask import MAX_INSTANCES, MAX_SAMPLES, AttentionMask, MaskError, pack_fields, visible
from dilatant.attention.masks.packing import RowLayout, Segment
from oracles import dense_mask as oracle

# Compiled code is loaded on first use, which no deadline should count.
checked = settings(deadline=None, print_blob=True, max_examples=12)
thorough = settings(checked, max_examples=30)


def seen(mask: AttentionMask) -> np.ndarray:
    """Return the mask as dense booleans, by `visible` on each pair."""
    words, at = mask.fields.tolist(), mask.positions.tolist()
    pairs = [[visible(q, k, i, j, mask.window) for k, j in zip(words, at)] for q, i in zip(words, at)]
    return np.array(pairs, dtype=bool).reshape(len(words), len(words))


RULES = {
    "causal": oracle.causal,
    "document_causal": oracle.document_causal,
    "full": oracle.full,
    "embedded": oracle.embedded(across=False),
    "bidirectional_instances": oracle.bidirectional_instances(across=False),
}


@pytest.mark.parametrize("kind", sorted(RULES))
@checked
@given(samples=rows)
def test_a_kind_means_its_rule(kind, samples):
    mask = mask_kinds.build_mask(RowLayout.of_samples(samples, MODALITIES), kind)
    np.testing.assert_array_equal(seen(mask), oracle.matrix(oracle.tokens_of(samples), RULES[kind]))


@checked
@given(samples=prepended_rows, across=st.booleans())
def test_prepended_outputs_see_themselves_and_text_sees_them(samples, across):
    mask = mask_kinds.prepended(RowLayout.of_samples(samples, MODALITIES), across)
    np.testing.assert_array_equal(seen(mask), oracle.matrix(oracle.tokens_of(samples), oracle.embedded(across)))


@checked
@given(samples=rows)
def test_images_see_each_other_only_when_asked(samples):
    row = RowLayout.of_samples(samples, MODALITIES)
    tokens = oracle.tokens_of(samples)
    np.testing.assert_array_equal(
        seen(mask_kinds.embedded(row, across_instances=True)), oracle.matrix(tokens, oracle.embedded(across=True))
    )
    np.testing.assert_array_equal(
        seen(mask_kinds.bidirectional_instances(row, across_instances=True)),
        oracle.matrix(tokens, oracle.bidirectional_instances(across=True)),
    )


MEDIA_RULES = {
    "causal": oracle.document_causal,
    "bidirectional": oracle.bidirectional_instances(across=True),
    "isolated": oracle.bidirectional_instances(across=False),
    "embedded": oracle.embedded(across=False),
    "modality": oracle.embedded(across=True),
}


def by_modality(kinds):
    """Return the mask in which each token follows the rule of its modality, and text the rules of all."""
    return lambda q, k: MEDIA_RULES[kinds.get(q.modality, "causal")](q, k)


@checked
@given(samples=rows, data=st.data())
def test_each_modality_sees_as_its_own_kind_says(samples, data):
    kinds = {name: data.draw(st.sampled_from(packing.MEDIA_KINDS)) for name in MODALITIES[1:]}
    mask = packing.media_mask(RowLayout.of_samples(samples, MODALITIES), kinds)
    # "isolated" sees the text before it; what else is seen like text is so for all that look at it.
    tokens = oracle.tokens_of(samples)
    expected = oracle.matrix(tokens, by_modality(kinds))
    if "isolated" in kinds.values() and "causal" in kinds.values():
        plain = {"text", *(name for name, kind in kinds.items() if kind == "causal")}
        isolated = [kinds.get(token.modality) == "isolated" for token in tokens]
        for q, k in ((q, k) for q in tokens for k in tokens):
            if isolated[q.place] and k.modality in plain and k.sample == q.sample and k.index <= q.index:
                expected[q.place, k.place] = True
    np.testing.assert_array_equal(seen(mask), expected)


@pytest.mark.parametrize("kind", packing.MEDIA_KINDS)
def test_sixty_modalities_have_masks_in_one_sample(kind):
    segments = [segment for n in range(60) for segment in ((f"sense{n}", 2), ("text", 1), (f"sense{n}", 1))]
    samples = [segments, segments[60:90][::-1]]
    kinds = {f"sense{n}": kind if n % 2 else "embedded" for n in range(60)}
    mask = packing.media_mask(RowLayout.of_samples(samples), kinds)
    expected = oracle.matrix(oracle.tokens_of(samples), by_modality(kinds))
    np.testing.assert_array_equal(seen(mask), expected)


@checked
@given(samples=rows)
def test_a_sample_may_have_any_mask_of_its_own(samples):
    """Frames (two or more items without text between them) see each other; other pictures see only themselves."""

    def frames(row):
        assert not row.is_padding.any()
        runs = np.cumsum(np.diff(row.modality, prepend=row.modality[:1]) != 0)
        return packing.media_mask(replace(row, instance=np.where(row.is_text, 0, runs + 1)), "bidirectional")

    def rule(q, k):
        if q.sample != k.sample:
            return False
        own = [token for token in tokens if token.sample == q.sample and token.modality != "padding"]
        first, last = sorted((own.index(q), own.index(k)))
        between = {token.modality for token in own[first : last + 1]}
        return k.index <= q.index or (len(between) == 1 and q.modality != "text")

    samples = [[part for part in sample if part[1]] or [("text", 1)] for sample in samples]
    tokens = oracle.tokens_of(samples)
    mask = packing.mask_of_samples(RowLayout.of_samples(samples, MODALITIES), frames)
    np.testing.assert_array_equal(seen(mask), oracle.matrix(tokens, rule))


def test_a_mask_of_one_s_own_that_does_not_fit_names_the_sample():
    row = RowLayout.of_lengths([2, 3])
    masks = {
        "is of type str; give an AttentionMask": lambda alone: "causal",
        "sample number 1 .* has 2 tokens, the sample has 3": lambda alone: packing.full(RowLayout.of_lengths([2])),
        "has a window; the widths are those of the model": lambda alone: mask_kinds.sliding_window(alone, 2),
        "token 0 has the word of padding": lambda alone: AttentionMask.from_tokens([0] * alone.num_tokens),
    }
    for message, make in masks.items():
        with pytest.raises(MaskError, match=message):
            packing.mask_of_samples(row, make)


@checked
@given(samples=rows, window=st.integers(1, 12))
def test_a_window_reaches_its_width_in_positions_of_the_sample(samples, window):
    row = RowLayout.of_samples(samples, MODALITIES)
    tokens = oracle.tokens_of(samples)
    for mask, rule in (
        (mask_kinds.sliding_window(row, window), oracle.sliding(window)),
        (packing.full(row).with_window(window), oracle.bidirectional_window(window)),
        (
            mask_kinds.bidirectional_instances(row, across_instances=True).with_window(window),
            oracle.bidirectional_instances(across=True, window=window),
        ),
    ):
        np.testing.assert_array_equal(seen(mask), oracle.matrix(tokens, rule))


@checked
@given(samples=rows, data=st.data())
def test_prefix_tokens_see_each_other_and_the_rest_is_causal(samples, data):
    row = RowLayout.of_samples(samples, MODALITIES)
    lengths = [sum(length for _, length in sample) for sample in samples]
    prefix = [data.draw(st.integers(0, length)) for length in lengths]
    np.testing.assert_array_equal(
        seen(packing.prefix_lm(row, prefix)), oracle.matrix(oracle.tokens_of(samples), oracle.prefix_lm(prefix))
    )


@thorough
@given(samples=rows, data=st.data(), window=st.integers(1, 12))
def test_a_window_holds_what_is_behind_the_prefix_alone(samples, data, window):
    row = RowLayout.of_samples(samples, MODALITIES)
    prefix = [data.draw(st.integers(0, sum(length for _, length in sample))) for sample in samples]
    whole = oracle.prefix_lm(prefix)

    def rule(q, k):
        return whole(q, k) and (q.index < prefix[q.sample] or q.index - k.index < window)

    np.testing.assert_array_equal(
        seen(packing.prefix_lm(row, prefix).with_window(window)), oracle.matrix(oracle.tokens_of(samples), rule)
    )


@checked
@given(first=rows, second=rows)
def test_packing_keeps_every_row_its_own_mask(first, second):
    parts = [
        mask_kinds.embedded(RowLayout.of_samples(first, MODALITIES)),
        packing.full(RowLayout.of_samples(second, MODALITIES)),
        mask_kinds.causal(RowLayout.of_samples(first, MODALITIES)),
    ]
    dense = [seen(part) for part in parts]
    total = sum(len(part) for part in dense)
    expected = np.zeros((total, total), dtype=bool)
    at = 0
    for part in dense:
        expected[at : at + len(part), at : at + len(part)] = part
        at += len(part)
    np.testing.assert_array_equal(seen(packing.pack(parts)), expected)


@checked
@given(samples=prepended_rows, data=st.data())
def test_samples_of_one_row_may_have_masks_of_different_kinds(samples, data):
    kinds = [data.draw(st.sampled_from(sorted(RULES))) for _ in samples]
    mask = mask_kinds.multimodal_packing(RowLayout.of_samples(samples, MODALITIES), kinds)

    def rule(q, k):
        return q.sample == k.sample and RULES[kinds[q.sample]](q, k)

    np.testing.assert_array_equal(seen(mask), oracle.matrix(oracle.tokens_of(samples), rule))


@checked
@given(samples=rows)
def test_a_row_is_the_same_from_segments_and_from_tokens(samples):
    row = RowLayout.of_samples(samples, MODALITIES)
    kept = row.length > 0
    number = np.unique(row.sample[kept], return_inverse=True)[1]  # samples without tokens leave no trace in tokens
    columns = [np.repeat(part, row.length[kept]) for part in (number, row.modality[kept], row.instance[kept])]
    again = RowLayout.of_tokens(*columns, MODALITIES)
    for build in (mask_kinds.embedded, mask_kinds.bidirectional_instances, packing.document_causal):
        np.testing.assert_array_equal(seen(build(again)), seen(build(row)))


@checked
@given(mask=ragged_masks())
def test_visible_reads_the_documented_bits(mask):
    expected = oracle.word_matrix(mask.fields, mask.fields, mask.positions, mask.positions, mask.window)
    np.testing.assert_array_equal(seen(mask), expected)


def test_one_image_in_several_segments_is_one_instance():
    samples = [[("vision", 2, 7), ("text", 1), ("vision", 2, 7), ("vision", 3)]]
    mask = mask_kinds.embedded(RowLayout.of_samples(samples, MODALITIES))
    np.testing.assert_array_equal(seen(mask), oracle.matrix(oracle.tokens_of(samples), oracle.embedded(across=False)))


@checked
@given(mask=ragged_masks(), seed=st.integers(0, 2**32 - 1))
def test_permuted_tokens_keep_what_they_see(mask, seed):
    order = np.random.default_rng(seed).permutation(mask.num_tokens)
    np.testing.assert_array_equal(seen(mask.take(order)), seen(mask)[np.ix_(order, order)])


def test_a_million_tokens_cost_what_their_segments_cost():
    mask = mask_kinds.embedded(RowLayout.of_samples([[("vision", 1 << 19), ("text", 1 << 19)]]))
    assert mask.runs.start.tolist() == [0, 1 << 19]
    assert mask.num_tokens == 1 << 20


def test_a_row_holds_as_many_samples_as_the_word_tells_apart():
    assert packing.document_causal(RowLayout.of_lengths([1] * MAX_SAMPLES)).num_tokens == MAX_SAMPLES
    with pytest.raises(MaskError, match=r"sample 4096 .* at most 4096 samples"):
        packing.document_causal(RowLayout.of_lengths([1] * (MAX_SAMPLES + 1)))
    half = packing.document_causal(RowLayout.of_lengths([1] * 2049))
    with pytest.raises(MaskError, match="at most 4096 samples"):
        packing.pack([half, half])


def test_a_row_holds_as_many_images_as_the_word_tells_apart():
    images = [("vision", 1)] * (MAX_INSTANCES - 1)
    row = RowLayout.of_samples([images, images[:9]])
    assert mask_kinds.embedded(row).num_tokens == MAX_INSTANCES + 8
    with pytest.raises(MaskError, match=r"instance 65536 .* 65535 instances a sample"):
        mask_kinds.embedded(RowLayout.of_samples([[*images, ("vision", 1)]]))


def test_user_mistakes_name_the_place_and_the_limit():
    with pytest.raises(MaskError, match=r"'smell': 'causal' is no kind of media mask .* of a modality"):
        packing.media_mask(RowLayout.of_samples([[("vision", 1)]]), {"smell": "causal"})
    with pytest.raises(MaskError, match="'vision': 'all' is no kind of media mask"):
        packing.media_mask(RowLayout.of_samples([[("vision", 1)]]), "all")
    with pytest.raises(MaskError, match=r"own 4096 .*12 classes of tokens \(give one bit"):
        pack_fields(4096, 1)
    with pytest.raises(MaskError, match="sample 1, segment 0: unknown modality 'smell'; known are text, vision"):
        RowLayout.of_samples([[("text", 1)], [("smell", 2)]], ["text", "vision"])
    with pytest.raises(MaskError, match="sample 0, segment 1: length -2"):
        RowLayout.of_samples([[("text", 1), Segment("vision", -2)]])
    with pytest.raises(MaskError, match="sample 1: vision follows text"):
        mask_kinds.prepended(RowLayout.of_samples([[("vision", 2), ("text", 1)], [("text", 1), ("vision", 1)]]))
    with pytest.raises(MaskError, match="sample 1: prefix of 4 tokens in a sample of 3"):
        packing.prefix_lm(RowLayout.of_lengths([5, 3]), [5, 4])
    with pytest.raises(MaskError, match="unknown mask kind 'diagonal'; known are bidirectional_instances, causal"):
        mask_kinds.build_mask(RowLayout.of_lengths([5]), "diagonal")
    with pytest.raises(MaskError, match="1 mask kinds for 2 samples"):
        mask_kinds.multimodal_packing(RowLayout.of_lengths([5, 5]), ["full"])
    with pytest.raises(MaskError, match="numbered from 0 in row order"):
        RowLayout.of_tokens([0, 1, 0], [0, 0, 0], [0, 0, 0], ["text"])
    with pytest.raises(MaskError, match="an index into"):
        RowLayout.of_tokens([0, 0], [0, 1], [0, 0], ["text"])
    with pytest.raises(MaskError, match="bit 63"):
        AttentionMask.from_tokens([-1])
    with pytest.raises(MaskError, match="int32"):
        AttentionMask.from_tokens([1], [2**31])
    with pytest.raises(MaskError, match="window must be at least 1"):
        mask_kinds.sliding_window(RowLayout.of_lengths([5]), 0)
    with pytest.raises(MaskError, match=r"own 4096 is outside .*attend -1 is outside"):
        pack_fields(4096, -1)


@checked
@given(
    groups=st.lists(
        st.tuples(
            st.integers(0, 3),  # text
            st.integers(0, 3),  # a picture's tokens
            st.integers(1, 3),  # text to its end
            st.lists(st.integers(1, 4), min_size=1, max_size=2),  # what follows, in one or two ways
            st.booleans(),  # whether the ways share what is before them
        ),
        min_size=1,
        max_size=3,
    ),
    kind=st.sampled_from(["causal", "bidirectional", "embedded"]),
    window=st.sampled_from([None, 3]),
)
def test_ways_on_from_a_shared_beginning_see_it_and_themselves(groups, kind, window):
    samples, lengths, shared = [], [], []
    for before, picture, after, ways, shares in groups:
        samples += [[("text", before), ("vision", picture), ("text", after + way)] for way in ways]
        lengths.append([before + picture + after + way for way in ways])
        shared.append(before + picture + after if shares else 0)
    apart = packing.media_mask(RowLayout.of_samples(samples, MODALITIES), kind).with_window(window)
    joined = packing.share_beginnings(apart, lengths, shared)
    dense, tokens, start = seen(apart), [], 0
    for number, (ways, common) in enumerate(zip(lengths, shared)):
        for way, length in enumerate(ways):
            tokens += [(number, way, at, start) for at in range(common if way else 0, length)]
            start += length
    expected = np.zeros((len(tokens), len(tokens)), bool)
    for q, (number, way, at, first) in enumerate(tokens):
        for k, (other, other_way, other_at, _) in enumerate(tokens):
            is_own = number == other and (way == other_way or (other_way == 0 and other_at < shared[number]))
            expected[q, k] = is_own and dense[first + at, first + other_at]
    np.testing.assert_array_equal(seen(joined), expected)
