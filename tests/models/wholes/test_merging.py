"""Encoder tokens land on their placeholders in order; counts that differ are errors that name the sample."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.tiny_models import ENCODERS, LANGUAGE_MODELS, images, positions, tokens, vision_language
from dilatant.config import UserError
from dilatant.models.language.merge import find_places, merge_rows
from dilatant.models.multimodal import Encoder, MultimodalModel


@settings(max_examples=40, deadline=None, print_blob=True)
@given(row=st.lists(st.sampled_from([5, 6, 64, 65]), min_size=1, max_size=24), batch=st.integers(1, 3))
def test_every_placeholder_takes_the_next_token_of_its_encoder(row: list[int], batch: int) -> None:
    ids = torch.tensor([row] * batch)
    embeddings = torch.randn(*ids.shape, 3)
    names = {"vision": 64, "audio": 65}
    rows = {name: torch.randn(int((ids == id_).sum()), 3) for name, id_ in names.items()}
    merged = merge_rows(embeddings, ids, names, rows)
    places = find_places(ids.numpy().ravel(), names, ids.device)
    assert torch.equal(merge_rows(embeddings, ids, names, rows, places=places), merged)
    used = dict.fromkeys(names, 0)
    for line, token in torch.cartesian_prod(torch.arange(batch), torch.arange(len(row))).tolist():
        expected = embeddings[line, token]
        for name, id_ in names.items():
            if ids[line, token] == id_:
                expected = rows[name][used[name]]
                used[name] += 1
        assert torch.equal(merged[line, token], expected)


def test_images_change_only_their_own_sample() -> None:
    mllm = vision_language()
    placeholder = torch.full((1, 16), mllm.placeholder_ids["vision"])
    ids = torch.cat([placeholder, tokens(1, 3), placeholder, tokens(1, 4)], dim=1)
    pictures = images(2)
    arguments = {"position_ids": positions(19, 20)}
    one = mllm(ids, encoder_inputs={"vision": {"pixel_values": pictures}}, **arguments).logits
    other = torch.stack([pictures[0], pictures[1] + 1])
    two = mllm(ids, encoder_inputs={"vision": {"pixel_values": other}}, **arguments).logits
    assert torch.equal(one[:, :19], two[:, :19])
    assert not torch.allclose(one[:, 19:], two[:, 19:], atol=1e-4)


@pytest.mark.parametrize("frozen", ["nothing", "language", "everything"])
def test_text_without_images_trains_whatever_is_frozen(frozen: str) -> None:
    mllm = vision_language()
    if frozen != "nothing":
        mllm.language.freeze()
    if frozen == "everything":
        mllm["vision"].freeze("all")
    ids = tokens(1, 6)
    for inputs in ({}, {"vision": {"pixel_values": images(0)}}):
        mllm(ids, encoder_inputs=inputs, labels=ids).loss.backward()
    assert all(parameter.grad is None for parameter in mllm["vision"].parameters())


def test_a_placeholder_may_be_a_token_of_the_vocabulary() -> None:
    mllm = MultimodalModel({"vision": Encoder(ENCODERS["siglip"], placeholder_id=7)}, LANGUAGE_MODELS["llama"], seed=0)
    virtual = vision_language()
    ids = torch.cat([tokens(1, 4) % 7, torch.full((1, 16), 7)], dim=1)
    inputs = {"vision": {"pixel_values": images(1)}}
    given = mllm(ids, encoder_inputs=inputs, labels=ids.where(ids != 7, -100))
    expected = virtual(ids.where(ids != 7, 64), encoder_inputs=inputs)
    assert torch.equal(given.logits, expected.logits)
    given.loss.backward()
    assert not mllm.language.model.get_input_embeddings().weight.grad[7].any()


def test_two_encoders_fill_their_own_places() -> None:
    encoders = {"vision": Encoder(ENCODERS["siglip"]), "audio": Encoder(ENCODERS["whisper"], projector="linear")}
    mllm = MultimodalModel(encoders, LANGUAGE_MODELS["llama"], seed=0)
    assert mllm.placeholder_ids == {"vision": 64, "audio": 65}
    inputs = {"vision": {"pixel_values": images(1)}, "audio": {"input_features": torch.randn(1, 8, 20)}}
    ids = torch.tensor([[65] * 10 + [3] + [64] * 16 + [4]])
    rows = mllm.encode(inputs)
    merged = mllm.language.embed(ids, rows)[0]
    assert torch.equal(merged[:10], rows["audio"])
    assert torch.equal(merged[11:27], rows["vision"])
    mllm(ids, encoder_inputs=inputs, labels=tokens(1, 28)).loss.backward()
    assert all(p.grad is not None for p in mllm.parameters() if p.requires_grad)


def test_a_count_mismatch_names_the_sample_and_both_counts() -> None:
    mllm = vision_language()
    placeholder = mllm.placeholder_ids["vision"]
    ids = torch.tensor([[3, *[placeholder] * 16, 4, 5, *[placeholder] * 15, 6]])
    names = {"sample_ids": ("first", "second"), "lengths": (18, 17), "position_ids": positions(18, 17)}
    with pytest.raises(
        UserError, match=r"vision: 31 placeholders in the text, 32 tokens.*'first' \(16\).*'second' \(15\)"
    ):
        mllm(ids, encoder_inputs={"vision": {"pixel_values": images(2)}}, **names)
    with pytest.raises(UserError, match=r"31 placeholders in the text, 16 tokens.*'second' needs 15 and only 0"):
        mllm(ids, encoder_inputs={"vision": {"pixel_values": images(1)}}, **names)
    with pytest.raises(UserError, match=r"31 placeholders in the text, 0 tokens.*'first' needs 16"):
        mllm(ids, **names)
    with pytest.raises(UserError, match=r"0 placeholders in the text, 16 tokens.*no placeholder in sample number 0"):
        mllm(tokens(1, 4), encoder_inputs={"vision": {"pixel_values": images(1)}})


def test_inputs_for_an_unknown_encoder_are_refused() -> None:
    with pytest.raises(UserError, match="'video'; the encoders are vision"):
        vision_language()(tokens(1, 4), encoder_inputs={"video": {"pixel_values": images(1)}})


def test_prepended_rows_stand_in_front_of_every_text() -> None:
    mllm = vision_language(merge="prepend")
    placeholder = torch.full((2, 16), mllm.placeholder_ids["vision"])
    ids = tokens(2, 5)
    inputs = {"vision": {"pixel_values": images(2)}}
    written = torch.cat([placeholder, ids], dim=1)
    assert torch.equal(mllm(ids, encoder_inputs=inputs).logits, mllm(written, encoder_inputs=inputs).logits)
    implied = mllm(ids, encoder_inputs=inputs, labels=ids).loss
    assert torch.equal(implied, mllm(written, encoder_inputs=inputs, labels=written.where(written < 64, -100)).loss)
    # Padding on the left stays on the left.
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    written = torch.stack([torch.cat([ids[0, :2], placeholder[0], ids[0, 2:]]), torch.cat([placeholder[1], ids[1]])])
    wide = torch.ones_like(written)
    wide[0, :2] = 0
    given = mllm(ids, encoder_inputs=inputs, attention_mask=mask).logits
    assert torch.equal(given, mllm(written, encoder_inputs=inputs, attention_mask=wide).logits)


def test_rows_that_cannot_be_shared_out_are_refused() -> None:
    mllm = vision_language(merge="prepend")
    with pytest.raises(UserError, match="48 encoder tokens cannot be shared out in front of 5 texts"):
        mllm(tokens(5, 4), encoder_inputs={"vision": {"pixel_values": images(3)}})
    with pytest.raises(UserError, match="packed row"):
        mllm(tokens(1, 4), position_ids=positions(2, 2), encoder_inputs={"vision": {"pixel_values": images(2)}})
