"""The fewest bytes that any placement of the survivors moves: every composition, every permutation."""

from __future__ import annotations

import itertools

from oracles.compose import multisets, slowest


def held_layers(stages, nodes):
    """The set of layers on each node of a template, counting GPUs."""
    per_node = sum(gpus for _, _, gpus in stages) // nodes
    layers = [set() for _ in range(nodes)]
    used = 0
    for first, end, gpus in stages:
        layers[used // per_node] |= set(range(first, end))
        used += gpus
    return layers


def fewest_bytes(templates, held, fewest, microbatches, layer_bytes, limit):
    """`held` are the survivors' sets of layers; `limit` the seconds that a composition may take."""

    def finish(size, count):
        template = templates[size]
        return template.seconds + (count - template.num_microbatches) * template.bottleneck

    best = None
    for sizes in multisets(sorted(templates), len(held)):
        if not fewest <= len(sizes) <= microbatches or slowest(sizes, microbatches, finish) > limit:
            continue
        slots = [layers for size in sizes for layers in held_layers(templates[size].stages, size)]
        for order in itertools.permutations(held):
            moved = sum(layer_bytes[layer] for have, want in zip(order, slots) for layer in want - have)
            best = moved if best is None else min(best, moved)
    return best
