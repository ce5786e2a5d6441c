"""Steps of whole models that no declaration names, as hypothesis draws them, and what transformers computes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cases.cut_wholes import adapted_alike
from cases.drawn_steps import draw_assignment, draw_plan, draw_schedule
from dilatant.config.model import LoraConfig
from dilatant.data.media_units.processed_unit import IS_CLIP, SHAPE, flatten
from dilatant.data.sample import EncodedSample
from dilatant.models.core.dtype import choose_fp8
from dilatant.models.core.stage import stage_tensors
from dilatant.models.encoders.narrow_encoder import auto_class
from dilatant.models.families.media_proof import samples_with_media
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.parallel.tensor_plan import degree_problems, tensor_plan
from dilatant.models.row_attention import use_row_attention
from dilatant.plan.plan import Plan
from dilatant.runtime.state.holders import trainable_layers
from dilatant.schedule.schedule import Assignment, Schedule
from dilatant.schedule.trainability import trainability_of
from oracles.fp8_linear import round_linears

_TEXT = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_ENCODER = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
_FIXED = {**_ENCODER, "image_size": 16, "patch_size": 4}
_SOUND = {**_ENCODER, "hidden_size": 32, "intermediate_size": 128, "num_mel_bins": 8}
_SPATIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
GENERIC: Mapping[str, dict[str, Any]] = {
    "deepseek_vl": {
        "text_config": _TEXT,
        "vision_config": {**_FIXED, "model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_id": 127,
    },
    "mistral3": {  # images of native sizes; probes of large ones make masks of all pairs of patches in each rank
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_FIXED, "model_type": "pixtral", "head_dim": 12, "image_size": 32, "patch_size": 8},
        "image_token_index": 127,
        "spatial_merge_size": 2,
    },
    "vipllava": {  # the features of several blocks
        "text_config": _TEXT,
        "vision_config": {**_FIXED, "model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_index": 127,
        "vision_feature_layers": [-1, -3],
    },
    "glm4v": {  # positions in time, height and width
        "text_config": {**_TEXT, "model_type": "glm4v_text", **_SPATIAL},
        "vision_config": {
            "hidden_size": 24,
            "intermediate_size": 48,
            "depth": 3,
            "num_heads": 2,
            "image_size": 32,
            "patch_size": 4,
            "out_hidden_size": 32,
        },
        "image_token_id": 127,
        "video_token_id": 126,
        "image_start_token_id": 125,
        "image_end_token_id": 124,
        "video_start_token_id": 123,
        "video_end_token_id": 122,
    },
    "glmasr": {"text_config": _TEXT, "audio_config": {**_SOUND, "model_type": "glmasr_encoder"}, "audio_token_id": 127},
    "voxtral": {
        "text_config": _TEXT,
        "audio_config": {**_SOUND, "model_type": "voxtral_encoder"},
        "audio_token_id": 127,
    },
}
"""Small models of families that `FAMILIES` does not list."""


@dataclass(frozen=True)
class GenericCase:
    """One drawn step; plain, so that it is sent to workers and printed when it fails."""

    family: str
    numbers: tuple[int, ...]
    """The samples of the step, among `samples_of`."""
    lora: bool = False
    dora: bool = False
    """Whether adapters have magnitudes."""
    dtype: torch.dtype = torch.float32
    frozen: tuple[str, ...] = ()
    recompute: str = "none"
    seed: int = 0
    plan: Plan = field(default_factory=lambda: Plan(()))
    assignment: Assignment = field(default_factory=lambda: Assignment({}))
    schedule: Schedule = field(default_factory=lambda: Schedule({}))
    compiler: str = ""
    """Backend of `torch.compile` for the blocks; empty to run them as they are."""
    fp8: bool = False
    """Whether linear layers of blocks multiply in FP8."""

    @property
    def adapters(self) -> LoraConfig | None:
        """Adapters of all units; the projectors' too."""
        encoders = tuple(pretrained(self.family).family.towers)
        return LoraConfig(r=2, lora_alpha=3, use_dora=self.dora, units=(*encoders, "language")) if self.lora else None


