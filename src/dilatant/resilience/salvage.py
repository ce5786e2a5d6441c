"""Salvage over processes: ranks tell what they have finished of a step, and bring its gradients to who needs them."""

from __future__ import annotations

import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.plan.boxes import Box
from dilatant.resilience.transfer import transfer
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.salvage import Finished, Salvage, decide
from dilatant.training.checkpoint_boxes import Piece


def salvage_step(comm: Comm, step: int, old: Runtime | None, new: Runtime) -> Salvage | None:
    """Let `new` go on with what ranks have of step number `step`; called by all ranks of `comm`. Returns what that is,
    None for nothing.

    old: of the generation before, which communicates no more; None of a rank that was not there, or whose gradients
    are not to be used.
    """
    own = None if old is None else old.finished()
    told = all_gather_object(comm, None if own is None else own.to_json())
    having = [None if text is None else Finished.from_json(text) for text in told]
    salvage = decide(having, step, new.plan, new.trained_by_layer)
    if salvage is None:
        return None
    new.take_up(salvage, _moved(comm, salvage, {} if old is None else dict(old.local_gradients()), new))
    return salvage


def _moved(comm: Comm, salvage: Salvage, local: dict[str, Tensor], new: Runtime) -> dict[str, Tensor]:
    """This rank's gradients of the step to come: its own, and what others hand over, added up."""
    parts: dict[str, list[Tensor]] = {}
    held, wanted = [], []
    for move in salvage.moves:
        if move.source == move.target == comm.rank:
            parts.setdefault(move.name, []).append(local[move.name])
            continue
        name = f"{move.name}|{move.source}"
        if move.source == comm.rank:
            held.append(Piece(Box.of(name, local[move.name].shape), local[move.name]))
        elif move.target == comm.rank:
            weight = new.parameters[move.name]
            arriving = torch.empty_like(weight, dtype=new.dtype_of_sums or weight.grad_dtype or weight.dtype)
            parts.setdefault(move.name, []).append(arriving)
            wanted.append(Piece(Box.of(name, arriving.shape), arriving))
    if any(move.source != move.target for move in salvage.moves):
        transfer(comm, held, wanted)
    return {name: torch.stack(each).sum(0) if len(each) > 1 else each[0] for name, each in parts.items()}
