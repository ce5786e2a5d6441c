"""The cost model: costs of every layer type on some hardware, in a file that a user can read, share and edit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import yaml
from msgspec import Meta

from dilatant.config.degrees import AXES, ONE, Degrees
from dilatant.config.errors import UserError
from dilatant.config.files.durable import write_named
from dilatant.config.files.own_files import read_text
from dilatant.config.files.yaml_text import MOST_BYTES, explain, read_yaml
from dilatant.cost.layer import LayerCost

_T = TypeVar("_T")
ROUGH = 0.3
"""Relative error above which a fit is rough: the machine was busy, or the layers are too small to time."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """The costs `layers[layer type][degrees]` on `hardware`, by `Degrees.without_experts`.

    `origin`: "measured", "analytic" (from FLOPs, bytes and the hardware file: not measured) or "synthetic". `note`:
    the method, and which parts of measured costs are modelled (see `cost.analytic`). `longest`: tokens of the longest
    measured row of the language model; 0 if unknown. `groups`: costs of each device group of a heterogeneous cluster,
    by name; the other fields are then those of the first group.
    """

    hardware: str
    origin: str
    dtype: str
    layers: Mapping[str, Mapping[Degrees, LayerCost]]
    note: str = ""
    longest: int = 0
    groups: Mapping[str, CostModel] = field(default_factory=dict)

    @property
    def rough(self) -> list[tuple[float, str]]:
        """Return the (error, layer type) of rough fits, the worst first."""
        fits = [(cost.fit_error or 0.0, kind) for kind, own in self.layers.items() for cost in own.values()]
        return sorted((fit for fit in fits if fit[0] > ROUGH), reverse=True)

    @property
    def unmeasured(self) -> list[str]:
        """Return the layer types of a measured model that are modelled, because time ran out before them."""
        errors = {kind: [cost.fit_error for cost in own.values()] for kind, own in self.layers.items()}
        if self.origin != "measured" or all(error is None for own in errors.values() for error in own):
            return []  # an analytic model, or a file without fit errors
        return [kind for kind, own in errors.items() if None in own]

    @property
    def unmeasured_text(self) -> str:
        """Return how many layer types are `unmeasured`, as a text to append to the costs' origin; empty if none."""
        count = len(self.unmeasured)
        return f", {count} of {len(self.layers)} layer types modelled" if count else ""

    def on(self, group: str) -> CostModel:
        """Return the costs of a device group; this model itself if all devices are equal."""
        return self.groups.get(group, self)

    def mapped(self, change: Callable[[CostModel], CostModel]) -> CostModel:
        """Apply `change` to these costs, or to those of every group."""
        changed = {name: change(own) for name, own in self.groups.items()}
        return replace(next(iter(changed.values())), groups=changed) if changed else change(self)

    def layer(self, kind: str, degrees: Degrees = ONE) -> LayerCost:
        """Return the cost of a layer type. Raises UserError that names the available ones."""
        if kind not in self.layers:
            raise UserError(
                f"the cost model of {self.hardware} has no layer type {kind!r}; it has {sorted(self.layers)}. "
                f"Run `dilatant profile` for this model."
            )
        known, wanted = self.layers[kind], degrees.without_experts
        if wanted not in known:
            raise UserError(
                f"the cost model of {self.hardware} has layer type {kind!r} at ({', '.join(AXES)}) "
                f"{sorted(one.axes for one in known)}, not at {wanted.axes}. Run `dilatant profile` with these degrees."
            )
        return known[wanted]

    def to_yaml(self) -> str:
        """Return a YAML document that `from_yaml` reads back to an equal value; quadratics are `[a, b, c]`."""
        groups = {name: own._to_document() for name, own in self.groups.items()}
        return "# Seconds and bytes are a * tokens^2 + b * tokens + c, written [a, b, c].\n" + yaml.safe_dump(
            {"groups": groups} if groups else self._to_document(), sort_keys=False, default_flow_style=None, width=100
        )

    def _to_document(self) -> dict[str, Any]:
        layers = {
            kind: {degrees.to_key(): cost for degrees, cost in sorted(own.items())} for kind, own in self.layers.items()
        }
        facts = {name: getattr(self, name) for name in ("hardware", "origin", "dtype", "note", "longest")}
        document: dict[str, Any] = msgspec.to_builtins({**facts, "layers": layers})
        return document

    @classmethod
    def from_yaml(cls, text: str, source: str = "cost model") -> CostModel:
        """Read a document of `to_yaml`. Raises UserError, naming `source` and the place, for anything else."""
        try:
            document = read_yaml(text)
        except yaml.YAMLError as error:
            raise UserError(f"{source} is not a cost model: {explain(error)}") from None
        if not isinstance(document, dict) or document.get("groups") is None:
            return cls._from_document(document, source)
        groups = _convert(document, _Groups, source).groups
        parts = {name: cls._from_document(own, f"group {name!r} of {source}") for name, own in groups.items()}
        return replace(next(iter(parts.values())), groups=parts)

    @classmethod
    def _from_document(cls, document: Any, source: str) -> CostModel:
        read = _convert(document, _CostFile, source)
        layers = {
            kind: {
                _degrees(key, source): _layer_cost(cost, f"{source} (layers, {kind}, {key})")
                for key, cost in own.items()
            }
            for kind, own in read.layers.items()
        }
        return cls(read.hardware, read.origin, read.dtype, layers, read.note or "", read.longest or 0)


