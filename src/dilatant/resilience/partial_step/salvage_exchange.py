"""Gradient exchange after a failure: ranks report their gradients of a step, and ranks of the new plan adopt them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.plan.boxes import Box
from dilatant.resilience.partial_step.handover import PartialGradients
from dilatant.resilience.state_transfer import transfer
from dilatant.runtime.partial_step.salvage import AccumulationReport, ReusePlan, decide_reuse
from dilatant.runtime.runtime import Runtime
from dilatant.training.checkpoints.boxes import BoxPiece


def adopt_partial_step(
    comm: Comm, step: int, old: Runtime | None, new: Runtime, left: Sequence[PartialGradients] = ()
) -> ReusePlan | None:
    """Let `new` adopt the gradients of step `step` that ranks have; called by all ranks of `comm`. Returns the reused
    part, or None.

    old: the last generation's runtime, which no longer communicates; None for a new rank, or if its gradients must not
    be used. left: exports that this rank has read; it acts for their departed ranks.
    """
    own = None if old is None else old.finished()
    texts = [None if own is None else own.to_json(), *(each.finished.to_json() for each in left)]
    gathered = all_gather_object(comm, texts)
    having = [None if first is None else AccumulationReport.from_json(first) for first, *_ in gathered]
    gone = [
        (rank, AccumulationReport.from_json(text))
        for rank, (_, *more) in enumerate(gathered)
        for text in more
    ]
    salvage = decide_reuse(having, step, new.plan, new.trained_by_layer, gone)
    if salvage is None:
        return None
    reader_of = [*range(comm.size), *(rank for rank, _ in gone)]
    local = {comm.rank: {} if old is None else old.local_gradients()}
    of_gone = (source for source in range(comm.size, len(reader_of)) if reader_of[source] == comm.rank)
    local |= {source: each.gradients for source, each in zip(of_gone, left, strict=True)}
    new.take_up(salvage, _moved(comm, salvage, local, reader_of, new))
    return salvage


def _moved(
    comm: Comm,
    salvage: ReusePlan,
    local: Mapping[int, Mapping[str, Tensor]],
    reader_of: Sequence[int],
    new: Runtime,
) -> dict[str, Tensor]:
    """Return this rank's initial gradients of the next step: its own plus received ones. local: source of a move →
    gradients held here; reader_of: source → the rank that holds its gradients."""
    parts: dict[str, list[Tensor]] = {}
    held, wanted = [], []
    for move in salvage.moves:
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
            arriving = torch.empty_like(weight, dtype=new.dtype_of_sums or weight.grad_dtype or weight.dtype)
            parts.setdefault(move.name, []).append(arriving)
            wanted.append(BoxPiece(Box.of(name, arriving.shape), arriving))
    if any(reader_of[move.source] != move.target for move in salvage.moves):
        transfer(comm, held, wanted)
    return {name: torch.stack(each).sum(0) if len(each) > 1 else each[0] for name, each in parts.items()}
