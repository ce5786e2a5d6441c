"""Small models, cost models and clusters for the tests of the search."""

from __future__ import annotations

from dilatant.config.degrees import Degrees
from dilatant.cost.layer import LayerCost
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic
from dilatant.plan import Cluster, Link
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec


def unit(name, layers, feeds=(), trainable=True, parameters=1000, kind=None):
    """A unit of equal layers of type `kind` (its name by default)."""
    specs = tuple(LayerSpec(f"{name}.{k}", kind or name, parameters, trainable) for k in range(layers))
    return UnitSpec(name, specs, feeds)


def cost_model(per_token, degrees=((1, 1), (2, 1)), overhead=0.1, activation=10.0, output=2.0, square=0.0, call=0.0):
    """`per_token[kind]` seconds of forward per token on one device; backward halves cost as much each."""

    def layer(seconds, tp, cp):
        share = (1 + overhead * (tp * cp - 1)) / (tp * cp)
        one = Quadratic(square * share, seconds * share, call)
        return LayerCost(
            forward=one,
            input_gradient=one,
            weight_gradient=one,
            first_trainable=one,
            activation_bytes=Quadratic(0.0, activation / (tp * cp), 0.0),
            output_bytes=Quadratic(0.0, output, 0.0),
        )

    return CostModel(
        hardware="test",
        origin="synthetic",
        dtype="bfloat16",
        layers={
            kind: {Degrees(tp, cp): layer(seconds, tp, cp) for tp, cp in degrees} for kind, seconds in per_token.items()
        },
    )


def cluster(nodes, gpus_per_node, capacity=float("inf")):
    return Cluster(nodes, gpus_per_node, capacity, Link(1e9, 1e-6), Link(1e8, 1e-5))


def model(*units):
    return ModelSpec(tuple(units))


def vlm_of(parameters):
    """Vision that feeds language, all trainable, of layers with these parameters: unit → of each."""
    return model(
        *(
            UnitSpec(
                name,
                tuple(LayerSpec(f"{name}.{k}", name, count, True) for k, count in enumerate(own)),
                ("language",) if name == "vision" else (),
            )
            for name, own in parameters.items()
        )
    )
