"""Random models, data, plans, assignments and schedules, as hypothesis draws them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from dilatant.data.sample import EncodedSample
from dilatant.models import Encoder, Generator, MultimodalModel
from dilatant.models.row_attention import use_row_attention
from dilatant.models.sources import parse_config
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.holders import trainable_layers
from dilatant.schedule.families import eager, gpipe, interleaved, one_f_one_b
from dilatant.schedule.schedule import Action, ActionKind, Assignment, Schedule
from dilatant.schedule.trainability import trainability_of
from dilatant.schedule.zero_bubble import zero_bubble_h1, zero_bubble_h2

VOCABULARY = 30
HIDDEN = 16
TEXT = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 24, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 256, "attention_dropout": 0.0,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LANGUAGE = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "olmo2": {},
    "phi": {},
    "mixtral": {"sliding_window": None, "num_local_experts": 3, "num_experts_per_tok": 2,
                "output_router_logits": True, "router_aux_loss_coef": 0.1},
}  # fmt: skip
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
    "qwen3_5_text": {
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}
"""Families that are not drawn."""
UNDIVIDED = ("olmo2", "mixtral", "stablelm", "qwen3_5_text")
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
DROPOUT = {
    "siglip_vision_model": ("attention_dropout",),
    "clip_vision_model": ("attention_dropout",),
    "dinov2": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "whisper": ("dropout", "activation_dropout", "attention_dropout"),
    "phi": ("resid_pdrop", "embd_pdrop"),
}
OWN = "own module"
DEPTH_KEY = {"whisper": "encoder_layers"}
ITEM = {"whisper": ("input_features", (4, 6), 3)}
"""Encoder type → input name, shape of one item, tokens of one item (without leading tokens)."""
NAMES = ("vision", "audio", "depth")
GENERATORS = ("height", "weight")
PLACES = 2
"""Tokens of the text that a generator takes for one item."""
TARGETS = 3
"""Numbers that it is to say about an item."""


class OwnEncoder(torch.nn.Module):
    """An encoder that transformers does not know: the four quarters of a picture, mapped."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3 * 16, 12)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        quarters = pixel_values.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5)
        return self.dropout(torch.tanh(self.inner(quarters.reshape(len(pixel_values), 4, -1))))


class Regression(torch.nn.Module):
    """A small unit behind the language model: numbers about an item from the rows at its places."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner = torch.nn.Linear(PLACES * width, 10)
        self.norm = torch.nn.LayerNorm(10)
        self.outer = torch.nn.Linear(10, TARGETS)

    def forward(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.inner(rows.flatten(1))))
        said = self.outer(torch.nn.functional.dropout(hidden, self.dropout, self.training))
        return (said - numbers).square().mean(dim=1)


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
    attention: str | None
    """How media attend on block tables, or None for transformers' own attention."""
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
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the language model, besides its family's."""


