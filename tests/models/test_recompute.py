"""Recomputed blocks keep little, and change nothing but time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cases.tiny_models import ENCODERS, LANGUAGE_MODELS, images, language_only, tokens, vision_language
from dilatant.attention.kernels import blockwise
from dilatant.models.multimodal import Encoder, MultimodalModel
from dilatant.models.row_attention import use_row_attention
from dilatant.runtime.state.weight_gradients import WeightGradients, accumulate, replace_linears
from oracles.live_storages import LiveStorages

HOW = ["block", "block_keep_attention"]


def train_step(mllm: MultimodalModel) -> None:
    ids = torch.cat([torch.full((1, 16), mllm.placeholder_ids["vision"]), tokens(1, 6)], dim=1)
    labels = ids.where(ids < 64, -100)
    mllm(ids, encoder_inputs={"vision": {"pixel_values": images(1)}}, labels=labels).loss.backward()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("frozen", [False, True])
def test_recomputed_blocks_run_twice_and_change_no_gradient(frozen: bool, how: Any) -> None:
    """Also in a frozen language model, through which the projector's gradient passes."""
    mllm = vision_language()
    if frozen:
        mllm.language.freeze()
    train_step(mllm)
    expected = {name: p.grad.clone() for name, p in mllm.named_parameters() if p.grad is not None}
    mllm.zero_grad()
    runs = []
    mllm.language.model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: runs.append("language"))
    mllm["vision"].model.encoder.layers[2].mlp.register_forward_pre_hook(lambda *_: runs.append("vision"))
    for name in ("vision", "language"):
        mllm[name].recompute(how)
    train_step(mllm)
    assert sorted(runs) == ["language", "language", "vision", "vision"]
    if frozen:  # nothing before the language model trains in a text without images
        assert not mllm.language.embed(tokens(1, 3), {}).requires_grad
    found = {name: p.grad for name, p in mllm.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    for name in ("vision", "language"):
        mllm[name].recompute("none")
    runs.clear()
    train_step(mllm)
    assert sorted(runs) == ["language", "vision"]


DROPPING = {
    "language": ({"model_type": "opt", "vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3,
                  "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
                  "dropout": 0.5, "attention_dropout": 0.5}, ENCODERS["siglip"]),
    "vision": (LANGUAGE_MODELS["llama"], {**ENCODERS["whisper"], "dropout": 0.5, "activation_dropout": 0.5}),
}  # fmt: skip
"""Families whose blocks drop by their own flag: frozen unit → (language model, encoder)."""


@pytest.mark.parametrize("how", [pytest.param("block", marks=pytest.mark.slow), "block_keep_attention"])
@pytest.mark.parametrize("frozen", DROPPING)
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
def test_recomputation_changes_neither_dropout_nor_gradients(frozen: str, trains: bool, how: Any) -> None:
    language, encoder = DROPPING[frozen]
    mllm = MultimodalModel({"vision": Encoder(encoder)}, language, seed=0)
    if not trains:
        mllm.freeze([frozen if frozen == "language" else "vision.encoder"])
    geometry = mllm["vision"].geometry
    ids = torch.cat([torch.full((1, geometry.tokens_per_row), 64), tokens(1, 6)], dim=1)
    given = {"vision": {geometry.input_name: torch.randn(1, *geometry.row_shape)}}

    def step(seed: int) -> tuple[float, dict[str, torch.Tensor]]:
        torch.manual_seed(seed)
        mllm.zero_grad()
        loss = mllm(ids, encoder_inputs=given, labels=ids.where(ids < 64, -100)).loss
        loss.backward()
        return loss.item(), {name: p.grad.clone() for name, p in mllm.named_parameters() if p.grad is not None}

    mllm.train()
    kept = [step(seed) for seed in (1, 2)]
    for unit in mllm.units.values():
        unit.recompute(how)
    mllm.train()
    recomputed = [step(seed) for seed in (1, 2)]
    assert (kept[0][0] == kept[1][0]) == (not trains)  # what trains drops, what is frozen does not
    for (loss, gradients), (again, regained) in zip(kept, recomputed, strict=True):
        assert again == loss
        assert regained.keys() == gradients.keys()
        assert all(torch.equal(regained[name], gradient) for name, gradient in gradients.items())


def test_a_recomputed_block_stays_an_instance_of_its_class() -> None:
    unit = vision_language()["vision"]
    blocks, names = unit.blocks, [name for name, _ in unit.model.named_parameters()]
    classes = [type(block) for block in blocks]
    unit.recompute("block_keep_attention")
    unit.recompute()
    unit.recompute()  # the last one counts, once
    assert all(isinstance(block, own) for block, own in zip(blocks, classes, strict=True))
    assert [type(block).__name__ for block in blocks] == [own.__name__ for own in classes]
    assert [name for name, _ in unit.model.named_parameters()] == names
    unit.recompute("none")
    assert [type(block) for block in blocks] == classes


class _CountsSdpa(TorchDispatchMode):
    """How often torch's attention runs forward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        self.count += name.startswith("_scaled_dot_product") and "backward" not in name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("how", "runs"), [("none", 9), ("block", 18), ("block_keep_attention", 9)])
def test_kept_attention_runs_once_through_torch(how: Any, runs: int) -> None:
    mllm = vision_language()  # five blocks and four, the attention of both is torch's
    for unit in mllm.units.values():
        unit.recompute(how)
    with _CountsSdpa() as counted:
        train_step(mllm)
    assert counted.count == runs


@pytest.mark.parametrize(
    "family", ["gemma2", *(pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "qwen3", "phi3"))]
)
@pytest.mark.parametrize(
    ("media", "split"),
    [
        ("causal", True),
        ("embedded", False),
        pytest.param("causal", False, marks=pytest.mark.slow),
        pytest.param("embedded", True, marks=pytest.mark.slow),
    ],
)
def test_kept_attention_runs_once_through_our_kernels(
    family: str, split: bool, media: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soft caps, windows and masks of media run on block tables; also in a backward in two halves."""
    runs: list[int] = []
    forward = blockwise.forward
    monkeypatch.setattr(blockwise, "forward", lambda *given: runs.append(1) or forward(*given))
    found = {}
    for how in ("none", *HOW):
        mllm = MultimodalModel(
            {"vision": Encoder(ENCODERS["siglip"])}, LANGUAGE_MODELS[family], seed=0, media_attention=media
        )
        use_row_attention(mllm)
        mllm.language.recompute(how)
        gradients = WeightGradients()
        replaced = replace_linears(mllm.language.model, gradients)
        runs.clear()
        ids = torch.cat([tokens(1, 4), torch.full((1, 16), 64), tokens(1, 6)], dim=1)
        rows = {"vision": torch.randn(16, 32, generator=torch.Generator().manual_seed(2), requires_grad=True)}
        given = mllm.language.attention_of([ids[0].numpy()])
        where = torch.arange(26)[None]
        loss = mllm.language(ids, rows, position_ids=where, labels=ids.where(ids < 64, -100), **given).loss
        if split:
            with gradients.deferring():
                loss.backward()
            accumulate(gradients.take())
        else:
            loss.backward()
        own = {name: p.grad for name, p in mllm.language.model.named_parameters() if p.grad is not None}
        found[how] = (len(runs), loss.item(), own | {"rows": rows["vision"].grad}, replaced)
    plain, twice, kept = (found[how] for how in ("none", *HOW))
    assert twice[0] == 2 * plain[0]
    assert kept[0] == plain[0]
    for _, loss, gradients, _ in (twice, kept):
        assert loss == plain[1]
        assert gradients.keys() == plain[2].keys()
        assert all(torch.equal(gradient, plain[2][name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("ours", [False, True])
def test_a_block_keeps_its_input_and_its_attention(ours: bool) -> None:
    """Attention is its output, [tokens, heads * head size], and the logarithm of a sum for each token and head."""
    count, width, heads, blocks = 96, 32, 4, 5
    held = {}
    for how in ("none", *HOW):
        mllm = language_only()
        if ours:
            use_row_attention(mllm)
        unit = mllm.language
        unit.recompute(how)
        stage = unit.stage(1, 1 + blocks)
        ids = tokens(1, count)
        given = {"position_ids": torch.arange(count)[None], **unit.attention_of([ids[0].numpy()])}
        hidden = torch.randn(1, count, width, requires_grad=True)
        stage(None, None, hidden, **given)  # tables and masks of the row are made, and stay
        with LiveStorages([*mllm.parameters(), *mllm.buffers(), hidden, given["position_ids"]]) as live:
            output = stage(None, None, hidden, **given)
            held[how] = live.now
            output.sum().backward()
    row = 4 * count
    assert held["block"] <= (blocks + 2) * row * width  # and rotary tables, of one block's width
    assert held["block_keep_attention"] - held["block"] == blocks * row * (width + heads)
    assert held["none"] > 3 * held["block_keep_attention"]
