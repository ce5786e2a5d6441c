"""How far ahead stages may run in the memory there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dilatant.config.errors import list_problems
from dilatant.cost.memory import bytes_text
from dilatant.plan.depth import eager_depths
from dilatant.plan.plan import Plan
from dilatant.plan.stage_costs import StageCosts, polynomial
from dilatant.schedule.families import depths_within


def depths_in_memory(
    plan: Plan,
    costs: StageCosts,
    tokens: Mapping[str, Sequence[int]],
    bytes_per_device: float,
    wanted: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The largest depths by stage, at most `wanted` (eager 1F1B's), whose activations fit and that cannot deadlock.

    `tokens[unit]` are those of the samples of a large microbatch. Where ranks hold several stages the one whose
    microbatches in flight take most gives way first. Raises UserError naming every group of ranks that cannot hold one
    microbatch of each of its stages, and by how much.
    """
    depth = np.array(eager_depths(plan) if wanted is None else wanted, dtype=np.int64)
    placed = plan.stages()
    kept = np.asarray([polynomial(costs.kept_bytes[entry.index], tokens[entry.unit]) for entry in placed])
    always = costs.static_bytes + np.asarray(
        [polynomial(costs.transient_bytes[entry.index], tokens[entry.unit]) for entry in placed]
    )
    on_ranks: dict[tuple[int, ...], list[int]] = {}
    for entry in placed:
        on_ranks.setdefault(entry.stage.ranks, []).append(entry.index)
    problems = []
    for ranks, stages in on_ranks.items():
        free = bytes_per_device - always[stages].sum()
        while (depth[stages] * kept[stages]).sum() > free:
            held = np.where(depth[stages] > 1, depth[stages] * kept[stages], 0.0)
            if not held.any():
                lacking = bytes_text(kept[stages].sum() - free)
                names = ", ".join(f"{placed[s].unit} stage {placed[s].position}" for s in stages)
                problems.append(f"ranks {list(ranks)} ({names}) lack {lacking} for one microbatch in flight")
                break
            depth[stages[int(np.argmax(held))]] -= 1
    if problems:
        raise list_problems("no depth fits into memory:", problems)
    return depths_within(depth.tolist(), depth.tolist(), plan)
