"""Transformers' models run unchanged on our attention: rows of samples give what the samples give alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cases.attention.mask_kinds import build_mask
from cases.models.tiny_families import ENCODERS, LANGUAGE, VOCABULARY, encoder, language_model
from cases.often import often
from dilatant.attention.hook import FOR_TOWERS, NAME, register, use_dilatant_attention
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.scores import AttentionError
from dilatant.attention.masks.packing import RowLayout, document_causal, full
from oracles.dense_mask import word_matrix

KINDS = ("mistral", "gpt_oss", "gemma2", "granite", "phi3")
"""Windows, sinks, soft caps, a scale of its own, one matrix for queries, keys and values."""
LENGTHS = (13, 1, 9, 7)  # longer and shorter than the windows of 6

# Float32 sums of tens of terms in another order, through four layers; values are of order one.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def positions_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def samples_of(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (1, length), generator=random) for length in lengths]


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )  # sums over tokens of products of what TOLERANCE bounds


def test_an_encoder_that_passes_no_borders_attends_within_each_item() -> None:
    register()
    module = torch.nn.Module()
    module.is_causal = False  # as RADIO's layers have it, which pass borders for several images alone
    query, key, value = torch.randn(3, 2, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    output, _ = ALL_ATTENTION_FUNCTIONS[FOR_TOWERS](module, query, key, value, None)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(output.transpose(1, 2), wanted, **TOLERANCE)
    module.is_causal = True
    with pytest.raises(AttentionError, match="got no attention_plan"):
        ALL_ATTENTION_FUNCTIONS[FOR_TOWERS](module, query, key, value, None)


@pytest.mark.parametrize("family", often(LANGUAGE, *KINDS))
def test_packed_text_equals_eager_attention_per_sample(family: str) -> None:
    model = language_model(family)
    samples = samples_of(LENGTHS)
    weight = torch.randn(sum(LENGTHS), VOCABULARY, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([model(input_ids=sample, use_cache=False).logits[0] for sample in samples])
    (alone * weight).sum().backward()
    expected = gradients(model)

    use_dilatant_attention(model)
    plan = AttentionPlan(document_causal(RowLayout.of_lengths(LENGTHS)))
    packed = model(
        input_ids=torch.cat(samples, dim=1), position_ids=positions_of(LENGTHS), attention_plan=plan, use_cache=False
    ).logits[0]
    torch.testing.assert_close(packed, alone, **TOLERANCE)
    (packed * weight).sum().backward()
    assert_same_gradients(gradients(model), expected)


@pytest.fixture
def dense_implementation() -> str:
    """An attention implementation that is handed who sees whom as a matrix, `seen` `[tokens, tokens]`."""

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kw: Any) -> Any:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        score = query @ key.mT * kw["scaling"]
        if kw.get("softcap") is not None:
            score = kw["softcap"] * torch.tanh(score / kw["softcap"])
        seen, place = kw["seen"], torch.arange(query.shape[2])
        if kw.get("sliding_window") is not None:
            seen = seen & (place[:, None] - place[None, :] < kw["sliding_window"])
        score = score.masked_fill(~seen, -torch.inf)
        if kw.get("s_aux") is not None:
            sinks = kw["s_aux"].view(1, -1, 1, 1).expand(*score.shape[:3], 1)
            score = torch.cat([score, sinks], dim=-1)
        weight = score.softmax(-1)[..., : key.shape[2]]
        return (weight @ value).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("dense_oracle", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("dense_oracle", lambda *args, **kwargs: None)
    return "dense_oracle"


# Images no longer than the windows: a window holds text back, and says nothing of how far an image sees itself.
SAMPLES = (
    (("text", 3), ("image", 5), ("text", 4)),
    (("text", 6),),
    (("image", 4), ("text", 2), ("image", 5), ("text", 5)),
)


@pytest.mark.parametrize("kind", ["embedded", "bidirectional_instances"])
@pytest.mark.parametrize("family", often(LANGUAGE, *KINDS))
def test_a_packed_image_microbatch_has_the_loss_of_its_samples(
    family: str, kind: str, dense_implementation: str
) -> None:
    model = language_model(family)
    lengths = tuple(sum(length for _, length in sample) for sample in SAMPLES)
    random = torch.Generator().manual_seed(2)
    rows = [torch.randn(1, length, 32, generator=random).requires_grad_() for length in lengths]
    labels = torch.randint(0, VOCABULARY, (sum(lengths),), generator=random)

    model.set_attn_implementation(dense_implementation)
    losses = []
    for row, sample, label in zip(rows, SAMPLES, labels.split(lengths), strict=True):
        mask = build_mask(RowLayout.of_samples([sample]), kind)
        seen = torch.tensor(word_matrix(mask.fields, mask.fields, mask.positions, mask.positions))
        logits = model(
            inputs_embeds=row, position_ids=positions_of((row.shape[1],)), seen=seen, use_cache=False
        ).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, label, reduction="sum"))
    loss_alone = torch.stack(losses).sum() / sum(lengths)
    loss_alone.backward()
    expected, expected_rows = gradients(model), [row.grad.clone() for row in rows]
    for row in rows:
        row.grad = None

    use_dilatant_attention(model)
    plan = AttentionPlan(build_mask(RowLayout.of_samples(SAMPLES), kind))
    logits = model(
        inputs_embeds=torch.cat(rows, dim=1), position_ids=positions_of(lengths), attention_plan=plan, use_cache=False
    ).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, loss_alone, rtol=1e-5, atol=1e-6)  # one sum in another order
    loss.backward()
    assert_same_gradients(gradients(model), expected)
    for row, gradient in zip(rows, expected_rows, strict=True):
        torch.testing.assert_close(row.grad, gradient, **TOLERANCE)


SIZES = (12, 5, 20)


@pytest.mark.parametrize("family", ENCODERS)
def test_packed_images_of_mixed_sizes_equal_each_image_alone(family: str) -> None:
    """Native resolution: the blocks of an encoder over patches of images of several sizes in one row."""
    model = encoder(family)
    blocks = model.encoder
    random = torch.Generator().manual_seed(3)
    images = [torch.randn(1, size, 24, generator=random) for size in SIZES]
    alone = torch.cat([blocks(image).last_hidden_state for image in images], dim=1)
    weight = torch.randn(alone.shape, generator=random)
    (alone * weight).sum().backward()
    expected = gradients(model)

    use_dilatant_attention(model)
    plan = AttentionPlan(full(RowLayout.of_lengths(SIZES)))
    packed = blocks(torch.cat(images, dim=1), attention_plan=plan).last_hidden_state
    torch.testing.assert_close(packed, alone, **TOLERANCE)
    (packed * weight).sum().backward()
    assert_same_gradients(gradients(model), expected)


@pytest.mark.parametrize("family", ENCODERS)
def test_a_batch_of_images_of_one_size_is_a_row_too(family: str) -> None:
    model = encoder(family)
    pixels = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    expected = model(pixel_values=pixels).last_hidden_state
    use_dilatant_attention(model)
    plan = AttentionPlan(full(RowLayout.of_lengths([expected.shape[1]] * 3)))
    found = model(pixel_values=pixels, attention_plan=plan).last_hidden_state
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_get_the_plan_of_their_own_microbatch(reentrant: bool) -> None:
    """SigLIP drops keywords, and a pipeline recomputes a microbatch after the next one's forward."""
    model = encoder("siglip_vision_model")
    use_dilatant_attention(model)
    plans = [AttentionPlan(full(RowLayout.of_lengths(sizes))) for sizes in ([4, 8], [10, 2])]
    rows = [torch.randn(1, 12, 24, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)]
    expected = []
    for row, plan in zip(rows, plans, strict=True):
        model.encoder(row, attention_plan=plan).last_hidden_state.square().sum().backward()
        expected.append(gradients(model))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    outputs = [
        model.encoder(row.clone().requires_grad_(), attention_plan=plan).last_hidden_state
        for row, plan in zip(rows, plans, strict=True)
    ]
    for output, wanted in zip(outputs, expected, strict=True):
        output.square().sum().backward()
        assert_same_gradients(gradients(model), wanted)