def build_model(case: Case, device: str = "cpu", plain: bool = False) -> MultimodalModel:
    """The model of a case; on "meta" nothing is materialised. plain: with transformers' own attention, and
    nothing recomputed."""
    language = parse_config(
        {
            "model_type": case.language,
            **TEXT,
            **(LANGUAGE | MORE_LANGUAGES)[case.language],
            **case.settings,
            "num_hidden_layers": case.language_layers,
            "tie_word_embeddings": case.tied,
            **dict.fromkeys(DROPOUT.get(case.language, ()), case.dropout),
            "attention_dropout": case.dropout if case.attention is None else 0.0,
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
                    **dict.fromkeys(DROPOUT[kind], case.dropout),
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
                Regression(width, case.dropout),
                token_id(case, name),
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
    if case.frozen:
        model.freeze(case.frozen)
    model.language.loss_chunk = case.loss_chunk
    for unit in model.units.values():
        unit.recompute("none" if plain else case.recompute)
    model.train()
    return model


def _own_encoder(projector: str, dropout: float) -> Encoder:
    with torch.device("meta"):
        module = OwnEncoder(dropout)
        inner: str | torch.nn.Module = projector
        if projector == "mlp":
            inner = torch.nn.Sequential(torch.nn.Linear(12, HIDDEN), torch.nn.Dropout(dropout))
    return Encoder(module, inner, kind="image", row_shape=(3, 8, 8), width=12, tokens_per_row=4)


def token_id(case: Case, generator: str) -> int:
    """The last ids of the vocabulary; text is drawn from those before."""
    return VOCABULARY - 1 - [name for name, *_ in case.generators].index(generator)


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
            leading, merged = _leading_tokens(kind), _merged_tokens(kind, features)
            media[name] = {input_name: random.standard_normal((count, *shape)).astype(np.float32)}
            sizes[name] = count * (tokens + leading)
            for _ in range(count):
                place = int(random.integers(0, len(ids) + 1))
                ids[place:place] = [VOCABULARY + position] * merged
                labels[place:place] = [-100] * merged
        for (name, *_), count in zip(case.generators, drawn):
            if not count:
                continue
            media[name] = {"numbers": random.standard_normal((count, TARGETS)).astype(np.float32)}
            sizes[name] = count * PLACES
            for _ in range(count * PLACES):
                # Not into an item of an encoder: whole items are what media attention tells apart.
                place = int(random.choice([at for at in range(len(ids) + 1) if not _inside(ids, at)]))
                ids[place:place] = [token_id(case, name)]
                labels[place:place] = [token_id(case, name) if random.random() < 0.5 else -100]
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


@st.composite
def cases(draw: Any, most_ranks: int = 8, dtype: torch.dtype = torch.float32) -> Case:
    """Any valid step of up to `most_ranks` ranks."""
    encoders = tuple(
        (
            NAMES[index],
            kind := draw(st.sampled_from([*sorted(ENCODERS), OWN])),
            draw(st.integers(1, 3)),
            draw(st.sampled_from(["linear", "mlp"])),
            "all" if kind == OWN else draw(st.sampled_from(["all", "patch"])),
        )
        for index in range(draw(st.sampled_from([1, 2, 3, 0])))
    )
    language_layers = draw(st.integers(1, 4))
    families = sorted(set(LANGUAGE) - set(CHOOSES_EXPERTS if dtype == torch.bfloat16 else ()))
    generators = tuple(
        (
            GENERATORS[index],
            width := draw(st.sampled_from([6, HIDDEN])),
            draw(st.sampled_from(["linear", "mlp", "identity"] if width == HIDDEN else ["linear", "mlp"])),
            draw(st.sampled_from([1.0, 0.25, 3.0])),
        )
        for index in range(draw(st.sampled_from([0, 1, 1, 2])))
    )
    texts = tuple(
        (draw(st.integers(2, 20)), tuple(draw(st.sampled_from([0, 0, 1, 1, 2, 3])) for _ in encoders))
        for _ in range(draw(st.integers(2, 8)))
    )
    case = Case(
        language=draw(st.sampled_from(families)),
        language_layers=language_layers,
        tied=draw(st.booleans()),
        encoders=encoders,
        generators=generators,
        frozen=_draw_frozen(draw, encoders, generators),
        recompute=draw(st.sampled_from(["none", "block", "block_keep_attention"])),
        loss_chunk=draw(st.sampled_from([None, 1, 3, 1024])),
        rows_of_piece=draw(st.sampled_from([None, 1, 2, 5])),
        attention=draw(st.sampled_from([None, "causal", "bidirectional", "embedded"])),
        texts=texts,
        drawn=tuple(tuple(draw(st.sampled_from([0, 1, 1, 2])) for _ in generators) for _ in texts),
        plan=Plan(()),
        assignment=Assignment({}),
        schedule=Schedule({}),
        bucket_bytes=draw(st.sampled_from([1, 3000, 1 << 20])),
        look_ahead=draw(st.integers(1, 3)),
        check=draw(st.booleans()),
        seed=draw(st.integers(0, 10**6)),
        dropout=draw(st.sampled_from([0.0, 0.3])),
        numbered=draw(st.booleans()),
        dtype=dtype,
    )
    # Layers of a unit as the model names them; counted on a model without memory.
    model = build_model(case, "meta")
    layers = {name: len(unit.layers) for name, unit in model.units.items()}
    degrees = [(1, 1)]
    if case.language not in UNDIVIDED and not case.dropout:
        degrees.append((2, 1))
    if case.attention is not None:
        degrees += [(1, 2), (1, 3), *((tp, 2) for tp, _ in degrees[1:])]
    plan = _draw_plan(draw, layers, dict(model.graph.feeds), most_ranks, degrees)
    assignment = _draw_assignment(draw, plan, build_samples(case))
    trainability = trainability_of(plan, trainable_layers(model.units))
    families = [gpipe, one_f_one_b, eager, zero_bubble_h1, zero_bubble_h2]
    if all(_repeats(replica) for unit in plan.units for replica in unit.replicas):
        families.append(interleaved)
    family = draw(st.sampled_from(families))
    schedule = family(plan, assignment, trainability)
    if draw(st.integers(0, 2)) == 0:
        schedule = _draw_split(draw, plan, schedule)
    return replace(
        case,
        plan=plan,
        assignment=assignment,
        schedule=Schedule({rank: tuple(actions) for rank, actions in schedule.actions.items()}),
    )


def _inside(ids: list[int], at: int) -> bool:
    """Whether a place is between two placeholders of one encoder."""
    return 0 < at < len(ids) and ids[at - 1] == ids[at] >= VOCABULARY


def _draw_frozen(draw: Any, encoders: tuple, generators: tuple) -> tuple[str, ...]:
    patterns = ["language", "language.layers.0", "language.layers.*.mlp*", "language.*norm*"]
    for name, kind, *_ in encoders:
        patterns += [name, f"{name}.encoder", f"{name}.encoder", f"{name}.projector"]
        patterns += [] if kind == OWN else [f"{name}.layers.0"]
    for name, _, connector, _ in generators:
        patterns += [name, f"{name}.generator", f"{name}.generator.inner"]
        patterns += [f"{name}.connector"] if connector != "identity" else []
    chosen = draw(st.lists(st.sampled_from(patterns), max_size=4, unique=True))
    wholes = {"language", *(name for name, *_ in (*encoders, *generators))}
    if wholes <= set(chosen):
        chosen.remove("language")
    return tuple(chosen)


def _draw_plan(
    draw: Any,
    layers: dict[str, int],
    feeds: dict[str, tuple[str, ...]],
    most_ranks: int,
    degrees: list[tuple[int, int]],
) -> Plan:
    """Replicas of every unit with cuts of their own; encoders on ranks of their own or on taken ones.

    Stages are on groups of tp x cp ranks; all that is drawn here is drawn of groups.
    """
    budget = draw(st.sampled_from([2, 4, most_ranks, 1, 3, 5, 6, most_ranks]))
    groups: list[tuple[int, int]] = []
    while (left := budget - sum(tp * cp for tp, cp in groups)) > 0:
        groups.append(draw(st.sampled_from([(tp, cp) for tp, cp in degrees if tp * cp <= left])))
    budget = len(groups)
    taken: list[int] = []
    units: dict[str, UnitPlan] = {}
    # The language model chooses first, so that others can be put on its ranks.
    for name in sorted(layers, key=lambda name: name != "language"):
        replicas = []
        shares = draw(st.booleans()) if taken and name != "language" else False
        used_by_unit: set[int] = set()
        for number in range(draw(st.integers(1, 3))):
            pool = [r for r in (taken if shares else range(budget)) if r not in used_by_unit]
            if not shares:
                pool = [rank for rank in pool if rank not in taken]
            if not pool:
                if number:
                    break
                pool = [r for r in taken if r not in used_by_unit]
            count = draw(st.integers(1, min(4, layers[name], len(pool))))
            ranks = draw(st.permutations(pool))[:count]
            if 2 * count <= layers[name] and draw(st.integers(0, 4)) == 0:
                ranks, count = [*ranks, *ranks], 2 * count  # interleaved: two stages a rank
            cuts = sorted(
                draw(
                    st.lists(
                        st.integers(1, layers[name] - 1), min_size=count - 1, max_size=count - 1, unique=True
                    )
                )
            )
            bounds = [0, *cuts, layers[name]]
            replicas.append(
                Replica(tuple(Stage(a, b, (rank,)) for a, b, rank in zip(bounds, bounds[1:], ranks)))
            )
            used_by_unit.update(ranks)
        taken += [rank for rank in sorted(used_by_unit) if rank not in taken]
        units[name] = UnitPlan(name, tuple(replicas), feeds[name])
    # Groups that nobody took are closed up: a plan uses ranks 0 to n - 1.
    ranks_of: dict[int, tuple[int, ...]] = {}
    for group in sorted(taken):
        first = sum(map(len, ranks_of.values()))
        tp, cp = groups[group]
        ranks_of[group] = tuple(range(first, first + tp * cp))
    return Plan(
        tuple(
            UnitPlan(
                name,
                tuple(
                    Replica(
                        tuple(
                            replace(stage, ranks=ranks_of[group], tp=groups[group][0], cp=groups[group][1])
                            for stage in replica.stages
                            for (group,) in [stage.ranks]
                        )
                    )
                    for replica in units[name].replicas
                ),
                units[name].feeds,
            )
            for name in layers
        )
    )


def _draw_assignment(draw: Any, plan: Plan, samples: list[EncodedSample]) -> Assignment:
    """Every unit draws its own borders; samples without rows are mostly, not always, absent from an encoder."""
    microbatches = {}
    for unit in plan.units:
        having = [
            index
            for index, sample in enumerate(samples)
            if sample.sizes.get(unit.name) or draw(st.integers(0, 9)) == 0
        ]
        order = draw(st.permutations(having)) if draw(st.booleans()) else having
        replicas: list[list[list[int]]] = [[] for _ in unit.replicas]
        for sample in order:
            replica = replicas[draw(st.integers(0, len(replicas) - 1))]
            if not replica or draw(st.booleans()):
                replica.append([])
            replica[-1].append(sample)
        microbatches[unit.name] = tuple(tuple(tuple(batch) for batch in replica) for replica in replicas)
    return Assignment(microbatches)


def _repeats(replica: Replica) -> bool:
    """Whether the ranks of a replica come round with one period."""
    ranks = [stage.ranks for stage in replica.stages]
    return ranks == (ranks[: len(set(ranks))] * len(ranks))[: len(ranks)]


def _draw_split(draw: Any, plan: Plan, schedule: Schedule) -> Schedule:
    """Some more backwards in two halves, the second one anywhere later on the same rank."""
    ranks: dict[int, tuple[Action, ...]] = {}
    lead = {rank: placed.stage.ranks[0] for placed in plan.stages() for rank in placed.stage.ranks}
    for rank, actions in sorted(schedule.actions.items()):
        if lead[rank] != rank:
            ranks[rank] = ranks[lead[rank]]
            continue
        halves: list[Action] = []
        owed: list[Action] = []
        for action in actions:
            if action.kind == ActionKind.B and draw(st.booleans()):
                halves.append(replace(action, kind=ActionKind.I))
                owed.append(replace(action, kind=ActionKind.W))
            else:
                halves.append(action)
            while owed and draw(st.booleans()):
                halves.append(owed.pop(draw(st.integers(0, len(owed) - 1))))
        ranks[rank] = tuple(halves + owed)
    return Schedule(ranks)


def expected(
    case: Case,
) -> tuple[list[tuple[float, dict[str, float]]], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses of three steps (all weighted, then each unit's), gradients of the first, and parameters after them, of
    one process (the oracle)."""
    from oracles.keyed_dropout import OneSampleDropout
    from oracles.one_process import losses_of_batch

    model = build_model(case, plain=True)
    samples = build_samples(case)
    units = model.units
    encoders = {
        name: (units[name].model, units[name].projector, units[name].skip_tokens)
        for name, *_ in case.encoders
    }
    generators = {
        name: (units[name].connector, units[name].model, token_id(case, name), PLACES)
        for name, *_ in case.generators
    }
    router = (LANGUAGE | MORE_LANGUAGES)[case.language].get("router_aux_loss_coef", 0.0)
    weights = {
        "language": 1.0,
        "language.router": router,
        **{name: weight for name, _, _, weight in case.generators},
    }
    parameters = {name: p for unit in units.values() for name, p in unit.named_logical_parameters()}
    for parameter in parameters.values():
        parameter.data = parameter.data.to(case.dtype)
        parameter.grad_dtype = torch.float32
    masters = {
        name: torch.nn.Parameter(p.detach().float(), requires_grad=p.requires_grad)
        for name, p in parameters.items()
    }
    optimizer = build_optimizer(masters)
    losses, gradients = [], {}
    dropout = OneSampleDropout(case.seed, _layers(units)) if case.dropout else None
    for step in range(3):

        def begin(number: int, step: int = step) -> None:
            if dropout is not None:
                dropout.begin(f"draw {100 - number}" if case.numbered else f"step {step} place {number}")

        seen_in = None if case.attention in (None, "causal") else partial(_seen_in, case)
        with dropout or nullcontext():
            parts = losses_of_batch(
                units["language"].model, encoders, model.placeholder_ids, samples, seen_in, generators, begin
            )
        loss = sum((weights[name] * part for name, part in parts.items()), start=torch.zeros(()))
        if loss.requires_grad:
            loss.backward()
        losses.append((loss.item(), {name: part.item() for name, part in parts.items()}))
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        for name, parameter in parameters.items():
            masters[name].grad, parameter.grad = parameter.grad, None
        optimizer.step()
        for name, parameter in parameters.items():
            parameter.data.copy_(masters[name])
    return losses, gradients, {name: p.detach().clone() for name, p in masters.items()}


def _layers(units: Any) -> Iterator[tuple[str, torch.nn.Module, bool, bool]]:
    """Layers as `OneSampleDropout` takes them."""
    for unit in units.values():
        trains = {name for name, p in unit.named_logical_parameters() if p.requires_grad}
        trains = {weight.layer for weight in unit.weights if weight.canonical in trains}
        whole = [(unit.layers[0], "model")] if unit.structure is not None else []
        for layer, path in (*whole, *unit.pieces()):
            yield layer, unit.get_submodule(path), layer in trains, unit.unit == "language"


def _seen_in(case: Case, sample: EncodedSample) -> np.ndarray:
    """Which token of a sample sees which under the case's media attention. Items may lie inside one another: each takes
    the next so many placeholders of its unit."""
    from oracles.dense_mask import Token, bidirectional_instances, embedded, matrix

    tokens = []
    for place, token in enumerate(sample.input_ids.tolist()):
        if token < VOCABULARY:
            tokens.append(Token(0, "text", None, place, place))
        else:
            name, kind, _, _, features = case.encoders[token - VOCABULARY]
            before = sum(earlier.modality == name for earlier in tokens)
            tokens.append(Token(0, name, before // _merged_tokens(kind, features), place, place))
    rule = bidirectional_instances(True) if case.attention == "bidirectional" else embedded(False)
    return matrix(tokens, rule)


def _merged_tokens(kind: str, features: str) -> int:
    _, _, tokens = ITEM.get(kind, ("pixel_values", (3, 8, 8), 4))
    return tokens + (_leading_tokens(kind) if features == "all" else 0)


def _leading_tokens(kind: str) -> int:
    return 1 if kind in ("clip_vision_model", "dinov2") else 0


def build_optimizer(parameters: dict[str, Any]) -> torch.optim.Optimizer:
    """AdamW whose eps is large beside rounding noise: an exactly cancelling gradient must not decide a sign.

    lr / eps is how much a gradient's error moves a parameter at most: a tenth, so that what is allowed of gradients
    stays within what is allowed of parameters.
    """
    trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
    return torch.optim.AdamW(trainable or [torch.nn.Parameter(torch.zeros(1))], lr=1e-2, eps=1e-1)


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
