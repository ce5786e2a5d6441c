"""Where no plan fits what is left of a run, the ranks that are left save the steps that they finished."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cases.tiny_project import tiny_config, write_images
from dilatant.comm.comm import Comm
from dilatant.comm.launch import Worker as Rank
from dilatant.config.config import load_config
from dilatant.resilience.state_transfer import StateLost
from dilatant.resilience.worker.save_holdings import save_holdings
from dilatant.training.commit import RunMembership
from dilatant.training.prepare import prepare
from dilatant.training.run import train
from dilatant.training.trainer import Trainer
from harness.faults.chaos import losses
from harness.refusing_gate import Gate, Refused
from harness.worker_pool import Worker, WorkerPool

DONE, STEPS = 2, 4
TOLERANCE = 1e-5
"""Relative, in fp32: four ranks add the same numbers in another order than one."""


def project(folder: Path, parallel: dict[str, Any] | None, zero: str = "none") -> Path:
    folder.mkdir()
    write_images(folder, 12)
    tree = tiny_config(steps=STEPS, save_steps=None)
    tree["model"]["freeze"] = ["vision.encoder"]
    if parallel is not None:
        tree["parallel"] = {"colocated": {"vision": "language"}, "microbatches": 2, **parallel}
        tree["resilience"] = {"enabled": True, "ranks_per_node": 2}
        tree["train"]["zero"] = zero
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder / "config.yaml"


def _train_and_save(worker: Worker, path: str, stays: tuple[int, ...]) -> int | str | None:
    """Train `DONE` steps; then the ranks `stays` save what they hold."""
    config = load_config(Path(path))
    prepared = prepare(config)
    own = Rank(worker.rank, worker.size, worker.rank, torch.device("cpu"), worker.store)
    membership = RunMembership(1, tuple(k // 2 for k in range(worker.size)), gate=Gate(refuses=DONE))
    folder = Path(config.output_dir) / "checkpoints"
    trainer = Trainer(config, prepared.samples, prepared.model, prepared.planned, own, folder, membership)
    with closing(trainer), suppress(Refused):
        trainer.run(lambda metrics: None)
    if worker.rank not in stays:
        return None
    with closing(Comm(worker.store, stays.index(worker.rank), len(stays), 2)) as comm:
        try:
            return save_holdings(comm, trainer, folder, keep=3)
        except StateLost as error:
            return str(error)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    path = project(tmp_path_factory.mktemp("alone") / "project", None)
    train(load_config(path))
    return losses(path.parent / "run")


@pytest.mark.parametrize(
    ("language", "zero", "stays"),
    [
        ({"replicas": 2, "pp": 2}, "none", (0, 3)),
        pytest.param({"replicas": 2, "tp": 2}, "none", (1, 2, 3), marks=pytest.mark.slow),
        ({"replicas": 4}, "node", (2, 3)),
    ],
    ids=["pipelines", "tensor", "shards"],
)
def test_ranks_that_are_left_save_all_steps_that_they_finished(
    tmp_path: Path,
    workers: WorkerPool,
    undisturbed: list[float],
    language: dict[str, int],
    zero: str,
    stays: tuple[int, ...],
) -> None:
    path = project(tmp_path / "project", {"units": {"language": language}}, zero)
    saved = workers.run(_train_and_save, 4, str(path), stays)
    assert saved == [DONE if rank in stays else None for rank in range(4)]
    alone = yaml.safe_load(path.read_text())
    del alone["parallel"], alone["resilience"], alone["train"]["zero"]
    alone["train"]["resume"] = "auto"
    path.write_text(yaml.safe_dump(alone))
    result = train(load_config(path))
    assert result.began_at == DONE
    assert losses(path.parent / "run") == pytest.approx(undisturbed[DONE:], rel=TOLERANCE)


def test_what_no_rank_holds_is_named_and_nothing_is_saved(tmp_path: Path, workers: WorkerPool) -> None:
    path = project(tmp_path / "project", {"units": {"language": {"pp": 2}}})
    first, second = workers.run(_train_and_save, 2, str(path), (0,))
    assert isinstance(first, str)
    assert "model.language." in first
    assert second is None
    assert not (path.parent / "run" / "checkpoints").exists()
