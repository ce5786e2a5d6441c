"""Ranks go on from one and the same checkpoint, or say in one line why they cannot."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import torch

from dilatant.comm.comm import Comm
from dilatant.config import parse_config
from dilatant.config.errors import UserError
from dilatant.training.checkpoints.starting_point import agreed_checkpoint, with_template_date
from dilatant.training.checkpoints.writer import CheckpointWriter
from harness.worker_pool import Worker, WorkerPool

PATH = Path("checkpoints") / "step-00000002"


def write_checkpoint(folder: Path, session: str, **values: str) -> None:
    writer = CheckpointWriter(folder / "checkpoints", keep=2, session=session)
    writer.save(2, {"model": {"weight": torch.ones(3)}}, {"step": 2, "position": {}, **values})
    writer.wait()
    writer.publish()
    writer.close()


def agreement(worker: Worker, folders: list[str]) -> str:
    """Every rank has a sight of its own: relative paths from folders of their own."""
    os.chdir(folders[worker.rank])
    comm = Comm(worker.store, worker.rank, worker.size)
    try:
        # Only rank 0 has looked for a checkpoint.
        return str(agreed_checkpoint(comm, PATH if worker.rank == 0 else None))
    except UserError as refused:
        return f"refused: {refused}"
    finally:
        comm.close()
        os.chdir("/")


def test_all_ranks_take_the_first_ranks_checkpoint(workers: WorkerPool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "aa" * 8)
    assert workers.run(agreement, 2, [str(tmp_path)] * 2) == [str(PATH)] * 2


def test_ranks_with_unequal_sight_refuse_in_one_line(workers: WorkerPool, tmp_path: Path) -> None:
    shared, blind, other = (tmp_path / name for name in ("shared", "blind", "other"))
    for folder, session in ((shared, "aa" * 8), (other, "bb" * 8)):
        folder.mkdir()
        write_checkpoint(folder, session)
    blind.mkdir()
    for said in workers.run(agreement, 3, [str(shared), str(blind), str(other)]):
        assert "rank 1: checkpoint 'checkpoints/step-00000002' cannot be used" in said
        assert "rank 2 sees another checkpoint there" in said
        assert "\n" not in said


def test_template_date_is_from_config_else_checkpoint_else_today(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "aa" * 8, template_date="2020-02-29")
    today = datetime.now().date().isoformat()

    def day(resume: str, written: str | None = None, folder: Path = tmp_path) -> str | None:
        tree = {
            "output_dir": str(folder),
            "model": {"id": "some/model"},
            "data": {"train": [{"path": "x.jsonl"}], **({"template_date": written} if written else {})},
            "train": {"resume": resume},
        }
        return with_template_date(parse_config(tree, tmp_path)).data.template_date

    assert day("auto") == day(str(tmp_path / PATH)) == "2020-02-29"
    assert day("auto", "2021-01-01") == "2021-01-01"
    assert day("never") in (today, datetime.now().date().isoformat())
    assert day("auto", folder=tmp_path / "none") in (today, datetime.now().date().isoformat())
