"""Explain why a search did not choose a layout that the user names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from dilatant.config.degrees import AXES, Degrees
from dilatant.config.errors import UserError, list_problems
from dilatant.config.files.yaml_text import read_yaml
from dilatant.cost.memory import ZEROS, Zero
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.score import PlanScorer
from dilatant.plan.layouts.option import Option, PlanCandidate
from dilatant.plan.layouts.space import Space
from dilatant.plan.limits import MATCHES_EXPLAINED, MATCHES_PLANNED, SMALL_CLUSTER
from dilatant.plan.search.enumeration import all_candidates
from dilatant.plan.search.finals import Finals, RankedPlan, in_turns
from dilatant.plan.search.search_result import SearchResult

KEYS = ("replicas", *Degrees._fields, "pp", "chunks")
"""Keys that a user may set for a unit; as in `ParallelSpec`."""
GROUP = "group"
"""Key for the name of the device group that the unit runs on."""
TOKENS = "microbatch_tokens"
"""Key for the whole plan; as in the config's `plan`."""
CUTS = "cuts"
"""Key for the first layers of the unit's stages, as in the config's `parallel.units`."""
ZERO = "zero"
"""Key for the sharding of optimizer state; as in the config's `train`."""


@dataclass(frozen=True, slots=True)
class AskedLayout:
    """A partial layout; unspecified values may be anything.
    units: name → key of `KEYS` → whole number, or `GROUP` → name; microbatch_tokens: token budget of microbatches;
    zero: sharding of optimizer state, by default that of the chosen plan; cuts: name → first layers of its stages."""

    units: Mapping[str, Mapping[str, Any]]
    microbatch_tokens: int | None = None
    zero: Zero | None = None
    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class WhyNot:
    """The explanation: `impossible` lists why no plan matches; else `plans` are the fastest matching plans that fit
    memory.
    If no matching plan fits, `overflow` names the rank and the missing bytes. is_chosen: the winner matches.
    was_simulated: the search had simulated the first of `plans`. candidates: number of matching candidates in the
    search; bound: lower bound of their seconds."""

    impossible: tuple[str, ...] = ()
    overflow: str = ""
    plans: tuple[RankedPlan, ...] = ()
    is_chosen: bool = False
    was_simulated: bool = False
    candidates: int = 0
    bound: float = 0.0


def parse_asked_layout(text: str, units: Sequence[str] = ()) -> AskedLayout:
    """Parse a layout such as `vision: {pp: 2}, language: {tp: 4}, microbatch_tokens: 8192`. units: names of the model's
    units; none if they are not known yet. Raises UserError that lists every problem."""
    try:
        found = read_yaml(text if text.lstrip().startswith("{") else f"{{{text}}}")
    except yaml.YAMLError:
        found = None
    whole = {key: found.pop(key, None) for key in (TOKENS, ZERO) if isinstance(found, dict) and key not in units}
    tokens, zero = whole.get(TOKENS), whole.get(ZERO)
    if (
        not isinstance(found, dict)
        or not (found or tokens is not None or zero is not None)
        or not all(isinstance(own, dict) for own in found.values())
    ):
        raise UserError(f"{text!r} is no layout; write one like 'vision: {{pp: 2}}, language: {{tp: 4}}'")
    foreign = [unit for unit in found if unit not in units] if units else []
    problems = [f"{unit!r} is no unit of this model; it has {', '.join(units)}" for unit in foreign]
    cuts = {unit: wanted.pop(CUTS) for unit, wanted in found.items() if CUTS in wanted}
    problems += [
        f"{unit}: cuts is {own!r}; it must be the first layers of its stages, as in [0, 5, 9]"
        for unit, own in cuts.items()
        if not isinstance(own, list) or own[:1] != [0] or own != sorted({one for one in own if type(one) is int})
    ]
    for unit, wanted in found.items():
        for key, value in wanted.items():
            if key == GROUP:
                if not isinstance(value, str):
                    problems.append(f"{unit}: group is {value!r}; it must be the name of one in cluster.groups")
            elif key not in KEYS:
                problems.append(f"{unit}: {key!r} cannot be asked for; {', '.join(KEYS)}, {CUTS} and {GROUP} can")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"{unit}: {key} is {value!r}; it must be a whole number from 1 on")
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        problems.append(f"{TOKENS} is {tokens!r}; it must be a whole number from 1 on")
    if zero not in (None, *ZEROS):
        problems.append(f"{ZERO} is {zero!r}; there are {', '.join(ZEROS)}")
    if problems:
        raise list_problems(f"{text!r} is no layout of this model:", problems)
    return AskedLayout(found, tokens, zero, {unit: tuple(own) for unit, own in cuts.items()})


