"""A trainer that takes over the part of the one before goes on as if nothing had been tried in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cases.tiny_project import tiny_config, write_images
from dilatant.comm.launch import local_worker
from dilatant.config.config import parse_config
from dilatant.training.commit import FIXED_MEMBERSHIP, RunMembership
from dilatant.training.prepare import prepare
from dilatant.training.trainer import Trainer


class Refused(Exception):
    pass


@dataclass
class Gate:
    """Commits every step before `refuses`, and not that one."""

    refuses: int
    proposed: int = -1

    def begin(self, step: int, limit_seconds: float) -> None:
        pass

    def slow(self, times: float) -> None:
        pass

    def propose(self, step: int, hashes: Mapping[str, int]) -> None:
        self.proposed = step

    def await_commit(self) -> None:
        if self.proposed == self.refuses:
            raise Refused


def test_gradients_of_an_uncommitted_step_are_not_accumulated(tmp_path: Path) -> None:
    """All of them are there, and summed, when somebody else is lost before the vote; weights are shared."""
    write_images(tmp_path, 12)
    config = parse_config(
        tiny_config(steps=4, save_steps=None, max_grad_norm=None, logging_steps=1), base=tmp_path
    )
    prepared = prepare(config)
    losses: list[float] = []

    def trainer(membership: RunMembership, before: Trainer | None = None) -> Trainer:
        model = prepare(config).model if before is None else before.runtime.model
        checkpoints = tmp_path / "checkpoints"
        return Trainer(
            config, prepared.samples, model, prepared.planned, local_worker(), checkpoints, membership, before
        )

    def trained(one: Trainer) -> list[float]:
        losses.clear()
        try:
            one.run(lambda metrics: losses.append(metrics.loss))
        finally:
            one.close()
        return [*losses]

    undisturbed = trained(trainer(FIXED_MEMBERSHIP))
    first = trainer(RunMembership(generation=1, gate=Gate(refuses=2)))
    with pytest.raises(Refused):
        trained(first)
    begun = [*losses]
    again = trainer(RunMembership(generation=2, weights_follow=True, gate=Gate(refuses=9)), first)
    assert again.state.stays
    again.state.go_on_from(first.state.values(), stays=True)
    again.runtime.clear_gradients()
    assert [*begun, *trained(again)] == undisturbed
