"""One global batch on one plan as a plain value, and the model and the samples of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch

from cases.models.tiny_nets import NETS, SIZES
from dilatant import Encoder, Generator, MultimodalModel
from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.packing import RowLayout, media_mask
from dilatant.config.errors import UserError
from dilatant.data.sample import EncodedSample
from dilatant.models.core.dtype import choose_fp8
from dilatant.models.language.row_padding import pad_rows
from dilatant.models.language.token_loss import TargetPlaces, TokenLoss
from dilatant.models.row_attention import place_rows, use_row_attention
from dilatant.models.sources import parse_config
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.schedule import Assignment, Schedule

VOCABULARY = 30
HIDDEN = 16
TEXT = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 24, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 256, "attention_dropout": 0.0,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 6}
LANGUAGE = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "olmo2": {},
    "phi": {},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2,
                "output_router_logits": True, "router_aux_loss_coef": 0.1},
    "qwen3_5_text": {"head_dim": 8, **_LINEAR},
}  # fmt: skip
WINDOWS = {
    "mistral": {"sliding_window": 4},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
}
"""Settings with which layers of a family attend within windows; of qwen3 all but the first."""
HYBRIDS = ("qwen3_5_text", "qwen3_next")
"""Families with layers of linear attention, which parts samples of a row by plans alone."""
CHOOSES_EXPERTS = ("mixtral",)
"""In bfloat16 rounding decides between experts that are nearly as likely, which makes another model of a layout."""
MORE_LANGUAGES = {
    "qwen2": {},
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 8},
    "phi3": {},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "granite": {"attention_bias": True, "mlp_bias": True, "logits_scaling": 2.0},
    "cohere": {},
    "stablelm": {},
    "qwen3_next": {"head_dim": 8, **_LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                   "shared_expert_intermediate_size": 6, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [1],
                  "shared_expert_intermediate_size": 6, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [0],
                  "head_dim": 8, "norm_topk_prob": True},
}  # fmt: skip
"""Families that are not drawn."""
UNDIVIDED = ("olmo2", "stablelm")
"""Families that no two ranks can share."""
SMALL = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2}
ENCODERS = {
    "siglip_vision_model": {**SMALL, "image_size": 8, "patch_size": 4, "vision_use_head": False},
    "clip_vision_model": {**SMALL, "image_size": 8, "patch_size": 4},
    "dinov2": {"hidden_size": 12, "mlp_ratio": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4},
    "whisper": {"d_model": 12, "encoder_attention_heads": 2, "encoder_ffn_dim": 20, "num_mel_bins": 4,
                "max_source_positions": 3, "decoder_layers": 1, "decoder_ffn_dim": 8, "decoder_attention_heads": 2,
                "vocab_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                "decoder_start_token_id": 1, "dropout": 0.0},
}  # fmt: skip
DROPOUT = {"dinov2": ("hidden_dropout_prob",), "phi": ("resid_pdrop", "embd_pdrop")}
OWN = "own module"
DEPTH_KEY = {"whisper": "encoder_layers"}
ITEM = {"whisper": ("input_features", (4, 6), 3)}
"""Encoder type → input name, shape of one item, tokens of one item (without leading tokens)."""
NAMES = ("vision", "audio", "depth")
GENERATORS = ("height", "weight")
PLACES = 2
"""Tokens of the text that a generator takes for one item."""
NET_WIDTH = 12
"""Of the condition of every net that draws pictures."""
PIXELS = {"sd3": (1, 4, 4), "pixart": (3, 8, 8), "sana": (3, 8, 8), "unet": (3, 8, 8), "flux": (3, 8, 8)}
TARGETS = 3
"""Numbers that it is to say about an item."""


class OwnEncoder(torch.nn.Module):
    """An encoder that transformers does not know: the four quarters of a picture, normalised by the statistics of a
    batch as they are stored, and mapped."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.inner = torch.nn.Linear(3 * 16, 12)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        quarters = pixel_values.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5)
        return self.dropout(torch.tanh(self.inner(self.norm(quarters.reshape(len(pixel_values), 4, -1)))))


