"""Training on block tables: a packed microbatch has the loss and gradients of its samples one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from cases.attention.packed_row import packed_inputs
from cases.tiny_models import (
    ENCODER_FAMILIES,
    ENCODERS,
    LANGUAGE_FAMILIES,
    LANGUAGE_MODELS,
    VOCABULARY,
    vision_language,
)
from dilatant import Encoder
from dilatant.attention.masks.mask import pack_fields
from dilatant.attention.masks.packing import RowLayout, document_causal
from dilatant.config import UserError
from dilatant.config.model import LanguageModelConfig
from dilatant.data.sample import EncodedSample
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import (
    RowAttention,
    attend_as_configured,
    choose_attention,
    limits_of,
    place_rows,
    use_row_attention,
)
from dilatant.models.sources import parse_config
from dilatant.planning.problem.describe_model import describe_model
from oracles.dense_mask import bidirectional_instances, embedded, matrix, tokens_of
from oracles.one_process import losses_of_batch

AUDIO = "whisper"


def make_samples(model: MultimodalModel, encoder: str) -> list[EncodedSample]:
    """Two images in the first sample, none in the second, one at the start of the third; longer than the windows."""
    random = np.random.default_rng(0)
    item = model.language.row_attention.units["vision"].tokens  # type: ignore[union-attr]
    channels = 1 if encoder == "siglip" else 3
    shape = (8, 20) if encoder == AUDIO else (channels, 8, 8)
    name = "input_features" if encoder == AUDIO else "pixel_values"
    samples = []
    for number, parts in enumerate([(3, "item", 2, "item", 4), (9,), ("item", 5)]):
        ids: list[int] = []
        for part in parts:
            if part == "item":
                ids += [model.placeholder_ids["vision"]] * item
            else:
                ids += random.integers(3, VOCABULARY, part).tolist()
        labels = [token if token < VOCABULARY else -100 for token in ids]
        labels[0] = -100
        items = parts.count("item")
        media = {"vision": {name: random.standard_normal((items, *shape)).astype(np.float32)}} if items else {}
        samples.append(EncodedSample(f"{number}", np.array(ids), np.array(labels), media=media))
    return samples


def gradients(model: MultimodalModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def packed_loss(model: MultimodalModel, samples: list[EncodedSample]) -> Tensor:
    attention = model.language.attention_of([sample.input_ids for sample in samples])
    loss = model(**packed_inputs(samples), attention_kwargs=attention, return_logits=False).loss
    assert loss is not None
    return loss


def check(language: str, encoder: str, media: str, seen_in: Callable[[Any], Any] | None) -> None:
    model = vision_language(language, encoder)
    model.media_attention = media
    plain = vision_language(language, encoder)
    use_row_attention(model)
    model.train()
    plain.train()
    samples = make_samples(model, encoder)
    unit = plain["vision"]
    expected = losses_of_batch(
        plain.language.model,
        {"vision": (unit.model, unit.projector, unit.skip_tokens)},
        plain.placeholder_ids,
        samples,
        seen_in,
    )["language"]
    expected.backward()
    loss = packed_loss(model, samples)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)  # one float32 sum in another order
    loss.backward()
    wanted, found = gradients(plain), gradients(model)
    assert found.keys() == wanted.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        # Sums over tokens of what the loss's tolerance bounds; a key's bias cancels down to rounding.
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("language", LANGUAGE_FAMILIES)
def test_every_language_family_packs_without_changing_loss(language: str) -> None:
    check(language, "siglip", "causal", None)


@pytest.mark.parametrize("encoder", ENCODER_FAMILIES)
def test_every_encoder_family_packs_without_changing_loss(encoder: str) -> None:
    check("llama", encoder, "causal", None)


MEDIA = ("bidirectional", "embedded", "modality")


@pytest.mark.parametrize(
    ("language", "media"),
    [
        pytest.param(language, media, marks=() if n == m else pytest.mark.slow)
        for n, language in enumerate(("llama", "qwen3", "phi3"))
        for m, media in enumerate(MEDIA)
    ],
)
def test_media_see_each_other_as_the_config_says(language: str, media: str) -> None:
    """Families without windows: transformers takes one dense mask for all of their layers."""
    check(language, "siglip", media, lambda sample: seen_in(sample, media))


def seen_in(sample: EncodedSample, media: str) -> np.ndarray:
    segments: list[tuple[str, int]] = []
    place = 0
    while place < len(sample.input_ids):
        segments.append(("text", 1) if sample.input_ids[place] < VOCABULARY else ("image", 16))
        place += segments[-1][1]
    rule = bidirectional_instances(True) if media == "bidirectional" else embedded(media == "modality")
    return matrix(tokens_of([segments]), rule)


@pytest.mark.parametrize(
    ("language", "media"),
    [
        pytest.param(language, media, marks=pytest.mark.slow if (n + m) % 2 else ())
        for n, language in enumerate(("llama", "gemma2", "gemma3_text"))
        for m, media in enumerate(("causal", "bidirectional", "embedded"))
    ],
)
def test_what_is_generated_is_what_the_training_mask_predicts(language: str, media: str) -> None:
    """With a cache, prompts of unlike lengths padded on the left, windows shorter than the prompts."""
    model = vision_language(language, "siglip")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)  # so that answers differ with the mask
    model.media_attention = media
    use_row_attention(model)
    model.eval()
    prompts = make_samples(model, "siglip")
    longest = max(len(sample.input_ids) for sample in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(prompts):
        ids[row, longest - len(sample.input_ids) :] = torch.as_tensor(sample.input_ids)
        mask[row, longest - len(sample.input_ids) :] = 1
    pixels = torch.cat([torch.as_tensor(s.media["vision"]["pixel_values"]) for s in prompts if s.media])
    written = model.generate(
        ids,
        encoder_inputs={"vision": {"pixel_values": pixels}},
        attention_mask=mask,
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    for sample, answer in zip(prompts, written.tolist(), strict=True):
        answered = EncodedSample(
            sample.id,
            np.concatenate([sample.input_ids, answer]),
            np.zeros(len(sample.input_ids) + 4, dtype=np.int64),
            media=sample.media,
        )
        with torch.no_grad():
            logits = model(
                **packed_inputs([answered]), attention_kwargs=model.language.attention_of([answered.input_ids])
            ).logits
        assert logits[0, -5:-1].argmax(-1).tolist() == answer


def test_placeholders_count_items_even_when_nested() -> None:
    from dilatant.models.row_attention import MediaTokens

    attention = RowAttention("embedded", {"a": MediaTokens(90, 2), "b": MediaTokens(91, 2)})
    row = attention.layout([np.array([5, 90, 91, 91, 90, 90, 90, 7])])
    assert np.repeat(row.modality, row.length).tolist() == [0, 1, 2, 2, 1, 1, 1, 0]
    assert np.repeat(row.instance, row.length).tolist() == [0, 1, 3, 3, 1, 2, 2, 0]
    with pytest.raises(UserError, match="sample number 1 of a row has 3 placeholders of a, which are no whole items"):
        attention.layout([np.array([5]), np.array([90, 90, 90])])


def test_a_row_without_a_plan_gets_one_from_its_positions() -> None:
    model = vision_language("llama", "siglip")
    model.media_attention = "bidirectional"
    use_row_attention(model)
    samples = make_samples(model, "siglip")
    inputs = packed_inputs(samples)
    attention = model.language.attention_of([sample.input_ids for sample in samples])
    expected = model(**inputs, attention_kwargs=attention).logits
    assert torch.equal(model(**inputs).logits, expected)


def test_by_default_no_mask_is_made_of_a_packed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the device asked whether positions restart, which transformers does before it makes any mask."""
    model = vision_language("llama", "siglip")
    attend_as_configured(model, LanguageModelConfig(id="any"))
    samples = make_samples(model, "siglip")

    def refuse(*args: Any) -> None:
        raise AssertionError("transformers looked for packed samples")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", refuse)
    attention = model.language.attention_of([sample.input_ids for sample in samples])
    assert model(**packed_inputs(samples), attention_kwargs=attention).loss.isfinite()


