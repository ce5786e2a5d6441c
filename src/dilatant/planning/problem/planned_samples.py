"""Samples to plan for: the ones that training takes first, as sizes, without decoding media."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from dilatant.config import Config, UserError
from dilatant.data.index.measure import SampleSubset, measure
from dilatant.data.index.sizes import SizesIndex, blend_sizes, known_sizes
from dilatant.data.order.blend import Blend
from dilatant.data.parallel_map import Progress
from dilatant.plan.costs.workload import Workload, squares_of
from dilatant.planning.assemble import Samples
from dilatant.planning.problem.describe_model import ModelDescription

MEASURED_WHOLE = 200_000
"""Data sets up to this many samples are indexed whole, which training needs anyway; of larger ones without an index, a
part is read."""


@dataclass(frozen=True, slots=True)
class PlannedSamples:
    """Sizes to plan for: `workload` holds whole global batches in the order of training; its first `available` samples
    are different ones. It lacks the factor on rows of several samples, which follows from the costs.

    `targets` is the share of the language model's tokens that carry loss. `left_out` samples cannot be trained on.
    """

    workload: Workload
    targets: float
    available: int
    left_out: int

    def first(self, count: int) -> Workload:
        """Return the first `count` samples."""
        return self.workload.part(0, count)


def planned_samples(
    config: Config, samples: Samples, model: ModelDescription, progress: Progress = lambda done, total: None
) -> PlannedSamples:
    """Return global batches with `debug.planned_samples` samples in all and at least `debug.planned_steps`, but at most
    one pass over the data. Raises UserError for streamed data, and for samples that training would refuse unless
    `data.on_error` is skip."""
    blend, batch = samples.train, config.train.global_batch_size
    if not isinstance(blend, Blend):
        raise UserError("a plan needs the sizes of samples, which a stream does not tell ahead; do not stream to plan")
    order, sizes = _sizes(config, samples, blend, progress)
    taken = set(order.tolist())
    refused = sizes.refused(samples.encoding.max_length)
    bad = [at for at in refused if at in taken]
    if bad and config.data.on_error == "error":
        raise UserError(
            f"{len(bad):,} of the samples cannot be trained on (`dilatant data lint` lists all; 'data.on_error: skip' "
            f"leaves them out); the first: {refused[bad[0]]}"
        )
    order = order[~np.isin(order, bad)]
    if not len(order):
        raise UserError("none of the samples can be trained on; see `dilatant data lint`")
    order = np.resize(order, max(len(order) // batch, 1) * batch)
    tokens = {unit.name: sizes.of(unit.name)[order].astype(np.float64) for unit in model.spec.units}
    language = float(tokens[model.anchor].sum())
    return PlannedSamples(
        workload=Workload(tokens, squares_of(tokens, model.item_tokens, model.media_pairs)),
        targets=float(sizes.target_tokens[order].sum()) / language if language else 1.0,
        available=len(np.unique(order)),
        left_out=len(bad),
    )


def _sizes(config: Config, samples: Samples, blend: Blend, progress: Progress) -> tuple[NDArray[np.int64], SizesIndex]:
    """Return the samples in the order of training, as positions in an index, and that index."""
    batch, wanted = config.train.global_batch_size, config.debug.planned_samples
    steps = min(max(config.debug.planned_steps, -(-wanted // batch)), max(1, len(blend) // batch))
    sampler = blend.sampler(config.seed, batch)
    taken = islice(sampler.batches(sampler.start()), steps)
    order = np.concatenate([np.asarray(indices, dtype=np.int64) for indices, _ in taken])
    cache_dir = config.data.cache_dir
    if len(blend) <= MEASURED_WHOLE:
        return order, blend_sizes(blend, samples.encoding, cache_dir=cache_dir, progress=progress)
    index = known_sizes(blend, samples.encoding, cache_dir=cache_dir)
    if index is not None:
        return order, index
    chosen, positions = np.unique(order, return_inverse=True)
    part = measure(SampleSubset(blend, chosen), samples.encoding, progress=progress)
    tokens, target_tokens, content, _ = part.columns
    names = [blend.name(at) for at in chosen.tolist()]
    index = SizesIndex(samples.encoding.unit_names, tokens.T, target_tokens, content, part.problems, names.__getitem__)
    return positions.astype(np.int64), index
