"""Random models, data, plans, assignments and schedules, as hypothesis draws them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from msgspec import structs

from cases.engine_case import (
    CHOOSES_EXPERTS,
    ENCODERS,
    GENERATORS,
    HIDDEN,
    HYBRIDS,
    LANGUAGE,
    NAMES,
    NET_WIDTH,
    OWN,
    OWN_LOSSES,
    UNDIVIDED,
    WINDOWS,
    Case,
    build_model,
    build_samples,
)
from dilatant.data.sample import EncodedSample
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.state.holders import trainable_layers
from dilatant.schedule.assignment.step_assignment import Microbatching, assign
from dilatant.schedule.families.families import eager, gpipe, interleaved, one_f_one_b, zero_bubble_h1, zero_bubble_h2
from dilatant.schedule.schedule import Action, ActionKind, Assignment, Schedule
from dilatant.schedule.trainability import trainability_of


@st.composite
def cases(
    draw: Any, most_ranks: int = 8, dtype: torch.dtype = torch.float32, nets: tuple[str, ...] = (), alike: bool = False
) -> Case:
    """Draw any valid step of up to `most_ranks` ranks. nets: families of its generators, of which there is then at
    least one; without `nets`, generators are simple modules. alike: replicas of a unit have the same stages."""
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
    language = draw(st.sampled_from(families))
    kinds = [draw(st.sampled_from(["linear_attention", "full_attention"])) for _ in range(language_layers)]
    attention = draw(st.sampled_from([None, "causal", "bidirectional", "embedded"]))
    attention = "causal" if language in HYBRIDS else attention
    # The oracle's masks among media have no windows.
    windows = WINDOWS.get(language, {}) if attention in (None, "causal") and draw(st.booleans()) else {}
    generators = tuple(
        (
            GENERATORS[index],
            width := NET_WIDTH if nets else draw(st.sampled_from([6, HIDDEN])),
            draw(st.sampled_from(["linear", "mlp", "transformer", *(["identity"] if width == HIDDEN else [])])),
            draw(st.sampled_from([1.0, 0.25, 3.0])),
        )
        for index in range(draw(st.sampled_from([1, 2] if nets else [0, 1, 1, 2])))
    )
    drawing = {
        name: (draw(st.sampled_from(nets)), draw(st.sampled_from(["flow", "epsilon", "velocity"])), draw(st.booleans()))
        for name, *_ in (generators if nets else ())
    }
    texts = tuple(
        (draw(st.integers(2, 20)), tuple(draw(st.sampled_from([0, 0, 1, 1, 2, 3])) for _ in encoders))
        for _ in range(draw(st.integers(2, 8)))
    )
    case = Case(
        language=language,
        settings={"layer_types": kinds} if language in HYBRIDS else windows,
        language_layers=language_layers,
        tied=draw(st.booleans()),
        encoders=encoders,
        generators=generators,
        nets=drawing,
        frozen=_draw_frozen(draw, encoders, generators, drawing),
        recompute=draw(st.sampled_from(["none", "block", "block_keep_attention", "block_offload"])),
        loss_chunk=draw(st.sampled_from([None, 1, 3, 1024])),
        placement="auto" if language in HYBRIDS else draw(st.sampled_from(["auto", "lpt", "zigzag", "contiguous"])),
        rows_of_piece=draw(st.sampled_from([None, 1, 2, 5])),
        row_multiple=draw(st.sampled_from([None, 4, 16])),
        attention=attention,
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
        # In bf16 the tolerances are those of the cross entropy.
        loss=draw(st.sampled_from(["", "", *OWN_LOSSES])) if dtype == torch.float32 else "",
    )
    # Layers of a unit as the model names them; counted on a model without memory.
    model = build_model(case, "meta")
    layers = {name: len(unit.layers) for name, unit in model.units.items()}
    degrees = [(1, 1)]
    if case.language not in UNDIVIDED:
        degrees.append((2, 1))
    if case.attention is not None:
        degrees += [(1, 2), (1, 3), *((tp, 2) for tp, _ in degrees[1:])]
    experts = LANGUAGE[case.language].get("num_local_experts", 1)
    plan = draw_plan(draw, layers, dict(model.graph.feeds), most_ranks, degrees, experts, alike)
    assignment = draw_assignment(draw, plan, build_samples(case))
    trainability = trainability_of(plan, trainable_layers(model.units))
    schedule = draw_schedule(draw, plan, assignment, trainability)
    return replace(case, plan=plan, assignment=assignment, schedule=schedule)


def draw_schedule(draw: Any, plan: Plan, assignment: Assignment, trainability: Any) -> Schedule:
    """Draw a family of schedules that the plan allows and, sometimes, further split backwards."""
    families = [gpipe, one_f_one_b, eager, zero_bubble_h1, zero_bubble_h2]
    if all(_repeats(replica) for unit in plan.units for replica in unit.replicas):
        families.append(interleaved)
    schedule = draw(st.sampled_from(families))(plan, assignment, trainability)
    if draw(st.integers(0, 2)) == 0:
        schedule = _draw_split(draw, plan, schedule)
    return Schedule({rank: tuple(actions) for rank, actions in schedule.actions.items()})


def _draw_frozen(
    draw: Any, encoders: tuple, generators: tuple, nets: dict[str, tuple[str, str, bool]]
) -> tuple[str, ...]:
    patterns = ["language", "language.layers.0", "language.layers.*.mlp*", "language.*norm*"]
    for name, kind, *_ in encoders:
        patterns += [name, f"{name}.encoder", f"{name}.encoder", f"{name}.projector"]
        patterns += [] if kind == OWN else [f"{name}.layers.0"]
    for name, _, connector, _ in generators:
        parts = [f"{name}.generator.inner"]
        if name in nets:
            is_cut = nets[name][0] not in ("unet", "flux")
            parts = [f"{name}.embedding", f"{name}.layers.0"] if is_cut else [f"{name}.generator.net"]
        patterns += [name, f"{name}.generator", *parts]
        patterns += [f"{name}.connector"] if connector != "identity" else []
    if any(asks for *_, asks in nets.values()):
        patterns += ["language.model", "language.queries"]
    chosen = draw(st.lists(st.sampled_from(patterns), max_size=4, unique=True))
    wholes = {"language", *(name for name, *_ in (*encoders, *generators))}
    if wholes <= set(chosen):
        chosen.remove("language")
    return tuple(chosen)


def draw_plan(
    draw: Any,
    layers: dict[str, int],
    feeds: dict[str, tuple[str, ...]],
    most_ranks: int,
    degrees: list[tuple[int, int]],
    experts: int,
    alike: bool,
    by_items: frozenset[str] = frozenset(),
) -> Plan:
    """Draw replicas of every unit, each with its own cuts; encoders are on separate ranks or on those of other units.

    Stages are on groups of tp x cp ranks; this function draws groups, not ranks. by_items: units whose ranks share
    nothing but items; further ones are drawn.
    """
    budget = min(most_ranks, draw(st.sampled_from([2, 4, most_ranks, 1, 3, 5, 6, most_ranks])))
    groups: list[tuple[int, int]] = []
    while (left := budget - sum(tp * cp for tp, cp in groups)) > 0:
        fitting = [(tp, cp) for tp, cp in degrees if tp * cp <= left]
        if alike and groups:
            fitting = [each for each in fitting if each == groups[0]]
        if not fitting:
            break
        groups.append(draw(st.sampled_from(fitting)))
    budget = len(groups)
    taken: list[int] = []
    units: dict[str, UnitPlan] = {}
    # The language model chooses first, so that others can be put on its ranks.
    for name in sorted(layers, key=lambda name: name != "language"):
        replicas: list[Replica] = []
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
            first = replicas[0].stages if alike and replicas else ()
            if len({stage.ranks for stage in first}) > len(pool):
                break
            count = len(first) or draw(st.integers(1, min(4, layers[name], len(pool))))
            if len(first) > len({stage.ranks for stage in first}):  # interleaved
                count //= 2
            ranks = draw(st.permutations(pool))[:count]
            goes_round = len(first) > count
            if not first and 2 * count <= layers[name]:
                goes_round = draw(st.integers(0, 4)) == 0
            if goes_round:
                ranks, count = [*ranks, *ranks], 2 * count  # interleaved: two stages a rank
            cuts = sorted(
                draw(st.lists(st.integers(1, layers[name] - 1), min_size=count - 1, max_size=count - 1, unique=True))
            )
            bounds = [0, *([stage.first for stage in first[1:]] if first else cuts), layers[name]]
            replicas.append(Replica(tuple(Stage(a, b, (rank,)) for a, b, rank in zip(bounds, bounds[1:], ranks))))
            used_by_unit.update(ranks)
        taken += [rank for rank in sorted(used_by_unit) if rank not in taken]
        units[name] = UnitPlan(name, tuple(replicas), feeds[name])
    # Groups that nobody took are closed up: a plan uses ranks 0 to n - 1.
    ranks_of: dict[int, tuple[int, ...]] = {}
    for group in sorted(taken):
        first = sum(map(len, ranks_of.values()))
        tp, cp = groups[group]
        ranks_of[group] = tuple(range(first, first + tp * cp))

    by_items |= {name for name in layers if name != "language" and draw(st.booleans())}

    joined = [experts > 1 and draw(st.booleans()) for _ in groups]

    def on_ranks(name: str, stage: Stage) -> Stage:
        (group,) = stage.ranks
        tp, cp = groups[group]
        dividing = [ep for ep in range(tp, tp * cp + 1, tp) if tp * cp % ep == 0 and experts % ep == 0]
        ep = 1
        if name == "language" and experts > 1:
            ep = [1, *dividing][-1] if alike else draw(st.sampled_from([1, *dividing]))
            if tp * cp in dividing and joined[0 if alike else group]:
                cp, ep = 1, tp * cp  # groups of tp ranks run whole samples
        if name in by_items:  # whole items for each rank, whatever else they share
            tp, cp = 1, tp * cp
        return replace(stage, ranks=ranks_of[group], tp=tp, cp=cp, ep=ep)

    return Plan(
        tuple(
            UnitPlan(
                name,
                tuple(
                    Replica(tuple(on_ranks(name, stage) for stage in replica.stages))
                    for replica in units[name].replicas
                ),
                units[name].feeds,
            )
            for name in layers
        )
    )


def draw_assignment(draw: Any, plan: Plan, samples: list[EncodedSample]) -> Assignment:
    """Draw borders of microbatches for every unit; an encoder mostly, not always, omits samples without rows. Sometimes
    microbatches are cut by tokens, as in plans with a token limit."""
    if draw(st.integers(0, 3)) == 0:
        tokens = {unit.name: [sample.sizes.get(unit.name, 0) for sample in samples] for unit in plan.units}
        how = Microbatching(row_tokens=draw(st.integers(3, 60)))
        return assign(plan, tokens, how, anchor="language", tokens=tokens["language"])
    microbatches = {}
    for unit in plan.units:
        having = [
            index for index, sample in enumerate(samples) if sample.sizes.get(unit.name) or draw(st.integers(0, 9)) == 0
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
    """Return True if the ranks of a replica's stages repeat with one period."""
    ranks = [stage.ranks for stage in replica.stages]
    return ranks == (ranks[: len(set(ranks))] * len(ranks))[: len(ranks)]


def _draw_split(draw: Any, plan: Plan, schedule: Schedule) -> Schedule:
    """Split some more backwards into two halves, the second anywhere later on the same rank."""
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
                halves.append(structs.replace(action, kind=ActionKind.I))
                owed.append(structs.replace(action, kind=ActionKind.W))
            else:
                halves.append(action)
            while owed and draw(st.booleans()):
                halves.append(owed.pop(draw(st.integers(0, len(owed) - 1))))
        ranks[rank] = tuple(halves + owed)
    return Schedule(ranks)
