"""Cost models: layer costs and their fits, the frozen rule, memory, hardware and links, as values."""

from dilatant.cost.analytic import (
    LayerShape,
    analytic_cost,
    analytic_costs,
    block_shape,
    embedding_shape,
    head_shape,
    linear_shape,
)
from dilatant.cost.hardware import Hardware, Link, fit_link, load_hardware, save_hardware
from dilatant.cost.layer import LayerCost, LayerWork, frozen_work, trainable_before
from dilatant.cost.memory import BF16, FP32, ParameterBytes
from dilatant.cost.model import CostModel, load_costs, save_costs
from dilatant.cost.quadratic import Quadratic, fit

__all__ = [
    "BF16",
    "FP32",
    "CostModel",
    "Hardware",
    "LayerCost",
    "LayerShape",
    "LayerWork",
    "Link",
    "ParameterBytes",
    "Quadratic",
    "analytic_cost",
    "analytic_costs",
    "block_shape",
    "embedding_shape",
    "fit",
    "fit_link",
    "frozen_work",
    "head_shape",
    "linear_shape",
    "load_costs",
    "load_hardware",
    "save_costs",
    "save_hardware",
    "trainable_before",
]
