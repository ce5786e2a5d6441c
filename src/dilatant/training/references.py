"""Log-probabilities of the answers of pairs: by the present weights, and by those that the run starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from dilatant.comm.gather import all_gather_object
from dilatant.config.errors import UserError
from dilatant.config.files.durable import write_durably
from dilatant.data.sample import EncodedSample, digest_of
from dilatant.data.text.encoding import NO_LOSS
from dilatant.planning.assemble import Samples
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.step.step_planner import PreparedStep
from dilatant.training.evaluation.greedy_answers import gather_by_sample
from dilatant.training.feeding.feed import StepInput
from dilatant.training.feeding.inputs import HELD_OUT, TRAIN, RankInputs

FILE = "references.json"

Table = NDArray[np.float64]
"""Log-probabilities of the chosen and the rejected answer of each sample: [samples, 2]; NaN where unknown."""


def score_pairs(runtime: Runtime, step: StepInput[PreparedStep]) -> dict[int, tuple[list[float], list[int]]]:
    """Return, by sample number, the log-probabilities of the chosen and the rejected answer, and their numbers of
    tokens, on all ranks; called by all ranks together. step: with `forwards`."""
    samples, own = step.batch.samples, {}
    for number, predicted in runtime.predict(samples, step.step).items():
        sample, losses = samples[number], np.array(predicted.losses, np.float64)
        assert sample.branch is not None
        is_second = 1 + np.flatnonzero(sample.labels[1:] != NO_LOSS) >= sample.branch[1]
        both = losses[~is_second], losses[is_second]
        own[number] = [-float(each.sum()) for each in both], [len(each) for each in both]
    return gather_by_sample(runtime, own)


def complete_samples(runtime: Runtime, step: StepInput[PreparedStep]) -> Sequence[EncodedSample]:
    """Return the samples of a step with what the loss needs to know of all of them, if anything, by forwards with the
    present weights; called by all ranks together."""
    samples, loss = step.batch.samples, runtime.model.language.pair_loss
    if loss is None or not loss.scores_first:
        return samples
    runtime.train(False)
    try:
        scores = score_pairs(runtime, replace(step, step=runtime.forwards_of(samples, step.step)))
    finally:
        runtime.train()
    sums = torch.tensor([scores[number][0] for number in range(len(samples))], dtype=torch.float64)
    return loss.complete(samples, sums)


class _Stored(Struct):
    """A `Table` as bytes, and a digest of the tokens of its samples."""

    samples: str
    table: bytes


class References:
    """The references of a run's pairs. samples: with their sizes. file: written by rank 0, and read by every rank that
    continues the run."""

    def __init__(self, samples: Samples, inputs: RankInputs, file: Path) -> None:
        sized = {TRAIN: samples.train_sizes, HELD_OUT: samples.held_out_sizes}
        self._content = {name: sizes.content for name, sizes in sized.items() if sizes is not None}
        self._digests = {name: digest_of(content.tobytes()) for name, content in self._content.items()}
        self._inputs = inputs
        self._file = file

    def read(self) -> None:
        """Use what the run computed when it began. Raises UserError."""
        tables = self._stored()
        if tables.keys() != self._content.keys():
            raise UserError(f"{str(self._file)!r} lacks log-probabilities of pairs; begin the run anew")
        self._inputs.use_references(tables)

    def compute(
        self,
        runtime: Runtime,
        needed: Mapping[str, NDArray[np.int64]],
        batch_size: int,
        keeps: bool,
        progress: Callable[[str], None],
    ) -> None:
        """Compute what is unknown with the present weights, and write it; called by all ranks together.

        needed: data set → the samples that the run uses. keeps: the file is this run's. Raises UserError.
        """
        known = self._stored() if keeps else {}
        seen = {name: digest_of(table.tobytes()) for name, table in known.items()}
        everywhere = all_gather_object(runtime.comm, seen)
        tables = {
            name: known[name] if name in seen and all(each.get(name) == seen[name] for each in everywhere)
            else np.full((len(content), 2), np.nan)
            for name, content in self._content.items()
        }  # fmt: skip
        runtime.train(False)
        try:
            for name, table in tables.items():
                missing = needed[name][np.isnan(table[needed[name]]).any(axis=1)]
                missing = self._inputs.usable(name, missing)
                for step in self._inputs.forwards(name, missing, batch_size):
                    scores = score_pairs(runtime, step)
                    for number, sample in enumerate(step.batch.samples):
                        table[missing[sample.draw]] = scores[number][0]
                    done = 1 + max(sample.draw for sample in step.batch.samples)
                    progress(f"log-probabilities by the start model: {done:,} of {len(missing):,} pairs")
        finally:
            runtime.train()
        self._inputs.use_references(tables)
        if runtime.comm.rank == 0:
            stored = {
                name: _Stored(self._digests[name], table.astype("<f8").tobytes()) for name, table in tables.items()
            }
            try:
                write_durably(self._file, msgspec.json.encode(stored))
            except OSError as error:
                raise UserError(f"{str(self._file)!r} cannot be written: {error.strerror or error}") from None

    def _stored(self) -> dict[str, Table]:
        """Return the tables of these samples that the file has; none if it is missing or damaged."""
        try:
            found = msgspec.json.decode(self._file.read_bytes(), type=dict[str, _Stored])
            tables = {name: np.frombuffer(each.table, "<f8").reshape(-1, 2) for name, each in found.items()}
        except (OSError, msgspec.MsgspecError, ValueError):
            return {}
        return {
            name: tables[name].copy()
            for name, content in self._content.items()
            if name in found and found[name].samples == self._digests[name] and len(tables[name]) == len(content)
        }