def why_not(
    spaces: Sequence[Space], cluster: Cluster, asked: AskedLayout, result: SearchResult | None, scorer: PlanScorer
) -> WhyNot:
    """Explain how layouts like `asked` fared in the search that had this `result` (None: no search was made).
    `spaces`, one per group of devices, and `scorer` are those of that search. Besides the matching plans that it has
    simulated, a few others are simulated here: those with the best estimates and, in turns, those of each number of
    pipelines and microbatches, since estimates of unlike ones are not comparable where launches or waits dominate."""
    space = replace(spaces[0], cluster=cluster)
    problems = _problems(space, asked)
    if problems:
        return WhyNot(impossible=tuple(problems))
    cut = [_varied(one, None, asked.cuts) for one in spaces] if asked.cuts else spaces
    found = _like(cut, cluster, asked)  # none if memory is too small
    matching = found or _like([_varied(one, math.inf, asked.cuts) for one in spaces], cluster, asked)
    known = {_key(one): one for one in ((result.winner, *result.runners_up) if result else ())}
    plans = {key: one for key, one in known.items() if _is_like(one, asked, cluster)}
    if not matching and not plans:
        return WhyNot(impossible=(_nowhere(space, asked),))
    fastest = min((one.score.seconds for one in plans.values()), default=math.inf)
    finals, most = Finals(space, scorer), MATCHES_EXPLAINED if result else MATCHES_PLANNED
    for one in dict.fromkeys([*matching[:most], *in_turns(matching)[:most]]):
        if one.bound < min(fastest, finals.best):
            finals.simulate(one)
    finals.relax(MATCHES_EXPLAINED)
    plans = {_key(one): one for one in finals.ranked} | plans
    ranked = tuple(sorted(plans.values(), key=lambda one: one.score.seconds))
    return WhyNot(
        overflow="" if ranked else min(finals.rejected, default=(0.0, "its tensor groups do not fit into nodes"))[1],
        plans=ranked,
        is_chosen=result is not None and _is_like(result.winner, asked, cluster),
        was_simulated=bool(ranked) and _key(ranked[0]) in known,
        candidates=len(found),
        bound=min((one.bound for one in found), default=0.0),
    )


def _like(spaces: Sequence[Space], cluster: Cluster, asked: AskedLayout) -> list[PlanCandidate]:
    """Return the candidates in which all chains of each unit match the request."""
    names = [cluster.groups[number].name for number in range(len(spaces))]

    def is_like(candidate: PlanCandidate) -> bool:
        groups = candidate.groups or (0,) * len(candidate.options)
        return asked.microbatch_tokens in (None, candidate.row_tokens) and all(
            {**_degrees(option, count, unit), GROUP: names[group]}.items() >= wanted.items()
            and asked.cuts.get(unit, option.chain.cuts[unit]) == option.chain.cuts[unit]
            for unit, wanted in asked.units.items()
            for option, count, group in zip(candidate.options, candidate.counts, groups, strict=True)
            if unit in option.chain.cuts
        )

    return [one for one in all_candidates(spaces) if is_like(one)]