@lru_cache
def pretrained(family: str) -> PretrainedModel:
    return PretrainedModel.of(CONFIG_MAPPING[family](**GENERIC[family]), "model")


@lru_cache
def samples_of(family: str) -> list[EncodedSample]:
    """Samples with several media of unlike sizes, with clips where a family reads them, and without any."""
    samples = samples_with_media(pretrained(family))
    return [*samples, _with_clips(family)] if family == "glm4v" else samples


def _with_clips(family: str) -> EncodedSample:
    """A clip of two patches of time with text between, and a shorter one of larger frames; patches of 4 by 4 pixels and
    two frames, which are merged by four. The family's own forward takes no images beside them."""
    noise = np.random.default_rng(0)
    ids: list[int] = []
    parts: dict[str, list[Any]] = {}
    patches = 0
    for time, rows, columns in ((2, 4, 2), (1, 6, 4)):
        for _ in range(time):
            ids += [*noise.integers(3, 90, 2).tolist(), *[GENERIC[family]["image_token_id"]] * (rows * columns // 4)]
        count = time * rows * columns
        patches += count
        pixels = noise.normal(size=(count, 96)).astype(np.float32)
        item = {"pixel_values_videos": pixels, "video_grid_thw": np.array([[time, rows, columns]])}
        for name, array in {**flatten(item), IS_CLIP: np.ones(1, np.int64)}.items():
            parts.setdefault(name, []).append(array)
    ids += [7, 8]
    labels = np.where(np.equal(ids, GENERIC[family]["image_token_id"]), -100, ids)
    labels[0] = -100
    media = {"vision": {name: np.concatenate(arrays) for name, arrays in parts.items()}}
    return EncodedSample("clips", np.array(ids), labels, media, {"vision": patches, "language": len(ids)}, 99)


def opened(case: GenericCase, device: str) -> MultimodalModel:
    """The units of a case, which attend over plans; what trains is chosen, too."""
    whole = replace(pretrained(case.family), lora=case.adapters)
    model = MultimodalModel({}, whole, seed=case.seed, device=device)
    use_row_attention(model)
    if case.frozen:
        model.freeze(case.frozen)
    choose_fp8(model.units, "fp8" if case.fp8 else "")
    for unit in model.units.values():
        unit.recompute(case.recompute)
    return model.train()


@st.composite
def generic_cases(
    draw: Any,
    families: Sequence[str],
    most_ranks: int,
    dtype: torch.dtype,
    lora: bool | None = None,
    alike: bool = False,
) -> GenericCase:
    """Draw any valid step of a model of one of `families`. lora: with adapters or without; None draws. alike: replicas
    of a unit have the same stages."""
    family = draw(st.sampled_from(families))
    with_lora = draw(st.booleans()) if lora is None else lora
    (encoder,) = pretrained(family).family.towers
    freezable = [encoder, f"{encoder}.encoder", f"{encoder}.projector", f"{encoder}.layers.0", "language.layers.*.mlp*"]
    case = GenericCase(
        family,
        tuple(draw(st.permutations(range(len(samples_of(family)))))[: draw(st.integers(2, 5))]),
        with_lora,
        False,
        dtype,
        () if with_lora else tuple(draw(st.lists(st.sampled_from(freezable), max_size=2, unique=True))),
        draw(st.sampled_from(["none", "block", "block_keep_attention", "block_offload"])),
        draw(st.integers(0, 10**6)),
    )
    model = opened(case, "meta")
    layers = {name: len(unit.layers) for name, unit in model.units.items()}
    degrees = [(1, 1), (1, 2), (1, 3)]
    if not degree_problems(model.language, tensor_plan(model.language), 2):
        degrees += [(2, 1), (2, 2)]
    feeds = dict(model.graph.feeds)
    plan = draw_plan(draw, layers, feeds, most_ranks, degrees, 1, alike, by_items=frozenset({encoder}))
    samples = [samples_of(family)[number] for number in case.numbers]
    assignment = draw_assignment(draw, plan, samples)
    schedule = draw_schedule(draw, plan, assignment, trainability_of(plan, trainable_layers(model.units)))
    return replace(case, plan=plan, assignment=assignment, schedule=schedule)


def step_in_transformers(case: GenericCase) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Return loss and gradients, and all weights, by their names in our units: the mean over the targets of all
    samples, each alone in the family's plain model (with adapters, in peft's), in the precision of the case."""
    config = pretrained(case.family).config
    torch.manual_seed(case.seed)
    plain: Any = auto_class(config).from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in plain.parameters():  # norms and biases begin as constants, which would hide mistakes
            weight += 0.05 * torch.randn_like(weight)
    ours = opened(case, "cpu")
    entries = [(unit, weight) for unit in ours.units.values() for weight in unit.weights]
    keys = {weight.name: ours.whole.key_of(unit, weight) for unit, weight in entries}
    state = plain.state_dict()
    with torch.no_grad():
        for unit, weight in entries:
            if (key := keys[weight.name]) in state:
                stage_tensors(unit)[weight.canonical].copy_(state[key])
    theirs = plain.train() if case.adapters is None else adapted_alike(plain, ours, case.adapters)
    values = {
        name: each.detach().clone() for unit in ours.units.values() for name, each in unit.named_logical_parameters()
    }
    theirs = theirs.to(case.dtype)
    if case.fp8:
        round_linears(theirs)
    for parameter in theirs.parameters():
        parameter.grad_dtype = torch.float32
    samples = [samples_of(case.family)[number] for number in case.numbers]
    targets = sum(sample.target_tokens for sample in samples)
    total = 0.0
    for sample in samples:
        logits = theirs(**inputs_of(case.family, sample, case.dtype)).logits[0, :-1]
        logits = logits.to(torch.promote_types(case.dtype, torch.float32))
        labels = torch.as_tensor(sample.labels)[1:]
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / targets
        loss.backward()
        total += loss.item()
    named = {
        name.removeprefix("base_model.model.").replace(".default", ""): each for name, each in theirs.named_parameters()
    }
    trained = {
        name
        for unit in ours.units.values()
        for name, parameter in unit.named_logical_parameters()
        if parameter.requires_grad
    }
    gradients = {name: named[keys[name]].grad for name in trained if named[keys[name]].grad is not None}
    return total, gradients, values


def inputs_of(family: str, sample: EncodedSample, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The keywords of the family's own forward: media joined as its processor joins them, padded where it pads."""
    ids = torch.as_tensor(sample.input_ids)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for arrays in sample.media.values():
        for name in [key for key in arrays if key + SHAPE in arrays]:
            shapes = [tuple(each[each >= 0].tolist()) for each in np.asarray(arrays[name + SHAPE])]
            flat = np.split(np.asarray(arrays[name]), np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1])
            items = [torch.as_tensor(each).reshape(shape) for each, shape in zip(flat, shapes, strict=True)]
            largest = [max(sizes) for sizes in zip(*(shape[1:] for shape in shapes), strict=True)]
            joined = torch.cat([_padded(item, largest) for item in items])
            given[name] = joined.to(dtype) if joined.is_floating_point() else joined
    if family == "glm4v":
        given["mm_token_type_ids"] = (ids == GENERIC[family]["image_token_id"]).long()
        if "video_grid_thw" in given:
            given["mm_token_type_ids"] *= 2
    return given


def _padded(item: Tensor, largest: Sequence[int]) -> Tensor:
    """Zeros behind an item, in all dimensions but the first."""
    missing = [most - size for size, most in zip(item.shape[1:], largest, strict=True)]
    return torch.nn.functional.pad(item, [each for most in reversed(missing) for each in (0, most)])
