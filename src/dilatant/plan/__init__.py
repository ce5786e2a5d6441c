"""Plan values, and the planners that choose among plans.

Importing this package compiles nothing and loads no torch; planners load numba when they are first called.
"""

from dilatant.plan.cluster import Cluster, Link, cluster_of
from dilatant.plan.costs.depth import eager_depths, half_eager_depths, path_depths
from dilatant.plan.costs.partition import partition_layers, partition_layers_in_memory
from dilatant.plan.costs.sample_work import sample_work
from dilatant.plan.costs.score import PlanScore, PlanScorer
from dilatant.plan.costs.stable_batch import StableBatch, feasible_allocations, minimum_stable_batch
from dilatant.plan.costs.stage_costs import LayerTable, StageCosts, layer_table, stage_costs
from dilatant.plan.costs.sync_time import sync_seconds
from dilatant.plan.costs.workload import Workload
from dilatant.plan.errors import BatchError, DoesNotFitError, PlanError, TooFewDevicesError
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.modes import EncoderPosition, Mode
from dilatant.plan.orchestration.orchestrate import ModuleAllocation, ModuleCost, Orchestration, orchestrate
from dilatant.plan.plan import ParallelSpec, PlacedStage, Plan, Replica, Stage, UnitPlan
from dilatant.plan.search.finals import RankedPlan
from dilatant.plan.search.search_result import SearchResult
from dilatant.plan.templates.compose import Composition, compose_pipelines, share_microbatches
from dilatant.plan.templates.reinstantiate import (
    LayerCopy,
    NodePipeline,
    Origin,
    Reinstantiation,
    reinstantiate,
)
from dilatant.plan.templates.templates import LayerMemory, Template, plan_templates, seconds_by_layer_type
from dilatant.plan.validate import InvalidPlanError, plan_problems

__all__ = [
    "BatchError",
    "Cluster",
    "Composition",
    "DoesNotFitError",
    "EncoderPosition",
    "InvalidPlanError",
    "LayerCopy",
    "LayerMemory",
    "LayerSpec",
    "LayerTable",
    "Link",
    "Mode",
    "ModelSpec",
    "ModuleAllocation",
    "ModuleCost",
    "NodePipeline",
    "Orchestration",
    "Origin",
    "ParallelSpec",
    "PlacedStage",
    "Plan",
    "PlanError",
    "PlanScore",
    "PlanScorer",
    "RankedPlan",
    "Reinstantiation",
    "Replica",
    "SearchResult",
    "StableBatch",
    "Stage",
    "StageCosts",
    "Template",
    "TooFewDevicesError",
    "UnitPlan",
    "UnitSpec",
    "Workload",
    "cluster_of",
    "compose_pipelines",
    "eager_depths",
    "feasible_allocations",
    "half_eager_depths",
    "layer_table",
    "minimum_stable_batch",
    "orchestrate",
    "partition_layers",
    "partition_layers_in_memory",
    "path_depths",
    "plan_problems",
    "plan_templates",
    "reinstantiate",
    "sample_work",
    "seconds_by_layer_type",
    "share_microbatches",
    "stage_costs",
    "sync_seconds",
]
