"""Every term of a stage's memory, added up by hand: each quantity has a power of two of its own, so none can be
missing, doubled or another's."""

from __future__ import annotations

import pytest

from dilatant.config.degrees import ONE
from dilatant.cost.layer import LayerCost
from dilatant.cost.memory import ParameterBytes, Zero
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic
from dilatant.plan.costs.stage_costs import StageCosts, stage_costs
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan


def _cost(number: int) -> LayerCost:
    """Bytes a token of layer type `number`: activations, weights' part of them, outputs, common parts, checkpoints and
    working memory."""
    bits = [Quadratic(b=float(1 << (6 * number + bit))) for bit in range(6)]
    activation, weight, output, common, checkpoint, working = bits
    return LayerCost(
        *[Quadratic()] * 4,
        activation_bytes=activation,
        weight_bytes=weight,
        output_bytes=output,
        common_bytes=common,
        checkpoint_bytes=checkpoint,
        working_bytes=working,
    )


COSTS = CostModel("any", "synthetic", "float32", {str(n): {ONE: _cost(n)} for n in range(4)})


def _of(layer: int, bit: int) -> float:
    return float(1 << (6 * layer + bit))


ACTIVATION, WEIGHT, OUTPUT, COMMON, CHECKPOINT, WORKING = range(6)
PARAMETERS, LARGEST = (1 << 4, 1 << 9, 1 << 14, 1 << 19), (1 << 3, 1 << 8, 1 << 13, 1 << 18)


def _stages(
    trains: tuple[bool, ...], replicas: int = 1, zero: Zero = "none", again: tuple[str, ...] = ()
) -> StageCosts:
    """Two stages of two layers, in so many replicas, of fp32 AdamW."""
    layers = tuple(LayerSpec(f"l{n}", str(n), PARAMETERS[n], trains[n], largest=LARGEST[n]) for n in range(4))
    plan = Plan(
        (
            UnitPlan(
                "u",
                tuple(Replica((Stage(0, 2, (2 * r,)), Stage(2, 4, (2 * r + 1,)))) for r in range(replicas)),
                recompute=again,  # type: ignore[arg-type]
            ),
        )
    )
    rules = ParameterBytes(weight=4.0, gradient=4.0, optimizer=8.0, zero=zero, host_link=1e30)
    return stage_costs(plan, ModelSpec((UnitSpec("u", layers),)), COSTS, rules)


def test_what_is_kept_is_activations_once_and_what_was_sent() -> None:
    found = _stages((True,) * 4)
    for stage, (first, last) in enumerate(((0, 1), (2, 3))):
        # What blocks are handed together is part of each one's activations; the larger of the two stays.
        kept = _of(first, ACTIVATION) + _of(last, ACTIVATION) - _of(first, COMMON) + _of(last, OUTPUT)
        assert found.kept_bytes[stage].tolist() == [0.0, kept, 0.0]
        assert found.output_bytes[stage].tolist() == [0.0, _of(last, OUTPUT), 0.0]
        assert found.weight_bytes[stage].tolist() == [0.0, _of(first, WEIGHT) + _of(last, WEIGHT), 0.0]
        # While the first layer's backward runs, the last one's activations are gone.
        held = max(_of(last, WORKING), _of(first, WORKING) - _of(last, ACTIVATION))
        assert found.transient_bytes[stage].tolist() == [0.0, held, 0.0]


def test_a_stage_without_backward_keeps_no_activation_memory() -> None:
    found = _stages((False, False, True, True))
    assert found.kept_bytes[0].tolist() == [0.0, 0.0, 0.0]
    held = max(_of(1, ACTIVATION), _of(0, ACTIVATION))
    assert found.forward_bytes[0].tolist() == [0.0, held, 0.0]
    assert found.transient_bytes[0].tolist() == [0.0, 0.0, 0.0]
    kept = _of(2, ACTIVATION) + _of(3, ACTIVATION) - _of(2, COMMON) + _of(3, OUTPUT)
    assert found.kept_bytes[1].tolist() == [0.0, kept, 0.0]
    frozen = _stages((True, False, False, False))  # but frozen ones behind what trains do
    kept = _of(2, ACTIVATION) + _of(3, ACTIVATION) - _of(2, COMMON) + _of(3, OUTPUT)
    assert frozen.kept_bytes[1].tolist() == [0.0, kept, 0.0]
    assert frozen.weight_bytes[1].tolist() == [0.0, 0.0, 0.0]


def test_what_is_recomputed_is_held_while_it_runs() -> None:
    found = _stages((True,) * 4, again=("none", "block", "none", "none"))
    kept = _of(0, ACTIVATION) + _of(1, CHECKPOINT) + _of(1, COMMON) - _of(0, COMMON) + _of(1, OUTPUT)
    assert found.kept_bytes[0].tolist() == [0.0, kept, 0.0]
    assert found.transient_bytes[0].tolist() == [0.0, _of(1, WORKING) + _of(1, ACTIVATION), 0.0]


def test_inputs_in_host_memory_are_here_only_while_they_are_used() -> None:
    found = _stages((True,) * 4, again=("none", "none", "block_offload", "block_offload"))
    # The rows that a stage received stay on the device, and its output.
    assert found.kept_bytes[1].tolist() == [0.0, _of(3, COMMON) + _of(1, OUTPUT) + _of(3, OUTPUT), 0.0]
    running = _of(3, WORKING) + _of(3, ACTIVATION) + 2 * _of(3, CHECKPOINT)
    assert found.transient_bytes[1].tolist() == [0.0, running, 0.0]


@pytest.mark.parametrize(
    ("replicas", "zero", "copies", "state"),
    [(1, "none", 0, 8.0), (1, "all", 0, 8.0), (2, "none", 1, 8.0), (2, "all", 2, 4.0), (4, "all", 2, 2.0)],
)
def test_state_gradients_and_the_copies_in_which_they_are_summed(
    replicas: int, zero: Zero, copies: int, state: float
) -> None:
    found = _stages((True, True, True, False), replicas, zero)
    for stage, trained, frozen, largest in (
        (0, PARAMETERS[0] + PARAMETERS[1], 0, LARGEST[1]),
        (1, PARAMETERS[2], PARAMETERS[3], LARGEST[2]),
    ):
        assert found.static_bytes[stage] == 4 * (trained + frozen) + (4 + state) * trained
        assert found.gradient_bytes[stage] == 4 * trained
        # One flat copy of the largest gradient; where holders share state, another in the order of their shares.
        assert found.sum_bytes[stage] == 4 * copies * largest
