"""Plan values, and the planners that choose among plans.

Importing this package compiles nothing and loads no torch; planners load numba when they are first called.
"""

from dilatant.plan.cluster import Cluster as Cluster
from dilatant.plan.cluster import Link as Link
from dilatant.plan.costs.partition import partition_layers as partition_layers
from dilatant.plan.costs.partition import partition_layers_in_memory as partition_layers_in_memory
from dilatant.plan.costs.score import PlanScore as PlanScore
from dilatant.plan.costs.stable_batch import feasible_allocations as feasible_allocations
from dilatant.plan.costs.stable_batch import minimum_stable_batch as minimum_stable_batch
from dilatant.plan.costs.stable_batch import sample_work as sample_work
from dilatant.plan.costs.stage_costs import StageCosts as StageCosts
from dilatant.plan.costs.stage_costs import stage_costs as stage_costs
from dilatant.plan.costs.workload import Workload as Workload
from dilatant.plan.errors import BatchError as BatchError
from dilatant.plan.errors import DoesNotFitError as DoesNotFitError
from dilatant.plan.errors import PlanError as PlanError
from dilatant.plan.errors import TooFewDevicesError as TooFewDevicesError
from dilatant.plan.layouts.space import SearchProblem as SearchProblem
from dilatant.plan.layouts.space import SearchSettings as SearchSettings
from dilatant.plan.model_spec import EncoderPosition as EncoderPosition
from dilatant.plan.model_spec import LayerSpec as LayerSpec
from dilatant.plan.model_spec import ModelSpec as ModelSpec
from dilatant.plan.model_spec import UnitSpec as UnitSpec
from dilatant.plan.plan import Plan as Plan
from dilatant.plan.plan import Replica as Replica
from dilatant.plan.plan import Stage as Stage
from dilatant.plan.plan import UnitPlan as UnitPlan
from dilatant.plan.search.finals import RankedPlan as RankedPlan
from dilatant.plan.search.search_result import SearchResult as SearchResult
from dilatant.plan.templates.reinstantiate import reinstantiate as reinstantiate
from dilatant.plan.templates.templates import LayerMemory as LayerMemory
from dilatant.plan.templates.templates import Template as Template
from dilatant.plan.templates.templates import compose_pipelines as compose_pipelines
from dilatant.plan.templates.templates import plan_templates as plan_templates
from dilatant.plan.templates.templates import share_microbatches as share_microbatches
from dilatant.plan.validate import InvalidPlanError as InvalidPlanError
from dilatant.plan.validate import plan_problems as plan_problems
