"""Callbacks change what goes in and out of an encoder without touching it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from cases.tiny_models import ENCODERS, LANGUAGE_MODELS, images, tokens, vision_language
from dilatant.config.errors import UserError
from dilatant.models.multimodal import Encoder, MultimodalModel


def split(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """AnyRes: a 16x16 image becomes a thumbnail and four tiles of 8x8."""
    pixels = inputs["pixel_values"]
    thumbnail = functional.avg_pool2d(pixels, 2)[:, None]
    tiles = pixels.unfold(2, 8, 8).unfold(3, 8, 8).flatten(2, 3).transpose(1, 2)
    return {"pixel_values": torch.cat([thumbnail, tiles], dim=1).flatten(0, 1)}


def test_large_images_are_split_for_an_unchanged_encoder() -> None:
    mllm = vision_language(before_encoder=split)
    plain = vision_language()
    pictures = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    placeholder = torch.full((1, 5 * 16), mllm.placeholder_ids["vision"])
    ids = torch.cat([tokens(1, 2), placeholder, tokens(1, 2, seed=1), placeholder], dim=1)
    rows = mllm.encode({"vision": {"pixel_values": pictures}})["vision"]
    for index, picture in enumerate(pictures):
        parts = [functional.avg_pool2d(picture, 2)] + [picture[:, y : y + 8, x : x + 8] for y in (0, 8) for x in (0, 8)]
        expected = torch.cat([plain["vision"]({"pixel_values": part[None]})[0] for part in parts])
        # Rows of a batch of ten or of one: matrix products may round differently.
        torch.testing.assert_close(rows[index * 80 : (index + 1) * 80], expected, rtol=0, atol=1e-6)
    inputs = {"vision": {"pixel_values": pictures}}
    mllm(ids, encoder_inputs=inputs, labels=ids.where(ids < 64, -100)).loss.backward()
    assert mllm["vision"].model.embeddings.patch_embedding.weight.grad.abs().sum() > 0


def test_callbacks_run_in_the_paper_order_with_their_inputs() -> None:
    calls = []

    def before_encoder(inputs):
        calls.append(("before_encoder", tuple(inputs["pixel_values"].shape)))
        return inputs

    def after_encoder(inputs, hidden):
        calls.append(("after_encoder", tuple(inputs["pixel_values"].shape), tuple(hidden.shape)))
        return hidden

    def after_projector(inputs, hidden):
        calls.append(("after_projector", tuple(inputs["pixel_values"].shape), tuple(hidden.shape)))
        return hidden

    def before_language_model(rows, inputs):
        calls.append(("before_language_model", tuple(rows["vision"].shape), sorted(inputs)))
        return inputs

    mllm = MultimodalModel(
        {
            "vision": Encoder(
                ENCODERS["clip"],
                features="patch",
                before_encoder=before_encoder,
                after_encoder=after_encoder,
                after_projector=after_projector,
            )
        },
        LANGUAGE_MODELS["llama"],
        before_language_model=before_language_model,
        seed=0,
    )
    ids = torch.full((1, 32), 64)
    mllm(ids, encoder_inputs={"vision": {"pixel_values": images(2, channels=3)}}, attention_mask=torch.ones_like(ids))
    assert calls == [
        ("before_encoder", (2, 3, 8, 8)),
        ("after_encoder", (2, 3, 8, 8), (2, 16, 24)),
        ("after_projector", (2, 3, 8, 8), (2, 16, 32)),
        ("before_language_model", (32, 32), ["attention_mask", "input_ids"]),
    ]


@pytest.mark.parametrize("key", ["before_encoder", "after_encoder", "after_projector", "before_language_model"])
def test_a_wrong_callback_signature_is_refused_at_build_time(key: str) -> None:
    takes = "inputs" if key == "before_encoder" else "(rows|inputs), (hidden|inputs)"
    given = {key: lambda a, b, c: a}
    around = given if key == "before_language_model" else {}
    encoder = Encoder(ENCODERS["siglip"], **{} if around else given)
    with pytest.raises(UserError, match=rf"{key} is called as \({takes}\), but takes \(a, b, c\)"):
        MultimodalModel({"vision": encoder}, LANGUAGE_MODELS["llama"], **around)


def test_a_callback_may_merge_by_itself() -> None:
    def add_mean(rows, inputs):
        embeddings = mllm.language.model.get_input_embeddings()(inputs["input_ids"])
        return {**inputs, "inputs_embeds": embeddings + rows["vision"].mean(dim=0)}

    mllm = MultimodalModel(
        {"vision": Encoder(ENCODERS["siglip"])}, LANGUAGE_MODELS["llama"], before_language_model=add_mean, seed=0
    )
    ids = tokens(1, 5)
    inputs = {"vision": {"pixel_values": images(1)}}
    embeddings = mllm.language.model.get_input_embeddings()(ids) + mllm.encode(inputs)["vision"].mean(dim=0)
    expected = mllm.language.model(inputs_embeds=embeddings).logits
    assert torch.equal(mllm(ids, encoder_inputs=inputs).logits, expected)


def test_a_projector_may_be_any_module_and_merge_tokens() -> None:
    class PixelShuffle(torch.nn.Module):
        """Four neighbouring tokens become one."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4 * 24, 32)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.linear(hidden.unflatten(1, (-1, 4)).flatten(2))

    mllm = vision_language(projector=PixelShuffle())
    ids = torch.cat([torch.full((1, 4), 64), tokens(1, 3)], dim=1)
    assert mllm(ids, encoder_inputs={"vision": {"pixel_values": images(1)}}).logits.shape == (1, 7, 64)
