"""Every disaggregated layout of a few modules, timed and sized by the written rules."""

from __future__ import annotations

import itertools
import math


def layouts(module, num_gpus):
    """(replicas, tp, pp) of one module."""
    for tp in module.seconds:
        for pp in range(1, module.layers + 1):
            for replicas in range(1, num_gpus // (tp * pp) + 1):
                yield replicas, tp, pp


def fits(module, layout, behind, language_replicas, samples, microbatches, capacity):
    """Does the first stage fit, with `behind` stages after the module on the longest path?"""
    replicas, tp, pp = layout
    share = math.ceil(module.layers / pp) / module.layers
    held = min(pp + behind, microbatches) * samples * (language_replicas / replicas) * module.activation_bytes
    return (module.state_bytes + module.optimizer_bytes / replicas + held) * share / tp <= capacity


def best_orchestration(encoders, language_model, generators, num_gpus, global_batch, samples, capacity):
    """The least step time over all layouts, infinite if none fits."""
    best = math.inf
    modules = [*encoders, language_model, *generators]
    for chosen in itertools.product(*(list(layouts(module, num_gpus)) for module in modules)):
        if sum(replicas * tp * pp for replicas, tp, pp in chosen) > num_gpus:
            continue
        replicas, _, language_stages = chosen[len(encoders)]
        if any(global_batch // samples % own for own, _, _ in chosen):
            continue
        microbatches = global_batch // (samples * replicas)
        generator_stages = max((pp for _, _, pp in chosen[len(encoders) + 1 :]), default=0)
        behind = [language_stages + generator_stages] * len(encoders) + [generator_stages]
        behind += [0] * len(generators)
        if not all(
            fits(module, layout, stages, replicas, samples, microbatches, capacity)
            for module, layout, stages in zip(modules, chosen, behind)
        ):
            continue
        warm, slowest = 0.0, 0.0
        for module, (own, tp, pp) in zip(modules, chosen):
            whole = module.seconds[tp] * samples * (replicas / own)
            warm += whole
            slowest = max(slowest, whole * math.ceil(module.layers / pp) / module.layers)
        best = min(best, warm + (microbatches - 1) * slowest)
    return best
