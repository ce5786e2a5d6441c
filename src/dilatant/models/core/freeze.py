"""Freezing: selects which weights train; no other module decides it.

Each unit stores the logical names of its frozen parameters. Code that copies, shards or reloads weights reapplies this
set with `Stage.set_frozen` and verifies it with `check`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from dilatant.config.errors import UserError, list_problems
from dilatant.config.train import MuonConfig
from dilatant.models.core.unit import Unit


@dataclass(frozen=True, slots=True)
class PartAudit:
    """The sizes of one part of a unit: "vision.encoder", "vision.projector" or "language". parameters: number of
    elements, tied ones once; trainable: number of them that train; bytes: memory of all."""

    part: str
    parameters: int
    trainable: int
    bytes: int


def select(units: Mapping[str, Unit], patterns: Iterable[str]) -> frozenset[str]:
    """Return the logical names of the parameters that match the patterns.

    A pattern is a unit ("vision": encoder and projector), a part ("vision.encoder", "vision.projector"), a layer or
    module ("language.layers.0", "language.layers.0.mlp"), a parameter, or a glob over parameter names
    ("vision.layers.[01].*"). A tied weight matches by any of its names. Raises UserError that lists the patterns
    without a match, each with the nearest name.
    """
    known: dict[str, tuple[str, str]] = {}
    for unit in units.values():
        parameters = dict(unit.named_logical_parameters())
        for weight in unit.weights:
            if weight.canonical in parameters:
                known[weight.name] = (unit.part_name(weight.part), weight.canonical)
    chosen: set[str] = set()
    unmatched = []
    for pattern in patterns:
        matched = {
            canonical
            for name, (part, canonical) in known.items()
            if pattern in (part, name) or name.startswith(pattern + ".") or fnmatchcase(name, pattern)
        }
        chosen |= matched
        if not matched:
            names = {part for part, _ in known.values()}
            names.update(*(accumulate(name.split("."), "{}.{}".format) for name in known))
            near = difflib.get_close_matches(pattern, sorted(names), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"the units are {', '.join(units)}"
            unmatched.append(f"{pattern!r} names no weight; {hint}")
    if unmatched:
        raise list_problems("cannot choose weights:", unmatched)
    return frozenset(chosen)


def choose_orthogonal(units: Mapping[str, Unit], muon: MuonConfig | None) -> None:
    """Let Muon update the trained matrices within blocks that its patterns select. Raises UserError for a pattern
    without any."""
    for pattern in () if muon is None else muon.weights:
        names = select(units, [pattern])
        found = {
            unit: {name for name, weight in unit.named_logical_parameters() if name in names and weight.ndim == 2}
            for unit in units.values()
        }
        inside = {unit: {one for one in own - unit.frozen if ".layers." in one} for unit, own in found.items()}
        if not any(inside.values()):
            raise UserError(f"train.optimizer.muon.weights: {pattern!r} names no matrix in a block that trains")
        for unit, own in inside.items():
            unit.orthogonal |= own


def freeze(units: Mapping[str, Unit], patterns: Iterable[str]) -> None:
    """Freeze the selected weights, in addition to those that are frozen already. Raises UserError (`select`)."""
    names = select(units, patterns)
    for unit in units.values():
        unit.freeze_names(names)


def thaw(units: Mapping[str, Unit], patterns: Iterable[str]) -> None:
    """Make the selected weights trainable, except weights that influence no output. Raises UserError (`select`)."""
    names = select(units, patterns)
    for unit in units.values():
        unit.thaw_names(names)


def check(parameters: Iterable[tuple[str, nn.Parameter]], frozen: frozenset[str]) -> None:
    """Raise RuntimeError if a transformation changed which parameters train. parameters: (logical name, parameter)."""
    wrong = sorted(name for name, parameter in parameters if parameter.requires_grad == (name in frozen))
    if wrong:
        raise RuntimeError(f"{len(wrong)} weights train although frozen, or the reverse: {', '.join(wrong[:8])}")


def audit(units: Mapping[str, Unit]) -> tuple[PartAudit, ...]:
    """Count the parameters of each part of each unit, in order."""
    audits = []
    for unit in units.values():
        part_of = {weight.canonical: unit.part_name(weight.part) for weight in reversed(unit.weights)}
        held: dict[str, list[nn.Parameter]] = {unit.part_name(part): [] for part in unit.parts}
        for name, parameter in unit.named_logical_parameters():
            held[part_of[name]].append(parameter)
        audits += [
            PartAudit(
                part=part,
                parameters=sum(p.numel() for p in parameters),
                trainable=sum(p.numel() for p in parameters if p.requires_grad),
                bytes=sum(p.numel() * p.element_size() for p in parameters),
            )
            for part, parameters in held.items()
        ]
    return tuple(audits)
