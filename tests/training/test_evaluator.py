"""Held-out samples are judged by the averages, and training goes on with the weights that it had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dilatant.config.train import EvaluationConfig
from dilatant.training.evaluation import evaluation as room
from dilatant.training.evaluation.evaluation import Evaluator
from dilatant.training.optimizers.master_weights import Averages, MasterAdamW, make_masters
from dilatant.training.run_state import RunState


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_uses_averaged_weights_and_restores_them(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    masters = make_masters({"w": weight})
    optimizer = MasterAdamW([{"params": list(masters.values())}], {"w": weight}, masters)
    averages = Averages(masters, 0.5)
    with torch.no_grad():
        masters["w"].fill_(3.0)
    optimizer.write_weights()
    gathered: list[float] = []  # what all holders of the weight were brought to, each time
    runtime: Any = SimpleNamespace(
        owned=SimpleNamespace(gather=lambda: gathered.append(weight[0].item())),
        train=lambda *_: None,
        comm=SimpleNamespace(rank=0),
    )
    judged: list[float] = []
    monkeypatch.setattr(room.Evaluator, "_judge", lambda *_: judged.append(weight[0].item()) or [])
    monkeypatch.setattr(room, "all_gather_object", lambda comm, own: [own])
    chat = SimpleNamespace(stop_ids=())
    samples: Any = SimpleNamespace(tokenizer=None, held_out=object(), encoding=SimpleNamespace(chat=chat))
    question = SimpleNamespace(batch=SimpleNamespace(problems=[]))
    inputs: Any = SimpleNamespace(held_out=lambda *_: [question])
    for own in (averages, None):
        state = RunState.__new__(RunState)
        state.runtime, state.optimizer, state.averages = runtime, optimizer, own
        Evaluator(EvaluationConfig(), samples, inputs, state).evaluate()
        assert weight.tolist() == masters["w"].tolist() == [3.0] * 3
    assert averages.tensors["w"].tolist() == [1.0] * 3
    assert (judged, gathered) == ([1.0, 3.0], [1.0, 3.0])
