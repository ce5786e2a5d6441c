"""Hardware: specifications of devices and links, from a file shipped with the package or the user's own file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from dilatant.config.degrees import Degrees
from dilatant.config.errors import UserError, list_problems
from dilatant.config.files.durable import write_named
from dilatant.config.files.own_files import read_text
from dilatant.config.files.yaml_text import MOST_BYTES, explain, read_yaml
from dilatant.cost.quadratic import fit


@dataclass(frozen=True, slots=True)
class Link:
    """A network link: a message takes `latency + bytes / bandwidth` seconds; bandwidth in bytes/s per direction.
    mesh: devices each two of which have a wire of their own; `bandwidth` is then that of all wires of a device."""

    bandwidth: float
    latency: float = 0.0
    mesh: Annotated[int, Meta(ge=0)] = 0

    def among(self, devices: int) -> Link:
        """Return the link of a collective of so many devices, of which a mesh has fewer wires than of all."""
        if not 1 < devices < self.mesh:
            return self
        return Link(self.bandwidth * (devices - 1) / (self.mesh - 1), self.latency)

    def hidden(self, share: float) -> Link:
        """Return the link of which computation hides `share` of the bytes, but no latency: ranks wait as before."""
        return replace(self, bandwidth=self.bandwidth / (1.0 - share))


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """The links of a stage's tensor-parallel and context-parallel groups."""

    tensor: Link
    context: Link


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device type. `peak_flops` per second by dtype, `memory` in bytes, `bandwidth` in bytes per second.

    `inside` links devices of one node, `between` links a node to the others through `ports` network ports. `launch`:
    seconds from one kernel to the next on the device; `host`: seconds in which the host issues one operation. The two
    efficiencies are the fractions of peak that large kernels reach, `efficiency` those of products in dtypes that reach
    another; `attention`: those of attention's forward and backward, by kernel ("packed": ours). `processors`: units
    that each compute a tile of a product; 0: products have no tiles. `host_link`: bytes per second between a device and
    its host in one direction, while all devices of a node copy; 0: they share memory, or it is unknown. `node`: devices
    of a usual node. `domain`: devices of an NVLink domain that spans nodes, which `inside` links; 0: none does.
    `spread`: standard deviation of the speeds of devices of this type, as a share of the mean. `vendor`: FP8 runs on
    NVIDIA's alone. `source`: origin of the numbers.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory: float
    bandwidth: float
    matmul_efficiency: float
    memory_efficiency: float
    launch: float
    inside: Link
    between: Link
    ports: Annotated[int, Meta(ge=1)] = 1
    source: str = ""
    attention: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    efficiency: Mapping[str, float] = field(default_factory=dict)
    host: float = 0.0
    processors: Annotated[int, Meta(ge=0)] = 0
    host_link: float = 0.0
    node: Annotated[int, Meta(ge=1)] = 8
    domain: Annotated[int, Meta(ge=0)] = 0
    spread: float = 0.0
    vendor: str = "NVIDIA"

    def among(self, devices: int) -> Hardware:
        """Return the slowest of so many devices, for which all others wait in each step: of normally distributed speeds
        it is about `sqrt(2 ln devices)` standard deviations below the mean. The shares of peak hold for eight."""
        fewest = 8
        below, known = (math.sqrt(2 * math.log(max(fewest, one))) for one in (devices, fewest))
        return self.clocked(1 / (1 + self.spread * (below - known)))

    def clocked(self, share: float) -> Hardware:
        """Return the device at `share` of its clock, which products and attention follow, but memory does not."""
        attention = {kernel: (forth * share, back * share) for kernel, (forth, back) in self.attention.items()}
        efficiency = {dtype: own * share for dtype, own in self.efficiency.items()}
        return replace(
            self, matmul_efficiency=self.matmul_efficiency * share, efficiency=efficiency, attention=attention
        )

    def group_links(self, degrees: Degrees, gpus_per_node: int | None = None) -> GroupLinks:
        """Return the links of a stage with `gpus_per_node` devices per node (None: one node holds all). If its
        context-parallel rings span nodes, which the stage fills, tp rings share a node's ports."""
        if gpus_per_node is None or degrees.ranks <= gpus_per_node:
            return GroupLinks(self.inside.among(degrees.tp), self.inside.among(2))
        share = min(self.inside.bandwidth, self.between.bandwidth / degrees.tp)
        return GroupLinks(self.inside.among(degrees.tp), Link(share, self.between.latency))

    def flops(self, dtype: str) -> float:
        """Return the FLOP/s of large kernels (a multiply-add is two). Raises UserError for an unknown dtype."""
        if dtype not in self.peak_flops:
            raise UserError(f"hardware {self.name} has no peak for {dtype}; it has {sorted(self.peak_flops)}")
        return self.peak_flops[dtype] * self.efficiency.get(dtype, self.matmul_efficiency)

    def attention_flops(self, kernel: str, dtype: str) -> tuple[float, float]:
        """Return the FLOP/s of an attention kernel over visible pairs, forward and backward; of unknown kernels those
        of ours, and without any those of large kernels."""
        known = (self.matmul_efficiency, self.matmul_efficiency)
        forward, backward = self.attention.get(kernel) or self.attention.get("packed") or known
        return forward * self.peak_flops[dtype], backward * self.peak_flops[dtype]


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[Link, float]:
    """Fit a link's `latency + bytes / bandwidth` to the measured seconds of messages of `sizes` bytes, by least squares
    of relative errors. Returns link and largest relative error. Raises ValueError if larger messages
    take no longer.
    """
    line, error = fit(sizes, seconds, square=False)
    if line.b <= 0.0:
        raise ValueError(f"messages of {list(sizes)} bytes took {list(seconds)} s: that tells no bandwidth")
    return Link(bandwidth=float(f"{1.0 / line.b:.4g}"), latency=line.c), error