class _CostFile(msgspec.Struct, kw_only=True):
    """Keys of a cost file, or of one of its groups."""

    hardware: str
    origin: str
    dtype: str
    note: str | None = None
    longest: int | None = None
    layers: dict[str, dict[str, Any]]


class _Groups(msgspec.Struct):
    groups: Annotated[dict[str, Any], Meta(min_length=1)]


def save_costs(costs: CostModel, path: Path) -> None:
    """Write the cost model as YAML, atomically because other processes may be reading the file. Raises OSError."""
    write_named(path, costs.to_yaml())


def save_group_costs(costs: CostModel, group: str, path: Path) -> CostModel:
    """Write the cost model of one device group of a heterogeneous cluster, keeping the file's other groups. Returns
    all. Raises UserError for a file without groups, or in another precision."""
    others = load_costs(path) if path.exists() else costs
    if path.exists() and not others.groups:
        raise UserError(f"{path} holds costs of {others.hardware!r} alone; name another file for those of groups")
    if others.dtype != costs.dtype:
        raise UserError(f"{path} holds costs in {others.dtype}, those of {group!r} are in {costs.dtype}")
    groups = {**others.groups, group: costs}
    together = replace(next(iter(groups.values())), groups=groups)
    save_costs(together, path)
    return together


def load_costs(path: Path, hardware: str | None = None) -> CostModel:
    """Read a cost model. Raises UserError if the file is no cost model, or is for other hardware than `hardware`."""
    try:
        text = read_text(path, MOST_BYTES)
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a cost model: it is no text") from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} is not a cost model: {error.strerror}") from None
    costs = CostModel.from_yaml(text, str(path))
    if hardware is not None and costs.hardware != hardware:
        raise UserError(
            f"{path} holds costs of {costs.hardware}, but this run is on {hardware}; "
            f"profile it here, or set the hardware to {costs.hardware}"
        )
    return costs


def _convert(value: Any, kind: type[_T], source: str) -> _T:
    try:
        return msgspec.convert(value, kind, strict=False)  # YAML reads 1e-9 as a text
    except msgspec.ValidationError as error:
        raise UserError(f"{source} is not a cost model: {error}. `dilatant profile` writes one") from None


def _layer_cost(value: Any, source: str) -> LayerCost:
    cost = _convert(value, LayerCost, source)
    known = {column.name for column in fields(LayerCost)}
    if unknown := sorted(set(value) - known):
        raise UserError(f"{source} is not a cost model: unknown keys {unknown}; known are {sorted(known)}")
    dense = tuple(sorted(cost.dense_seconds))
    if len(dict(dense)) < len(dense):
        raise UserError(f"{source} is not a cost model: dense_seconds has tokens twice")
    return replace(cost, dense_seconds=dense)


def _degrees(key: str, source: str) -> Degrees:
    try:
        return Degrees.from_key(key)
    except ValueError as error:
        raise UserError(f"{source} is not a cost model: {error}") from None