def test_tables_are_made_once_for_all_layers_and_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from dilatant.attention.kernels import attention_plan

    made = []
    original = attention_plan.block_table
    monkeypatch.setattr(
        attention_plan, "block_table", lambda *args, **kwargs: made.append(args) or original(*args, **kwargs)
    )
    model = use_dilatant_attention(language_model("gemma2"))
    plan = AttentionPlan(document_causal(RowLayout.of_lengths(LENGTHS)))
    logits = model(
        input_ids=torch.cat(samples_of(LENGTHS), dim=1),
        position_ids=positions_of(LENGTHS),
        attention_plan=plan,
        use_cache=False,
    ).logits
    logits.sum().backward()
    assert len(made) == 2  # one for the sliding layers, one for the others


def test_a_model_without_a_plan_is_told_how_to_get_one() -> None:
    model = use_dilatant_attention(language_model("llama"))
    with pytest.raises(AttentionError, match=r"LlamaAttention got no attention_plan: pass attention_plan="):
        model(input_ids=samples_of((4,))[0])


def test_a_family_that_drops_the_attention_plan_is_refused() -> None:
    model = encoder("siglip_vision_model")
    register()
    model.set_attn_implementation(NAME)
    with pytest.raises(AttentionError, match="use_dilatant_attention"):
        model.encoder(torch.randn(1, 4, 24), attention_plan=AttentionPlan(full(RowLayout.of_lengths([4]))))


