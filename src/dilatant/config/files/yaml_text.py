"""Safe YAML reading: bounded in size, without duplicate keys, and with one kind of error for all mistakes."""

from __future__ import annotations

import re
from typing import Any

import yaml

MOST_BYTES = 4 << 20
"""Maximum bytes of a document; a file of measured costs with hundreds of layer types takes a tenth of it."""
MOST_COPIES = 100_000
"""Maximum number of values that a document's aliases may add to those written out."""


def read_yaml(text: str) -> Any:
    """Parse a document into plain values.

    Raises yaml.YAMLError for a duplicate key, for a number that YAML 1.1 reads in base 8 or 60 (010, 1:30), for aliases
    that would exhaust memory, for more than `MOST_BYTES`, and for all failures inside the parser: unbounded nesting,
    numbers of thousands of digits, impossible dates, tags that do not fit their text.
    """
    if len(text) > MOST_BYTES:
        raise yaml.YAMLError(f"it is longer than {MOST_BYTES >> 20} MiB")
    try:
        return _read(text)
    except yaml.YAMLError:
        raise
    except Exception as error:
        problem = "nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise yaml.YAMLError(problem or type(error).__name__) from None


def dump_yaml(tree: Any) -> str:
    """Return a tree of plain values as YAML, in its order."""
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def explain(error: yaml.YAMLError) -> str:
    """Return the problem and its place from an error of `read_yaml`, in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return place + (problem or " ".join(str(error).split()))


def _read(text: str) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        sizes: dict[int, int] = {}
        if _count(root, sizes) > len(sizes) + MOST_COPIES:
            raise yaml.YAMLError(f"its aliases repeat more than {MOST_COPIES:,} values")
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _count(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values below `node` with aliases expanded. sizes: of the visited nodes, 0 for those being
    counted. Raises MarkedYAMLError."""
    if (seen := sizes.get(id(node))) is not None:
        if not seen:
            raise _marked(node, "an alias that contains itself")
        return seen
    sizes[id(node)] = 0
    below: list[yaml.Node] = []
    if node.tag.endswith((":int", ":float")) and re.fullmatch(r"[-+]?(0[0-7_]+|.*:.*)", str(node.value)):
        base = 60 if ":" in node.value else 8
        raise _marked(node, f"{node.value} would be read in base {base}; write a decimal number, or quote it")
    if isinstance(node, yaml.MappingNode):
        _require_distinct(node)
        below = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        below = node.value
    sizes[id(node)] = 1 + sum(_count(part, sizes) for part in below)
    return sizes[id(node)]


def _require_distinct(node: yaml.MappingNode) -> None:
    """Raise MarkedYAMLError for a duplicate key, of which PyYAML would silently keep the last."""
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
            if (name := (key.tag, key.value)) in lines:
                raise _marked(key, f"key {key.value!r} is there already, in line {lines[name]}; write it once")
            lines[name] = key.start_mark.line + 1


def _marked(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