def test_explicit_attention_stays_and_unsupported_family_warns(recwarn: Any) -> None:
    named = vision_language("llama", "siglip")
    attend_as_configured(named, LanguageModelConfig(id="any", attn_implementation="eager"))
    assert named.language.row_attention is None
    assert not recwarn
    dropping = vision_language("llama", "siglip")
    dropping.language.model.config.attention_dropout = 0.1
    with pytest.warns(UserWarning, match=r"square of the row.*attention_dropout is 0\.1"):
        attend_as_configured(dropping, LanguageModelConfig(id="any"))
    assert dropping.language.row_attention is None
    with pytest.raises(UserError, match=r"attention_dropout is 0\.1"):
        attend_as_configured(dropping, LanguageModelConfig(id="any", attn_implementation="dilatant"))


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow), None])
@pytest.mark.parametrize("language", [pytest.param("llama", marks=pytest.mark.slow), "gemma3_text"])
def test_a_padded_batch_has_the_loss_of_transformers_attention(language: str, side: str | None) -> None:
    ours, plain = vision_language(language, "siglip"), vision_language(language, "siglip")
    use_row_attention(ours)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (3, 9), generator=random)
    mask = None
    if side is not None:
        mask = torch.ones_like(ids)
        mask[1, slice(0, 4) if side == "left" else slice(5, None)] = 0
    found = ours(ids, attention_mask=mask, labels=ids)
    expected = plain(ids, attention_mask=mask, labels=ids)
    is_token = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    torch.testing.assert_close(found.logits[is_token], expected.logits[is_token], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)


def test_a_model_that_needs_block_tables_refuses_to_run_without() -> None:
    model = vision_language("llama", "siglip")
    model.media_attention = "bidirectional"
    with pytest.raises(UserError, match="use_row_attention"):
        model(torch.zeros(1, 3, dtype=torch.long))


