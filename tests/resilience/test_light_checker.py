"""The checker of histories finds each of the faults that it is there for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from harness.faults.light.arithmetic import LAYERS, digest, gradient, initial, samples_of, undisturbed, update
from harness.faults.light.checker import check

Histories = dict[str, list[dict[str, Any]]]


def record(what: str, base: int, step: int, layers: dict[int, int], **more: Any) -> dict[str, Any]:
    named = {str(layer): value for layer, value in layers.items()}
    return {"what": what, "base": base, "step": step, "layers": named, "fds": 9, "threads": 5, **more}


def good() -> Histories:
    """Two nodes do four steps; the second is lost, and the first goes on for two."""
    foretold = undisturbed(6)
    first = [record("activated", 1, 0, foretold[0], where="members")]
    first += [record("applied", 1, step, foretold[step]) for step in (1, 2, 3, 4)]
    second = copy.deepcopy(first[:-1])
    first += [record("activated", 2, 4, foretold[4], where="members")]
    first += [record("applied", 2, step, foretold[step]) for step in (5, 6)]
    return {"node0": first, "node1": second}


def twice(histories: Histories) -> None:
    histories["node0"].insert(3, copy.deepcopy(histories["node0"][2]))


def left_out(histories: Histories) -> None:
    del histories["node0"][2]


def unlike_copies(histories: Histories) -> None:
    histories["node1"][2]["layers"]["0"] += 1


def forgotten(histories: Histories) -> None:
    foretold = undisturbed(3)
    later = [record("activated", 2, 3, foretold[3], where="members")]
    histories["node0"] = histories["node0"][:5] + later


def incomplete(histories: Histories) -> None:
    for each in histories["node0"]:
        del each["layers"]["1"]


def never_activated(histories: Histories) -> None:
    histories["node0"][-1]["base"] = 3


def unlike_beginnings(histories: Histories) -> None:
    histories["node1"].append(record("activated", 2, 3, undisturbed(3)[3], where="members"))


def leaking(histories: Histories) -> None:
    foretold = undisturbed(6)
    for base in range(3, 12):
        histories["node0"].append(record("activated", base, 6, foretold[6], where="members"))
        histories["node0"][-1]["fds"] = 9 + 3 * base


FAULTS = [twice, left_out, unlike_copies, forgotten, incomplete, never_activated, unlike_beginnings, leaking]


@pytest.mark.parametrize("spoil", FAULTS)
def test_what_must_not_happen_is_found(spoil: Callable[[Histories], None]) -> None:
    assert check(good()) == 6
    histories = good()
    spoil(histories)
    with pytest.raises(AssertionError):
        check(histories)


@pytest.mark.parametrize("wrong", ["twice", "samples"])
def test_a_wrong_step_shows_in_every_later_state(wrong: str) -> None:
    state, foretold = initial(), undisturbed(4)
    for step in range(3):
        samples = [*samples_of(step)]
        if wrong == "samples" and step == 1:
            samples[-1] = samples[0]
        gradients = {layer: gradient(layer, samples) for layer in state}
        for _ in range(1 + (wrong == "twice" and step == 1)):
            update(state, gradients)
        same = [digest(state[layer]) == foretold[step + 1][layer] for layer in range(LAYERS)]
        assert any(same) == (step == 0)