def save_hardware(hardware: Hardware, name: str, path: Path) -> None:
    """Write `hardware` as entry `name` of a hardware file; keep the other entries of an existing file.

    Raises UserError if `path` holds something else, or cannot be written.
    """
    try:
        document = read_hardware_file(read_text(path, MOST_BYTES), str(path)) if path.is_file() else {}
        entry = {key: value for key, value in asdict(hardware).items() if key != "name"}
        document[name] = {"source": entry.pop("source"), **entry}
        write_named(
            path,
            "# Devices and links; see `cluster.hardware_file`. Edit what you know better.\n"
            + yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=100),
        )
    except UnicodeDecodeError:
        raise UserError(f"{path} is there already and is no text; choose another name") from None
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written: {error.strerror}") from None


def read_hardware_file(text: str, where: str) -> dict[str, Any]:
    """Return all entries of a hardware file as plain values. Raises UserError for anything else."""
    try:
        document = read_yaml(text) or {}
    except yaml.YAMLError:
        raise UserError(f"{where} is there already and is not YAML; choose another name") from None
    keys = {one.name for one in fields(Hardware)} | {"like"}
    if not isinstance(document, dict) or not all(
        isinstance(entry, dict) and keys >= entry.keys() for entry in document.values()
    ):
        raise UserError(f"{where} is there already and is no hardware file; choose another name")
    return document


def load_hardware(name: str, path: Path | None = None) -> Hardware:
    """Load the device called `name` ("RTX 4090", or "rtx4090") from `path`, by default from the shipped file.

    Raises UserError that lists the available devices, or each key of this device that is missing, unknown or no number.
    """
    where = str(path) if path is not None else "the built-in hardware file"
    try:
        document = _built_in() if path is None else read_yaml(read_text(path, MOST_BYTES))
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not YAML: {explain(error)}") from None
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} cannot be read: {error}") from None
    written = {_plain(str(key)): key for key in document} if isinstance(document, dict) else {}
    if _plain(name) not in written:
        known = ", ".join(sorted(map(repr, written.values()))) or "nothing"
        near = max((key for key in written if _plain(name).startswith(key)), key=len, default=None)
        hint = f"did you mean {written[near]!r}? " if near else ""
        raise UserError(
            f"no hardware {name!r} in {where}; {hint}it has {known}. Name one of them, or a file with an entry of your "
            "own in cluster.hardware_file."
        )
    name = name if name in document else written[_plain(name)]
    entry, seen = document[name], {name}
    while isinstance(entry, dict) and entry.get("like") in document.keys() - seen:
        seen.add(like := entry["like"])
        own = {key: value for key, value in entry.items() if key != "like"}
        entry = {**document[like], **own} if isinstance(document[like], dict) else own
    return _read(name, entry, where)


def _plain(name: str) -> str:
    """Return a name without case, spaces and hyphens, in which people write it differently."""
    return re.sub(r"[\s_-]", "", name).casefold()


@cache
def _built_in() -> Any:
    """Parse the built-in file once: planning after a failure should not wait for it."""
    return read_yaml(files("dilatant.cost").joinpath("hardware.yaml").read_text(encoding="utf-8"))


_WORDS = {
    **dict.fromkeys(("peak_flops", "efficiency"), "a mapping of numbers"),
    **dict.fromkeys(("inside", "between"), "a mapping with bandwidth and latency, in numbers"),
    "ports": "a whole number from 1 on",
    **dict.fromkeys(("processors", "domain"), "a whole number"),
    "attention": "a mapping of kernels to two numbers",
    "source": "a text",
}


_OPTIONAL = {one.name for one in fields(Hardware) if one.default is not MISSING or one.default_factory is not MISSING}


def _read(name: str, entry: Any, where: str) -> Hardware:
    if not isinstance(entry, dict):
        raise UserError(f"hardware {name} in {where} must be a mapping of keys, got {entry!r}")
    kinds = get_type_hints(Hardware, include_extras=True)
    del kinds["name"]
    problems = [f"{name}.{key} is missing" for key in sorted(kinds.keys() - entry - _OPTIONAL)]
    problems += [f"{name}.{key} is unknown; known are {sorted(kinds)}" for key in sorted(entry.keys() - kinds)]
    values: dict[str, Any] = {"name": name}
    for key in sorted(kinds.keys() & entry):
        try:
            values[key] = msgspec.convert(entry[key], kinds[key], strict=False)
            wrong = kinds[key] is Link and entry[key].keys() - {"bandwidth", "latency", "mesh"}
        except msgspec.ValidationError:
            wrong = True
        if wrong:
            problems.append(f"{name}.{key} must be {_WORDS.get(key, 'a number')}, got {entry[key]!r}")
    if problems:
        raise list_problems(f"hardware {name} in {where}:", problems)
    return Hardware(**values)