class Regression(torch.nn.Module):
    """A small unit behind the language model: numbers about an item from the rows at its places."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(dropout)
        self.inner = torch.nn.Linear(PLACES * width, 10)
        self.norm = torch.nn.LayerNorm(10)
        self.outer = torch.nn.Linear(10, TARGETS)

    def forward(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.inner(rows.flatten(1))))
        said = self.outer(self.dropout(hidden))
        return (said - numbers).square().mean(dim=1)


def frames(segments: RowLayout) -> AttentionMask:
    """A mask of one's own: items without text between them see each other, as frames of a clip do."""
    stretch = 1 + np.cumsum(np.diff(segments.modality, prepend=segments.modality[:1]) != 0)
    return media_mask(replace(segments, instance=np.where(segments.is_text, 0, stretch)), "bidirectional")


@dataclass(frozen=True)
class Case:
    """One drawn step; everything is plain, so it is sent to workers and printed when it fails."""

    language: str
    language_layers: int
    tied: bool
    encoders: tuple[tuple[str, str, int, str, str], ...]
    """(name, model type, layers, projector, features)"""
    frozen: tuple[str, ...]
    recompute: str
    attention: Any
    """How media attend on block tables (`media_attention`), or None for transformers' own attention."""
    texts: tuple[tuple[int, tuple[int, ...]], ...]
    """For each sample: text tokens, items of each encoder."""
    plan: Plan
    assignment: Assignment
    schedule: Schedule
    bucket_bytes: int
    look_ahead: int
    check: bool
    seed: int
    generators: tuple[tuple[str, int, str, float], ...] = ()
    """(name, width, connector, loss weight)"""
    drawn: tuple[tuple[int, ...], ...] = ()
    """For each sample: items of each generator; none where the model has none."""
    dropout: float = 0.0
    numbered: bool = False
    """Whether samples know their draws; otherwise step and place key what they drop."""
    dtype: torch.dtype = torch.float32
    """What weights and activations are held in."""
    loss_chunk: int | None = None
    rows_of_piece: int | None = None
    """Of what tensor-parallel ranks exchange."""
    placement: str = "auto"
    """How context-parallel ranks share a row."""
    row_multiple: int | None = None
    """Of whose tokens rows are padded to a multiple, where the model can."""
    nets: dict[str, tuple[str, str, bool]] = field(default_factory=dict)
    """Of generators that draw pictures: family of their net, objective, whether learned queries ask for them."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the language model, besides its family's."""
    loss: str = ""
    """One of `OWN_LOSSES`; the cross entropy if empty."""
    compiler: str = ""
    """Backend of `torch.compile` for the blocks; empty to run them as they are."""
    fp8: bool = False
    """Whether linear layers of blocks multiply in FP8."""
    fuses: bool = False
    """Whether `cases.attention.stand_in_kernels` replace norms and gated products."""


