"""One global batch, forward and backward, in one process; and what any engine that executes batches offers."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dilatant.config import UserError
from dilatant.data.loader import GlobalBatch, Loader
from dilatant.data.sample import PackedRow
from dilatant.models.freeze import check
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.stage import Stage
from dilatant.runtime.precision import Precision
from dilatant.runtime.step_shares import StepShares


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`loss`: sum over the batch's target tokens divided by their number. Gradients are in the parameters.
    stop: whether any rank was asked to stop. shares: where the time of several ranks went."""

    loss: float
    target_tokens: int
    stop: bool
    shares: StepShares = field(default_factory=StepShares)


class Engine(Protocol):
    """What executes global batches: one process, or this rank of a pipeline.

    parameters: logical name → parameter held here. session: the same on all ranks of this start, and on no other.
    """

    rank: int
    size: int
    session: str
    device: torch.device
    parameters: dict[str, nn.Parameter]

    def batches(self, open_loader: Callable[[bool], Loader]) -> AbstractContextManager[Iterator[GlobalBatch]]:
        """The global batches, in one order on all ranks. open_loader: given whether rows must be packed."""
        ...

    def execute(self, batch: GlobalBatch, should_stop: Callable[[], bool]) -> StepOutput:
        """Forward and backward; leaves the batch's gradients in the parameters of every holder."""
        ...

    def clip_gradients(self, limit: float) -> float:
        """Hold the norm of all gradients that `execute` left to `limit`; returns the norm before."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Every weight and persistent buffer held here by logical name, tied ones once; not copies."""
        ...

    def saves(self, name: str) -> bool:
        """Whether it falls to this rank to save the weight called `name`."""
        ...

    def agree(self, wish: bool) -> bool:
        """Whether any rank has the wish; the same answer on all of them."""
        ...

    def train(self) -> None:
        """Training mode."""
        ...

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on: who waits for it raises. Never raises."""
        ...

    def close(self) -> None: ...


class OneProcess:
    """Runs a whole model on one device, row by row; gradients of all rows add up."""

    rank = 0
    size = 1

    def __init__(self, model: MultimodalModel, device: torch.device, precision: Precision) -> None:
        self.device = device
        self.session = secrets.token_hex(8)
        self._model = model.to(device)
        self._precision = precision
        self.parameters: dict[str, nn.Parameter] = {}
        for unit in model.units.values():
            check(unit.named_logical_parameters(), unit.frozen)
            self.parameters |= dict(unit.named_logical_parameters())

    def batches(self, open_loader: Callable[[bool], Loader]) -> AbstractContextManager[Iterator[GlobalBatch]]:
        return open_loader(True)

    def execute(self, batch: GlobalBatch, should_stop: Callable[[], bool]) -> StepOutput:
        """Every row's loss is divided by the target tokens of all rows, so unequal rows need no correction.

        Raises UserError when the loss is not finite, naming the samples of the row.
        """
        targets = batch.target_tokens
        losses = []
        for row in batch.rows:
            attention = self._model.language.attention_of(row.split(row.input_ids))
            with self._precision.autocast(self.device):
                loss = self._model(
                    **model_inputs(row, self.device),
                    **attention,
                    loss_denominator=max(1, targets),
                    return_logits=False,
                ).loss
            loss.backward()
            losses.append(loss.detach())
        values = torch.stack(losses).tolist()
        for row, value in zip(batch.rows, values):
            if not math.isfinite(value):
                raise UserError(
                    f"the loss became {value} in a row with the samples {', '.join(row.sample_ids[:8])}; "
                    "lower the learning rate, or look at these samples"
                )
        return StepOutput(sum(values), targets, should_stop())

    def clip_gradients(self, limit: float) -> float:
        gradients = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
        return torch.nn.utils.clip_grad_norm_(gradients, limit).item()

    def tensors(self) -> dict[str, Tensor]:
        return model_tensors(self._model)

    def saves(self, name: str) -> bool:
        return True

    def agree(self, wish: bool) -> bool:
        return wish

    def train(self) -> None:
        self._model.train()

    def fail(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


def model_tensors(model: MultimodalModel) -> dict[str, Tensor]:
    """Every weight and persistent buffer by logical name, tied ones once; the tensors themselves, not copies."""
    return {name: tensor for unit in model.units.values() for name, tensor in stage_tensors(unit).items()}


def stage_tensors(stage: Stage) -> dict[str, Tensor]:
    """As `model_tensors`, for what one stage holds."""
    parts = {weight.part for weight in stage.weights}
    held = {part: getattr(stage, part).state_dict() for part in parts}
    tensors: dict[str, Tensor] = {}
    for weight in stage.weights:
        tensors.setdefault(weight.canonical, held[weight.part][weight.key])
    return tensors


def model_inputs(row: PackedRow, device: torch.device) -> dict[str, Any]:
    """The arguments of `MultimodalModel.forward` for a packed row, on `device`."""

    def tensor(array: Any) -> Tensor:
        return torch.as_tensor(array).to(device, non_blocking=True)

    return {
        "input_ids": tensor(row.input_ids)[None],
        "labels": tensor(row.labels)[None],
        "position_ids": tensor(row.position_ids)[None],
        "encoder_inputs": {
            unit: {name: tensor(array) for name, array in inputs.items()}
            for unit, inputs in row.media.items()
        },
        "sample_ids": row.sample_ids,
        "lengths": row.lengths,
    }
