"""Held-out samples are judged by the averages, and training goes on with the weights that it had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dilatant.config.train import EvaluationConfig
from dilatant.training.evaluation import evaluator as room
from dilatant.training.evaluation.evaluator import Evaluator
from dilatant.training.optimizers.averages import Averages
from dilatant.training.optimizers.master_weights import MasterAdamW, make_masters


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
    runtime: Any = SimpleNamespace(owned=SimpleNamespace(gather=lambda: gathered.append(weight[0].item())))
    judged: list[float] = []
    monkeypatch.setattr(room, "evaluate", lambda *_: judged.append(weight[0].item()))
    chat = SimpleNamespace(stop_ids=())
    samples: Any = SimpleNamespace(tokenizer=None, held_out=object(), encoding=SimpleNamespace(chat=chat))
    inputs: Any = SimpleNamespace(held_out=lambda limit, size: [])
    for own in (averages, None):
        Evaluator(EvaluationConfig(), samples, runtime, inputs, optimizer, own).evaluate()
        assert weight.tolist() == masters["w"].tolist() == [3.0] * 3
    assert averages.tensors["w"].tolist() == [1.0] * 3
    assert (judged, gathered) == ([1.0, 3.0], [1.0, 3.0])