def focal(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The focal loss of each position, with gamma 2."""
    likely = logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return -((1 - likely.exp()) ** 2) * likely


def mean_of_samples(logits: torch.Tensor, targets: torch.Tensor, of_sample: torch.Tensor) -> torch.Tensor:
    """The sum over samples of the mean cross entropy of their targets."""
    return (torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none") / of_sample).sum()


def distilled(logits: torch.Tensor, targets: torch.Tensor, _: torch.Tensor, places: TargetPlaces) -> torch.Tensor:
    """The divergence of each position from a teacher that knows the sample's ids and the position."""
    teacher = torch.stack(
        [
            torch.sin(torch.arange(logits.shape[-1]) * float(places.samples[sample].input_ids[: index + 1].sum()))
            for sample, index in zip(places.sample_of.tolist(), places.index.tolist(), strict=True)
        ]
    )
    given = torch.stack(
        [
            torch.tensor(places.samples[sample].input_ids[index])
            for sample, index in zip(places.sample_of.tolist(), places.index.tolist(), strict=True)
        ]
    )
    assert given.equal(targets.cpu()), "the ids at the places are the targets"
    student = logits.float().log_softmax(-1)
    return torch.nn.functional.kl_div(student, teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def pulled(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The squared distance of each position's hidden state from a vector that its target determines."""
    wanted = torch.cos(targets[:, None] * torch.arange(hidden.shape[-1], device=hidden.device))
    return (hidden.float() - wanted).square().mean(-1)


def _one(sample: EncodedSample) -> float:
    return 1.0


def _tokens(sample: EncodedSample) -> float:
    return sample.target_tokens


OWN_LOSSES = {
    "focal": TokenLoss(focal, "focal", _tokens, is_per_token=True),
    "mean of samples": TokenLoss(mean_of_samples, "mean of samples", _one, arguments=3),
    "distilled": TokenLoss(distilled, "distilled", _tokens, arguments=4),
    "pulled": TokenLoss(pulled, "pulled", _tokens, is_per_token=True, is_of_hidden=True),
}


def build_model(case: Case, device: str = "cpu", plain: bool = False) -> MultimodalModel:
    """The model of a case; on "meta" nothing is materialised. plain: with transformers' own attention, and
    nothing recomputed."""
    language = parse_config(
        {
            "model_type": case.language,
            **TEXT,
            **(LANGUAGE | MORE_LANGUAGES)[case.language],
            **_kinds(case),
            **case.settings,
            "num_hidden_layers": case.language_layers,
            "tie_word_embeddings": case.tied,
            **dict.fromkeys(DROPOUT.get(case.language, ()), case.dropout),
        },
        "language",
    )
    encoders = {
        name: _own_encoder(projector, case.dropout)
        if kind == OWN
        else Encoder(
            parse_config(
                {
                    "model_type": kind,
                    **ENCODERS[kind],
                    DEPTH_KEY.get(kind, "num_hidden_layers"): layers,
                    **dict.fromkeys(DROPOUT.get(kind, ()), case.dropout),
                },
                name,
            ),
            projector=projector,
            features=features,
        )
        for name, kind, layers, projector, features in case.encoders
    }  # fmt: skip
    with torch.device("meta"):
        generators = {
            name: Generator(
                _net(case, name) if name in case.nets else Regression(width, case.dropout),
                None if asks(case, name) else token_id(case, name),
                width,
                connector,
                PLACES,
                loss_weight=weight,
            )
            for name, width, connector, weight in case.generators
        }
    model = MultimodalModel(
        encoders,
        language,
        seed=case.seed,
        device=device,
        media_attention=case.attention or "causal",
        generators=generators,
    )
    if case.attention is not None and not plain:
        use_row_attention(model)
        place_rows(model, case.placement)
        with suppress(UserError):
            pad_rows(model.language, case.row_multiple or 1)
    if case.frozen:
        model.freeze(case.frozen)
    model.language.loss_chunk = case.loss_chunk
    choose_fp8(model.units, "fp8" if case.fp8 and not plain else "")
    if case.loss:
        model.use_loss(OWN_LOSSES[case.loss])
    for unit in model.units.values():
        unit.recompute("none" if plain else case.recompute)
    model.train()
    return model


def _kinds(case: Case) -> dict[str, Any]:
    if case.language not in HYBRIDS:
        return {}
    kinds = ("linear_attention", "full_attention")
    return {"layer_types": [kinds[number % 2] for number in range(case.language_layers)]}


def _own_encoder(projector: str, dropout: float) -> Encoder:
    with torch.device("meta"):
        module = OwnEncoder(dropout)
        inner: str | torch.nn.Module = projector
        if projector == "mlp":
            inner = torch.nn.Sequential(torch.nn.Linear(12, HIDDEN), torch.nn.Dropout(dropout))
    return Encoder(module, inner, kind="image", row_shape=(3, 8, 8), width=12, tokens_per_row=4)


def _net(case: Case, generator: str) -> torch.nn.Module:
    from dilatant.models.generators.denoiser_source import read_source
    from dilatant.models.generators.denoisers import build_diffusion, inspect_denoiser

    family, objective, _ = case.nets[generator]
    settings, vae = NETS[family]
    size = SIZES.get(settings["_class_name"])
    seen = inspect_denoiser(read_source(family, None, settings, vae, None, size), family)
    return build_diffusion(seen, family, cast(Any, objective), 0.3, hollow=True)


def asks(case: Case, generator: str) -> bool:
    """Whether learned queries stand at its places."""
    return generator in case.nets and case.nets[generator][2]


def token_id(case: Case, generator: str) -> int:
    """The last ids of the vocabulary; text is drawn from those before. Those of queries lie beyond."""
    position = [name for name, *_ in case.generators].index(generator)
    if asks(case, generator):
        return VOCABULARY + len(case.encoders) + position
    return VOCABULARY - 1 - position


def build_samples(case: Case) -> list[EncodedSample]:
    """The global batch of a case, from its seed."""
    samples = []
    for index, ((text, items), drawn) in enumerate(zip(case.texts, case.drawn or [()] * len(case.texts))):
        random = np.random.default_rng((case.seed, index))
        ids = random.integers(3, VOCABULARY - len(GENERATORS), text).tolist()
        labels = [token if random.random() < 0.7 else -100 for token in ids]
        media: dict[str, dict[str, Any]] = {}
        sizes: dict[str, int] = {}
        for position, ((name, kind, _, _, features), count) in enumerate(zip(case.encoders, items)):
            if not count:
                continue
            input_name, shape, tokens = ITEM.get(kind, ("pixel_values", (3, 8, 8), 4))
            leading, merged = leading_tokens(kind), merged_tokens(kind, features)
            media[name] = {input_name: random.standard_normal((count, *shape)).astype(np.float32)}
            sizes[name] = count * (tokens + leading)
            for _ in range(count):
                place = int(random.integers(0, len(ids) + 1))
                ids[place:place] = [VOCABULARY + position] * merged
                labels[place:place] = [-100] * merged
        for (name, *_), count in zip(case.generators, drawn):
            if not count:
                continue
            media[name] = _targets(case, name, count, random)
            sizes[name] = count * PLACES
            for _ in range(count * PLACES):
                # Not into an item of an encoder: whole items are what media attention tells apart.
                place = int(random.choice([at for at in range(len(ids) + 1) if not _inside(ids, at)]))
                ids[place:place] = [token_id(case, name)]
                is_said = random.random() < 0.5 and token_id(case, name) < VOCABULARY
                labels[place:place] = [token_id(case, name) if is_said else -100]
        # Every sample has a target: a weight that only target-less samples pass has a zero gradient here, and none
        # where each sample is differentiated alone; AdamW decays one and not the other.
        last = max(place for place, token in enumerate(ids) if token < VOCABULARY)
        labels[last] = ids[last]
        labels[0] = -100
        sizes["language"] = len(ids)
        samples.append(
            EncodedSample(
                f"sample-{index}",
                np.array(ids),
                np.array(labels),
                media=media,
                sizes=sizes,
                draw=100 - index if case.numbered else 0,
            )
        )
    return samples


def _targets(case: Case, generator: str, count: int, random: np.random.Generator) -> dict[str, Any]:
    if generator not in case.nets:
        return {"numbers": random.standard_normal((count, TARGETS)).astype(np.float32)}
    pixels = PIXELS[case.nets[generator][0]]
    return {"pixel_values": random.uniform(-1, 1, (count, *pixels)).astype(np.float32)}


def _inside(ids: list[int], at: int) -> bool:
    """Whether a place is between two placeholders of one encoder."""
    return 0 < at < len(ids) and ids[at - 1] == ids[at] >= VOCABULARY


def merged_tokens(kind: str, features: str) -> int:
    _, _, tokens = ITEM.get(kind, ("pixel_values", (3, 8, 8), 4))
    return tokens + (leading_tokens(kind) if features == "all" else 0)


def leading_tokens(kind: str) -> int:
    return 1 if kind in ("clip_vision_model", "dinov2") else 0


PLAN = Plan(
    (
        UnitPlan("vision", (Replica((Stage(0, 3, (0,)), Stage(3, 5, (1,)))),), ("language",)),
        UnitPlan("language", (Replica((Stage(0, 4, (2,)),)),)),
    )
)
BATCHES = ((0, 1), (2, 3), (4, 5))
CASE = Case(
    language="llama",
    language_layers=2,
    tied=False,
    encoders=(("vision", "siglip_vision_model", 2, "linear", "all"),),
    frozen=("vision.encoder",),
    recompute="none",
    attention=None,
    texts=((6, (1,)),) * 6,
    plan=PLAN,
    assignment=Assignment({"vision": (BATCHES,), "language": (BATCHES,)}),
    schedule=Schedule({}),
    bucket_bytes=1 << 20,
    look_ahead=1,
    check=True,
    seed=5,
)