def _degrees(option: Option, count: int, unit: str) -> dict[str, int]:
    chain, stages = option.chain, len(option.chain.cuts[unit])
    chunks = chain.chunks if stages == option.stages else 1
    degrees = chain.degrees_of(unit)
    return {"replicas": count * degrees.groups, **degrees._asdict(), "pp": stages // chunks, "chunks": chunks}


def _key(one: RankedPlan) -> tuple[object, ...]:
    return one.plan, one.num_microbatches, one.row_tokens, one.zero


def _is_like(found: RankedPlan, asked: AskedLayout, cluster: Cluster) -> bool:
    """Return True if a simulated plan matches the request."""
    if asked.microbatch_tokens not in (None, found.row_tokens) or asked.zero not in (None, found.zero):
        return False
    for unit, wanted in asked.units.items():
        replicas = found.plan.unit(unit).replicas
        stages = replicas[0].stages
        groups = len({stage.ranks for stage in stages})
        homes = {cluster.at(one.stages[0].ranks[0]).name for one in replicas}
        own = {
            GROUP: homes.pop() if len(homes) == 1 else "",
            "replicas": len(replicas) * stages[0].degrees.groups, **stages[0].degrees._asdict(), "pp": groups,
            "chunks": len(stages) // groups,
        }  # fmt: skip
        firsts = tuple(stage.first for stage in stages)
        if not own.items() >= wanted.items() or asked.cuts.get(unit, firsts) != firsts:
            return False
    return True


def _problems(space: Space, asked: AskedLayout) -> list[str]:
    """Return the problems that no search could overcome, whatever its cluster."""
    problems, row_tokens = [], space.settings.row_tokens
    if asked.microbatch_tokens not in (None, *row_tokens):
        there = f"{either(row_tokens)} was" if row_tokens else "no budget of tokens was"
        problems.append(f"{TOKENS} {asked.microbatch_tokens} was not tried; {there} (plan.{TOKENS})")
    names = [group.name for group in space.cluster.groups if group.name]
    for unit, wanted in asked.units.items():
        if wanted.get(GROUP, "") not in ("", *names):
            there = f"they are {', '.join(names)}" if names else "there are none"
            problems.append(f"{unit}: group {wanted[GROUP]!r} is none of cluster.groups; {there}")
        degrees = [*space.table.units.all_degrees([unit])]
        for key in Degrees._fields:
            offered = sorted({getattr(one, key) for one in degrees})
            if key in wanted and wanted[key] not in offered:
                source = "those that its experts"
                if key in AXES:
                    source = f"plan.{AXES[key]}, or the degrees of the cost file, that its layers"
                problems.append(
                    f"{unit}: {key} {wanted[key]} was not offered; {key} {either(offered)} was "
                    f"({source} and a node of {space.cluster.gpus_per_node} take)"
                )
        layers, held = space.model.unit(unit).most_stages, len(space.model.unit(unit).layers)
        cuts = asked.cuts.get(unit, (0,))
        stages = max(len(cuts), wanted.get("pp", 1) * wanted.get("chunks", 1))
        if cuts[-1] >= held or (unit in asked.cuts and "pp" in wanted and len(cuts) != stages):
            problems.append(f"{unit}: cuts {list(cuts)} are not of its {held} layers into {stages} stages")
        if stages > layers:
            problems.append(f"{unit} has {layers} layers, which {stages} stages cannot share")
        if wanted.get("chunks", 1) not in (1, *(space.settings.chunks if unit == space.roles.language else ())):
            problems.append(f"{unit}: chunks {wanted['chunks']} were not tried (plan.chunks, for the language model)")
    taken = _devices(asked).values()
    shared = {space.roles.language, *space.roles.encoders} >= asked.units.keys()
    devices = max(taken, default=0) if shared else sum(taken)
    if devices > space.cluster.num_devices:
        problems.append(f"it takes {devices} devices, and there are {space.cluster.num_devices}")
    return problems


def _devices(asked: AskedLayout) -> dict[str, int]:
    """Return unit → the fewest devices that its layout takes."""
    keys = ("replicas", *AXES, "pp")
    return {unit: math.prod(wanted.get(key, 1) for key in keys) for unit, wanted in asked.units.items()}


def _nowhere(space: Space, asked: AskedLayout) -> str:
    """Explain why no candidate matches although each unit's layout is possible."""
    replicas = {wanted["replicas"] for wanted in asked.units.values() if "replicas" in wanted}
    sizes = space.settings.microbatch_sizes
    for count in replicas:
        by_tokens = any(space.microbatches_of(most, count) for most in space.settings.row_tokens)
        if not by_tokens and all(space.global_batch % (count * size) for size in sizes):
            return (
                f"a global batch of {space.global_batch} does not divide among {count} replicas into microbatches of "
                f"{either(sizes)}"
            )
    taken = _devices(asked)
    least = sum(
        taken.get(unit) or min((one.ranks for one in space.table.units.degrees([unit])), default=1)
        for unit in space.roles.units
    )
    if least > space.cluster.num_devices:
        return f"with all units it takes {least} devices, and there are {space.cluster.num_devices}"
    if len(replicas) > 1:
        return (
            "replicas of unlike number are looked at only where each has a sample of every microbatch and, on more "
            f"than {SMALL_CLUSTER} devices, where an encoder's or generator's number divides the language model's or "
            "the samples of its microbatches"
        )
    if asked.microbatch_tokens is not None:
        return (
            f"{asked.microbatch_tokens} tokens are tried only where a step then has another number of microbatches "
            "than by any number of samples or other budget, and each pipeline has some"
        )
    return "each part of it is possible, and no plan that the search makes has all of them"


def _varied(space: Space, capacity: float | None, cuts: Mapping[str, tuple[int, ...]]) -> Space:
    tables = space.table.varied(capacity, cuts), space.by_tokens.varied(capacity, cuts)
    return replace(space, table=tables[0], by_tokens=tables[1])


def either(values: Iterable[object]) -> str:
    """Return the values, of which there is at least one, as "1, 2 or 4"."""
    texts = [str(value) for value in values]
    return " or ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