@pytest.mark.parametrize(
    ("family", "keywords", "complaint"),
    [
        ("llama", {"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "an attention_mask with padding was given"),
        ("llama", {"attention_mask": torch.zeros(1, 1, 4, 4)}, "an attention_mask beside the plan"),
        ("llama", {"position_bias": torch.zeros(4, 4, 4)}, r"position_bias \(adds a bias"),
        ("llama", {"output_attentions": True}, "output_attentions"),
    ],
)
def test_what_packed_rows_do_not_have_is_refused_by_name(family: str, keywords: dict[str, Any], complaint: str) -> None:
    model = use_dilatant_attention(language_model(family))
    plan = AttentionPlan(document_causal(RowLayout.of_lengths([4])))
    with pytest.raises(AttentionError, match=complaint):
        model(input_ids=samples_of((4,))[0], attention_plan=plan, use_cache=False, **keywords)


def test_attention_dropout_is_refused_when_training() -> None:
    model = use_dilatant_attention(language_model("llama")).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    plan = AttentionPlan(document_causal(RowLayout.of_lengths([4])))
    with pytest.raises(AttentionError, match=r"dropout of 0\.1 in attention"):
        model(input_ids=samples_of((4,))[0], attention_plan=plan, use_cache=False)


def test_a_family_with_custom_attention_is_refused_by_name() -> None:
    config = AutoConfig.for_model("bloom", hidden_size=16, n_head=2, n_layer=1, vocab_size=16)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    with pytest.raises(AttentionError, match="BloomModel computes attention in its own way"):
        use_dilatant_attention(model)


def test_a_plan_for_another_row_is_refused() -> None:
    model = use_dilatant_attention(language_model("llama"))
    plan = AttentionPlan(document_causal(RowLayout.of_lengths([5])))
    with pytest.raises(AttentionError, match="query has 4 tokens, the mask 5"):
        model(input_ids=samples_of((4,))[0], attention_plan=plan, use_cache=False)


def test_families_with_chunked_layers_are_refused_by_name() -> None:
    config = AutoConfig.for_model(
        "llama4_text",
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        intermediate_size_mlp=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=1,
        attention_chunk_size=4,
        pad_token_id=0,
    )
    with pytest.raises(AttentionError, match="chunked attention layers"):
        use_dilatant_attention(AutoModel.from_config(config))


def test_a_batch_of_sounds_is_a_row_too() -> None:
    config = AutoConfig.for_model(
        "whisper",
        d_model=24,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=10,
        num_mel_bins=8,
        vocab_size=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    torch.manual_seed(0)
    model = AutoModel.from_config(config).get_encoder().eval()
    sounds = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(7))
    expected = model(sounds).last_hidden_state
    use_dilatant_attention(model)
    plan = AttentionPlan(full(RowLayout.of_lengths([10] * 3)))
    torch.testing.assert_close(model(sounds, attention_plan=plan).last_hidden_state, expected, **TOLERANCE)
