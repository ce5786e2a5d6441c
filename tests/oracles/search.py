"""A step under a plan in closed form, and the best of all plans of an encoder and a language model by enumeration."""

from __future__ import annotations

import itertools

TRAINED = 3  # forward, input and weight gradient cost the same in these cases


def layer_seconds(cost, degree, tokens, calls, flags, upstream):
    """Seconds of each layer of one type for one microbatch under the frozen rule."""
    result, before = [], upstream
    for trains in flags:
        halves = (1 if trains else 0) + (1 if before else 0)
        if trains and not before:
            halves = 1  # the leading layer's weight gradient only
        one = cost.layers[degree].forward
        result.append((1 + halves) * (one.b * tokens + one.c * calls))
        before = before or trains
    return result


def cuts(layers, stages):
    """All tuples of first layers."""
    return [(0, *rest) for rest in itertools.combinations(range(1, layers), stages - 1)]


def stage_sums(seconds, cut):
    return [sum(seconds[a:b]) for a, b in zip(cut, (*cut[1:], len(seconds)))]


def best_step(
    vision, language, degrees, devices, batch, sizes, fits=lambda *stages: True, by_items=False, fits_of=None
):
    """The least `best_on` of these devices or fewer."""
    return min(
        best_on(vision, language, degrees, fewer, batch, sizes, fits, by_items, fits_of)
        for fewer in range(1, devices + 1)
    )


def best_on(vision, language, degrees, devices, batch, sizes, fits, by_items=False, fits_of=None):
    """The least fill + (microbatches - 1) * slowest over all ways to use all devices.

    `vision(degree, samples)` and `language(degree, samples)` list the seconds of layers. Encoders run on devices of
    their own or in the first language stage. `fits` takes what shares devices, as tuples (unit, tp, samples, first
    layer, end layer, microbatches in flight), and says whether these have the memory. by_items: some degree of ranks
    may share the encoder's items, too, instead of its layers: `vision(-degree, samples)`. fits_of: number of replicas →
    `fits`, where they share what stages hold.
    """
    best = float("inf")
    for replicas, samples in itertools.product(range(1, devices + 1), sizes):
        if devices % replicas or batch % (replicas * samples):
            continue
        fits = fits if fits_of is None else fits_of(replicas)
        budget, count = devices // replicas, batch // (replicas * samples)

        def time(stages, count=count):
            return sum(stages) + (count - 1) * max(stages)

        def held(unit, tp, cut, layers, behind, count=count, samples=samples):
            return _held(unit, tp, cut, layers, samples, behind, count)

        for tp in degrees:
            llm = language(tp, samples)
            for pp in range(1, len(llm) + 1):
                rest = budget - tp * pp
                options = [(stage_sums(llm, cut), held("language", tp, cut, len(llm), 0)) for cut in cuts(len(llm), pp)]
                for shared in (tp, -tp) if by_items and tp > 1 else (tp,):
                    if rest:
                        break
                    own = vision(shared, samples)
                    (inside,) = held("vision", shared, (0,), len(own), pp)
                    for stages, memory in options:
                        if fits(inside, memory[0]) and all(map(fits, memory[1:])):
                            best = min(best, time([stages[0] + sum(own), *stages[1:]]))
                options = [stages for stages, memory in options if all(map(fits, memory))]
                for width in (*degrees, *(-tp for tp in degrees if by_items and tp > 1)):
                    encoder = vision(width, samples)
                    depth, left = divmod(rest, abs(width))
                    if left or not 1 <= depth <= len(encoder):
                        continue
                    for ahead in cuts(len(encoder), depth):
                        if all(map(fits, held("vision", width, ahead, len(encoder), pp))):
                            for stages in options:
                                best = min(best, time([*stage_sums(encoder, ahead), *stages]))
    return best


def best_with_own_replicas(vision, language, degrees, devices, batch, sizes, fits=lambda *stages: True):
    """The least of all plans whose encoder has fewer replicas than the language model, or more of which each microbatch
    of the language model's is shared, on these devices or fewer; arguments as for `best_on`."""
    best = float("inf")
    for replicas, size in itertools.product(range(1, devices + 1), sizes):
        count, rest = divmod(batch, replicas * size)
        if rest:
            continue
        for encoders in range(1, devices + 1):
            if replicas % encoders and (encoders % replicas or size % (encoders // replicas)):
                continue
            samples = size * replicas // encoders
            for tp, width in itertools.product([one for one in degrees if one > 0], degrees):
                llm, encoder = language(tp, size), vision(width, samples)
                for pp, depth in itertools.product(range(1, len(llm) + 1), range(1, len(encoder) + 1)):
                    if replicas * pp * tp + encoders * depth * abs(width) > devices:
                        continue
                    for own, ahead in itertools.product(cuts(len(llm), pp), cuts(len(encoder), depth)):
                        both = [
                            *_held("language", tp, own, len(llm), size, 0, count),
                            *_held("vision", width, ahead, len(encoder), samples, pp, count),
                        ]
                        if all(map(fits, both)):
                            stages = [*stage_sums(encoder, ahead), *stage_sums(llm, own)]
                            best = min(best, sum(stages) + (count - 1) * max(stages))
    return best


def _held(unit, tp, cut, layers, samples, behind, count):
    """By stage, what `fits` takes."""
    depth, ends = len(cut) + behind, (*cut[1:], layers)
    return [(unit, tp, samples, a, b, min(depth - s, count)) for s, (a, b) in enumerate(zip(cut, ends))]
