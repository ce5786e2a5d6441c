"""What the histories of all workers must say, whoever was killed: read like those of a database."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from harness.faults.light.arithmetic import LAYERS, undisturbed


def check(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> int:
    """The last step. Raises AssertionError where a step was applied twice, left out, to an older state or with other
    samples; where copies of a layer differ; where work that all had was lost; where a worker was told what cannot be;
    or where somebody gathers descriptors."""
    last = max(record["step"] for history in histories.values() for record in history)
    foretold = undisturbed(last)
    layers_at: dict[tuple[int, int], set[int]] = defaultdict(set)
    for node, history in histories.items():
        base, step = None, 0
        for record in history:
            where = f"{node}: {record}"
            assert record["what"] != "violated", where
            if record["what"] == "applied":
                assert record["base"] == base, f"a state that was never activated: {where}"
                assert record["step"] == step + 1, f"after step {step}: {where}"
            base, step = record["base"], record["step"]
            for layer, digest in record["layers"].items():
                assert digest == foretold[step][int(layer)], f"not the undisturbed run's: {where}"
            layers_at[base, step] |= {int(layer) for layer in record["layers"]}
    for (base, step), layers in layers_at.items():
        if step == last:
            assert len(layers) == LAYERS, f"of generation {base} only layers {layers} came to step {step}"
    _check_order(histories)
    _check_growth(histories)
    return last


def _check_order(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """No generation begins behind a step that was applied by somebody before, unless it goes back to what was saved."""
    activations: dict[int, tuple[int, str]] = {}
    newest: dict[int, int] = defaultdict(int)
    for history in histories.values():
        for record in history:
            base = record["base"]
            newest[base] = max(newest[base], record["step"])
            if record["what"] == "activated":
                known = activations.setdefault(base, (record["step"], record["where"]))
                assert known == (record["step"], record["where"]), f"generation {base} began at unlike steps"
    done = 0
    for base in sorted(activations):
        step, where = activations[base]
        if where == "members":
            assert step >= done, f"generation {base} began at step {step}, and {done} were applied"
            done = max(done, newest[base])
        else:
            done = newest[base]


def _check_growth(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Descriptors and threads of whoever lived through many generations."""
    for node, history in histories.items():
        activated = [record for record in history if record["what"] == "activated"]
        if len(activated) < 6:
            continue
        for what in ("fds", "threads"):
            early = max(record[what] for record in activated[:3])
            late = min(record[what] for record in activated[-3:])
            assert late <= early + 4, f"{node}: {what} grew from {early} to {late} in {len(activated)} generations"
