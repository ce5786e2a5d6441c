"""Recovery of state and gradients: a new trainer receives what the ranks of the last generation hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.plan.boxes import Box
from dilatant.resilience.partial_step.decide_reuse import decide_reuse
from dilatant.resilience.partial_step.handover import PartialGradients, read_exported_gradients
from dilatant.resilience.state_transfer import transfer
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.step.partial_step import AccumulationReport, ReusePlan
from dilatant.training.checkpoints.checkpoint import BoxPiece, list_checkpoints, pieces_of
from dilatant.training.trainer import Trainer


def inherit_state(trainer: Trainer, old: Trainer | None, checkpoints: Path) -> int:
    """Transfer the last generation's state to the ranks that hold it in this one. With it goes the evaluation and the
    checkpoint that it still owes; returns the bytes received. Raises StateLost on all ranks."""
    newest = list_checkpoints(checkpoints)[:1] if trainer.rank == 0 else []
    own = None if old is None else [old.state.values(), sorted(old.state.names_with_moments())]
    gathered = all_gather_object(trainer.comm, [own, newest[0].step if newest else 0, trainer.state.stays])
    states = [each for each, *_ in gathered if each is not None]
    stays = all(each for *_, each in gathered)
    copied = 0
    if not stays:
        moments = {name for _, names in states for name in names}
        held = [] if old is None else list(pieces_of(old.state.tensors(), old.state.shapes))
        wanted = trainer.state.allocate(moments)
        copied = transfer(trainer.comm, held, list(pieces_of(wanted, trainer.state.shapes)))
    trainer.state.go_on_from(states[0][0], stays)
    trainer.saving.continue_from(gathered[0][1], newest[0].path if newest else None)
    counted = {values["best"]["counted"] for values, _ in states}
    trainer.owes_evaluation = trainer.evaluator.is_due and counted != {trainer.step}
    trainer.owes_save = trainer.is_save_overdue
    return copied


def adopt_gradients(trainer: Trainer, old: Trainer | None, base: int, handed: Path) -> tuple[tuple[int, int], int]:
    """Adopt the gradients of the unfinished step. Returns the numbers of its reused and missing (layer, sample) pairs,
    (0, 0) if nothing is reused, and the number of departed ranks of generation `base` whose exports in the folder
    `handed` are reused."""
    comm, step = trainer.comm, trainer.step
    exports = read_exported_gradients(handed, base, step, comm.rank, comm.size)
    reuse = adopt_partial_step(comm, step, None if old is None else old.runtime, trainer.runtime, exports)
    if reuse is None:
        return (0, 0), 0
    departed = {move.source for move in reuse.moves if move.source >= comm.size}
    return reuse.pairs(trainer.runtime.unfinished.weights), len(departed)


def adopt_partial_step(
    comm: Comm, step: int, old: Runtime | None, new: Runtime, exports: Sequence[PartialGradients] = ()
) -> ReusePlan | None:
    """Let `new` adopt the gradients of step `step` that ranks have; called by all ranks of `comm`. Returns the reused
    part, or None.

    old: the last generation's runtime, which no longer communicates; None for a new rank, or if its gradients must not
    be used. exports: those that this rank has read; it acts for their departed ranks.
    """
    own = None if old is None else old.unfinished.report()
    texts = [None if own is None else own.to_json(), *(each.report.to_json() for each in exports)]
    gathered = all_gather_object(comm, texts)
    reports = [None if first is None else AccumulationReport.from_json(first) for first, *_ in gathered]
    gone = [(rank, AccumulationReport.from_json(text)) for rank, (_, *more) in enumerate(gathered) for text in more]
    reuse = decide_reuse(reports, step, new.plan, new.unfinished.weights, gone)
    if reuse is None:
        return None
    reader_of = [*range(comm.size), *(rank for rank, _ in gone)]
    local = {comm.rank: {} if old is None else old.unfinished.gradients}
    of_gone = (source for source in range(comm.size, len(reader_of)) if reader_of[source] == comm.rank)
    local |= {source: each.gradients for source, each in zip(of_gone, exports, strict=True)}
    new.unfinished.adopt(reuse, _moved(comm, reuse, local, reader_of, new))
    return reuse


def _moved(
    comm: Comm, reuse: ReusePlan, local: Mapping[int, Mapping[str, Tensor]], reader_of: Sequence[int], new: Runtime
) -> dict[str, Tensor]:
    """Return this rank's initial gradients of the next step: its own plus received ones. local: source of a move →
    gradients held here; reader_of: source → the rank that holds its gradients."""
    parts: dict[str, list[Tensor]] = {}
    held, wanted = [], []
    for move in reuse.moves:
        reader = reader_of[move.source]
        if reader == move.target == comm.rank:
            parts.setdefault(move.name, []).append(local[move.source][move.name])
            continue
        name = f"{move.name}|{move.source}"
        if reader == comm.rank:
            gradient = local[move.source][move.name]
            held.append(BoxPiece(Box.of(name, gradient.shape), gradient))
        elif move.target == comm.rank:
            weight = new.parameters[move.name]
            arriving = torch.empty_like(weight, dtype=new.unfinished.dtype_of_sums or weight.grad_dtype or weight.dtype)
            parts.setdefault(move.name, []).append(arriving)
            wanted.append(BoxPiece(Box.of(name, arriving.shape), arriving))
    if any(reader_of[move.source] != move.target for move in reuse.moves):
        transfer(comm, held, wanted)
    return {name: torch.stack(each).sum(0) if len(each) > 1 else each[0] for name, each in parts.items()}
