"""The cost model: costs of every layer type on some hardware, in a file that a user can read, share and edit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from dilatant.config.errors import UserError
from dilatant.config.files.durable import write_named
from dilatant.config.files.own_files import read_text
from dilatant.config.files.yaml_text import MOST_BYTES, explain, read_yaml
from dilatant.cost.layer import LayerCost
from dilatant.cost.quadratic import Quadratic

Degree = tuple[int, int]
ROUGH = 0.3
"""Relative error above which a fit is rough: the machine was busy, or the layers are too small to time."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """The costs `layers[layer type][(tp, cp)]` on `hardware`.

    `origin`: "measured", "analytic" (from FLOPs, bytes and the hardware file: not measured) or "synthetic". `note`:
    the method, and which parts of measured costs are modelled (see `cost.group`). `longest`: tokens of the longest
    measured row of the language model; 0 if unknown. `groups`: costs of each device group of a heterogeneous cluster,
    by name; the other fields are then those of the first group.
    """

    hardware: str
    origin: str
    dtype: str
    layers: Mapping[str, Mapping[Degree, LayerCost]]
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

    def layer(self, kind: str, tp: int = 1, cp: int = 1) -> LayerCost:
        """Return the cost of a layer type. Raises UserError that names the available ones."""
        if kind not in self.layers:
            raise UserError(
                f"the cost model of {self.hardware} has no layer type {kind!r}; it has {sorted(self.layers)}. "
                f"Run `dilatant profile` for this model."
            )
        degrees = self.layers[kind]
        if (tp, cp) not in degrees:
            raise UserError(
                f"the cost model of {self.hardware} has layer type {kind!r} at (tp, cp) {sorted(degrees)}, "
                f"not at ({tp}, {cp}). Run `dilatant profile` with these degrees."
            )
        return degrees[tp, cp]

    def to_yaml(self) -> str:
        """Return a YAML document that `from_yaml` reads back to an equal value; quadratics are `[a, b, c]`."""
        groups = {name: own._to_document() for name, own in self.groups.items()}
        return "# Seconds and bytes are a * tokens^2 + b * tokens + c, written [a, b, c].\n" + yaml.safe_dump(
            {"groups": groups} if groups else self._to_document(),
            sort_keys=False,
            default_flow_style=None,
            width=100,
        )

    def _to_document(self) -> dict[str, Any]:
        layers = {
            kind: {f"tp{tp} cp{cp}": _cost_to_dict(cost) for (tp, cp), cost in sorted(degrees.items())}
            for kind, degrees in self.layers.items()
        }
        return {
            "hardware": self.hardware,
            "origin": self.origin,
            "dtype": self.dtype,
            "note": self.note,
            "longest": self.longest,
            "layers": layers,
        }

    @classmethod
    def from_yaml(cls, text: str, source: str = "cost model") -> CostModel:
        """Read a document of `to_yaml`. Raises UserError, naming `source` and the place, for anything else."""
        try:
            document = read_yaml(text)
            groups = dict(document or {}).get("groups")
            if groups is not None:
                parts = {
                    str(name): cls._from_document(own, f"group {name!r} of {source}")
                    for name, own in groups.items()
                }
                return replace(next(iter(parts.values())), groups=parts)
            return cls._from_document(document, source)
        except UserError:
            raise
        except yaml.YAMLError as error:
            raise UserError(f"{source} is not a cost model: {explain(error)}") from None
        except (TypeError, ValueError, AttributeError, StopIteration) as error:
            raise UserError(f"{source} is not a cost model: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_document(cls, document: Any, source: str) -> CostModel:
        try:
            lacking = [
                key for key in ("hardware", "origin", "dtype", "layers") if key not in dict(document or {})
            ]
            if lacking:
                raise UserError(
                    f"{source} is not a cost model: it has no {' and no '.join(lacking)}. `dilatant profile` writes one"
                )
            layers = {
                kind: {_degree(key): _cost_from_dict(cost) for key, cost in degrees.items()}
                for kind, degrees in document["layers"].items()
            }
            for key in ("hardware", "origin", "dtype"):
                if not isinstance(document[key], str):
                    raise ValueError(f"{key}: {document[key]!r} is no text")
            return cls(
                document["hardware"],
                document["origin"],
                document["dtype"],
                layers,
                document.get("note") or "",
                int(document.get("longest") or 0),
            )
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(f"{source} is not a cost model: {type(error).__name__}: {error}") from error


def save_costs(costs: CostModel, path: Path) -> None:
    """Write the cost model as YAML, atomically because other processes may be reading the file. Raises OSError."""
    write_named(path, costs.to_yaml())


def save_group_costs(costs: CostModel, group: str, path: Path) -> CostModel:
    """Write the cost model of one device group of a heterogeneous cluster, keeping the file's other groups. Returns
    all. Raises UserError for a file without groups, or in another precision."""
    others = load_costs(path) if path.exists() else costs
    if path.exists() and not others.groups:
        raise UserError(
            f"{path} holds costs of {others.hardware!r} alone; name another file for those of groups"
        )
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


def _cost_to_dict(cost: LayerCost) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for column in fields(cost):
        value = getattr(cost, column.name)
        values[column.name] = list(asdict(value).values()) if isinstance(value, Quadratic) else value
    values["dense_seconds"] = [list(pair) for pair in cost.dense_seconds]
    return values


def _cost_from_dict(values: dict[str, Any]) -> LayerCost:
    known = {column.name for column in fields(LayerCost)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown keys {unknown}; known are {sorted(known)}")
    dense = _dense_seconds(values.get("dense_seconds") or [])
    values = {name: value for name, value in values.items() if name != "dense_seconds"}
    read: dict[str, Any] = {
        name: Quadratic(*map(_amount, value)) if isinstance(value, list) else value
        for name, value in values.items()
    }
    parameters, error = read.pop("parameters", 0), read.pop("fit_error", None)
    flags = {name: read.pop(name) for name in ("splits", "in_chunks") if name in read}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise ValueError(f"{', '.join(flags)}: true or false")
    wrong = [name for name, value in read.items() if not isinstance(value, Quadratic)]
    if wrong:
        raise ValueError(f"{wrong[0]} is no list of [a, b, c]")
    if not isinstance(parameters, int) or isinstance(parameters, bool) or parameters < 0:
        raise ValueError(f"parameters: {parameters!r} is no whole number")
    return LayerCost(
        **read,
        **flags,
        parameters=parameters,
        fit_error=None if error is None else _amount(error),
        dense_seconds=dense,
    )


def _dense_seconds(values: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(values, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in values):
        raise ValueError("dense_seconds is no list of [tokens, seconds]")
    found = tuple((int(_amount(tokens)), _amount(seconds)) for tokens, seconds in values)
    if any(tokens < 1 for tokens, _ in found) or len(dict(found)) < len(found):
        raise ValueError("dense_seconds: tokens must be at least 1, each once")
    return tuple(sorted(found))


def _amount(value: Any) -> float:
    """Read an amount of seconds or bytes. Raises ValueError unless it is finite and not negative."""
    if isinstance(value, bool) or not 0 <= float(value) < math.inf:
        raise ValueError(f"{value!r} is no finite number from 0")
    return float(value)


def _degree(key: str) -> Degree:
    tp, cp = key.split()
    if not (tp.startswith("tp") and cp.startswith("cp")):
        raise ValueError(f"{key!r} is not of the form 'tp1 cp1'")
    degree = int(tp[2:]), int(cp[2:])
    if min(degree) < 1:
        raise ValueError(f"{key!r} has a degree below 1")
    return degree