def test_media_attention_is_saved_beside_plain_unit_configs(tmp_path: Any) -> None:
    model = vision_language("llama", "siglip")
    model.media_attention = "bidirectional"
    use_row_attention(model)
    model.save_pretrained(tmp_path)
    assert "dilatant" not in (tmp_path / "language" / "config.json").read_text()
    assert MultimodalModel.from_pretrained(tmp_path).media_attention == "bidirectional"


def test_loading_a_model_with_a_custom_mask_needs_its_code(tmp_path: Any) -> None:
    model = vision_language("llama", "siglip")
    model.media_attention = document_causal
    use_row_attention(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="media_attention is code; give it again"):
        MultimodalModel.from_pretrained(tmp_path)
    again = MultimodalModel.from_pretrained(tmp_path, media_attention=document_causal)
    assert again.media_attention is document_causal


def test_invalid_media_attention_is_refused_at_build_time() -> None:
    encoders = {name: Encoder(ENCODERS["siglip"]) for name in ("vision", "depth")}

    def build(said: Any) -> Any:
        return MultimodalModel(encoders, LANGUAGE_MODELS["llama"], seed=0, media_attention=said).media_attention

    assert build({"vision": "embedded"}) == {"vision": "embedded", "depth": "causal"}
    assert build({"vision": "causal"}) == "causal"
    assert build(dict.fromkeys(encoders, "modality")) == "modality"
    for said, message in (
        ("all", "media_attention is 'all'; give one of causal, bidirectional, embedded, modality"),
        ({"vision": "all"}, "give one of causal"),
        ({"vision": ["causal"]}, "give one of causal"),
        (5, "media_attention is 5; give one of causal"),
        ({"audio": "causal"}, "media_attention names 'audio'; the encoders are vision, depth"),
        (lambda: None, r"media_attention is called as \(segments\)"),
    ):
        with pytest.raises(UserError, match=message):
            build(said)


def test_generation_refuses_a_mask_that_hides_earlier_tokens() -> None:
    def apart(segments: RowLayout) -> Any:
        """Text sees text alone."""
        mask = document_causal(segments)
        own = np.where(segments.is_text, 1, 2)
        fields = pack_fields(own, own, causal=True)
        return mask.from_tokens(np.repeat(fields, segments.length), mask.positions)

    model = vision_language("llama", "siglip")
    model.eval()
    use_row_attention(model)
    sample = make_samples(model, "siglip")[0]
    given = {
        "encoder_inputs": {"vision": {"pixel_values": torch.as_tensor(sample.media["vision"]["pixel_values"])}},
        "max_new_tokens": 2,
        "do_sample": False,
        "pad_token_id": 0,
    }
    model.language.row_attention = None
    model.media_attention = apart
    use_row_attention(model)
    with pytest.raises(UserError, match="apart: the last token of prompt 0 does not see all before it"):
        model.generate(torch.as_tensor(sample.input_ids)[None], **given)
    model = vision_language("llama", "siglip")
    model.media_attention = document_causal
    use_row_attention(model)
    assert model.generate(torch.as_tensor(sample.input_ids)[None], **given).shape == (1, 2)


HYBRID = {
    "model_type": "qwen3_5_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "layer_types": ["linear_attention", "full_attention"],
}


def test_linear_attention_packs_no_rows_without_block_tables() -> None:
    model = MultimodalModel({}, parse_config(HYBRID, "language"), seed=0)
    with pytest.warns(UserWarning, match=r"a row.*linear_attention would carry .* into the next.* is 'sdpa'"):
        attend_as_configured(model, LanguageModelConfig(id="any", attn_implementation="sdpa"))
    assert model.language.row_attention is None
    assert not model.language.packs_rows
    (line,) = describe_model(model).limits
    assert line.startswith("rung 1 of 3: every sample is a row and a microbatch of its own: samples of a packed row")
    model = MultimodalModel({}, parse_config(HYBRID, "language"), seed=0)
    attend_as_configured(model, LanguageModelConfig(id="any"))
    assert model.language.row_attention is not None
    assert model.language.row_attention.placement == "contiguous"
    place_rows(model, "auto")
    assert model.language.row_attention.placement == "contiguous"


def test_a_unit_that_cannot_be_cut_is_said_when_the_model_opens() -> None:
    model = vision_language()
    assert limits_of(model) == ()
    model["vision"].uncut = "a reason"
    with pytest.warns(UserWarning, match="rung 2 of 3: vision stays one stage: a reason"):
        choose_attention(model, "sdpa")


def test_linear_attention_keeps_packed_samples_independent() -> None:
    model = MultimodalModel({}, parse_config(HYBRID, "language"), seed=0)
    samples = [torch.arange(3, 3 + length) for length in (7, 1, 9)]
    alone = torch.cat([model.language.model(ids[None], use_cache=False).logits for ids in samples], 1)
    use_row_attention(model)
    given = model.language.attention_of([ids.numpy() for ids in samples])
    positions = torch.cat([torch.arange(len(ids)) for ids in samples])[None]
    output: Any = model.language(torch.cat(samples)[None], position_ids=positions, **given)
    torch.testing.assert_close(output.logits, alone)  # 17 tokens, fp32
