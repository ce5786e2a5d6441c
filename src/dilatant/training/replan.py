"""Going on under another plan: the next generation's runtime, with the state that ranks hold now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.plan import Plan
from dilatant.runtime.holders import holders_of
from dilatant.runtime.runtime import Runtime
from dilatant.training.optimizer import allocate_moments, optimizer_tensors
from dilatant.training.transfer import State, move_state


def held_state(runtime: Runtime, optimizer: torch.optim.Optimizer) -> State:
    """What this rank holds of a training run: weights and moments by logical name, not copied."""
    state: State = {"weight": {name: p.detach() for name, p in runtime.parameters.items()}}
    for name, moments in optimizer_tensors(optimizer).items():
        for kind, tensor in moments.items():
            state.setdefault(kind, {})[name] = tensor
    return state


def rebuild(
    model: MultimodalModel,
    plan: Plan,
    comm: Comm,
    have: Mapping[str, Mapping[str, Tensor]],
    **options: Any,
) -> tuple[Runtime, State]:
    """The runtime of `plan`, with weights from whoever holds them; called by all ranks of the new generation.

    model: fresh, on the meta device. have: what this rank holds (`held_state`), empty for a rank that joins. Close
    the old runtime and its communication before. options: of Runtime. Returns also the state that now belongs here,
    for `restore_moments`.
    """
    need = [name for name, ranks in holders_of(plan, model.units).items() if comm.rank in ranks]
    state = move_state(comm, have, need)
    return Runtime(model, plan, comm, weights=state.get("weight", {}), **options), state


def restore_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Give a new optimizer the moments in `state`, as `rebuild` returned it."""
    moments = {kind: tensors for kind, tensors in state.items() if kind != "weight"}
    allocate_moments(optimizer, {name for tensors in moments.values() for name in tensors})
    for name, own in optimizer_tensors(optimizer).items():
        for kind, tensor in own.items():
            tensor.copy_(moments[kind][name])
