"""Every committed step is reported once and in order, at the latest during the vote on the next step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cases.tiny_project import tiny_config, write_images
from dilatant.comm.launch import local_worker
from dilatant.config import Config
from dilatant.config.config import parse_config
from dilatant.report.metrics import StepMetrics
from dilatant.report.run_folder import RunFolder
from dilatant.report.say import open_console
from dilatant.training import step_metrics
from dilatant.training.commit import FIXED_MEMBERSHIP, CommitBarrier, RunMembership
from dilatant.training.prepare import prepare
from dilatant.training.rank import Observer, train_to_end
from dilatant.training.step_metrics import StepLog
from dilatant.training.stop_signal import StopSignal
from dilatant.training.trainer import Trainer

STEPS = 5


class Broken(Exception):
    pass


@pytest.fixture(autouse=True)
def no_step_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no step count as slow, however busy the machine is."""
    monkeypatch.setattr(step_metrics, "AT_ONCE_SECONDS", float("inf"))


@dataclass
class Book:
    """A commit barrier that commits every step, and a log of events. fails: the entry whose writing raises Broken."""

    entries: list[str] = field(default_factory=list)
    fails: str = ""
    proposed: int = -1

    def write(self, entry: str) -> None:
        self.entries.append(entry)
        if entry == self.fails:
            raise Broken

    def begin(self, step: int, limit_seconds: float) -> None:
        self.write(f"begin {step + 1}")

    def slow(self, times: float) -> None:
        pass

    def propose(self, step: int, hashes: Mapping[str, int]) -> None:
        self.proposed = step + 1
        self.write(f"propose {self.proposed}")

    def await_commit(self) -> None:
        self.write(f"commit {self.proposed}")


def config_of(folder: Path, **more: Any) -> Config:
    write_images(folder, 12)
    write_images(folder, 4, "held_out.jsonl")
    tree = tiny_config(**{"steps": STEPS, "save_steps": None, "logging_steps": 1, **more.pop("train", {})})
    return parse_config({**tree, **more}, base=folder)


def trainer_of(config: Config, gate: CommitBarrier | None) -> Trainer:
    prepared = prepare(config)
    checkpoints = RunFolder(config.output_dir).checkpoints
    membership = FIXED_MEMBERSHIP if gate is None else RunMembership(generation=1, gate=gate)
    return Trainer(config, prepared.samples, prepared.model, prepared.planned, local_worker(), checkpoints, membership)


def run(trainer: Trainer, book: Book) -> list[str]:
    save: Callable[[], None] = trainer.saving.save

    def saved() -> None:
        book.write(f"save {trainer.step}")
        save()

    trainer.saving.save = saved  # type: ignore[method-assign]
    try:
        trainer.run(
            lambda metrics: book.write(f"told {metrics.step}"),
            on_evaluation=lambda step, evaluation: book.write(f"judged {step}"),
        )
    finally:
        trainer.close()
    return book.entries


def of_step(number: int) -> list[str]:
    return [f"begin {number}", f"propose {number}", f"commit {number}"]


def told_in_votes(steps: int) -> list[str]:
    entries = of_step(1)
    for number in range(2, steps + 1):
        begin, propose, commit = of_step(number)
        entries += [begin, propose, f"told {number - 1}", commit]
    return entries


def test_step_is_logged_during_next_vote_and_last_before_save(tmp_path: Path) -> None:
    book = Book()
    assert run(trainer_of(config_of(tmp_path), book), book) == [*told_in_votes(STEPS), f"told {STEPS}", f"save {STEPS}"]


def test_step_is_logged_before_evaluation_and_before_save(tmp_path: Path) -> None:
    book = Book()
    config = config_of(
        tmp_path,
        train={"steps": 4, "save_steps": 3},
        data={"train": [{"path": "train.jsonl"}], "eval": [{"path": "held_out.jsonl"}], "workers": 0},
        evaluation={"steps": 2, "max_new_tokens": 2},
    )
    entries = run(trainer_of(config, book), book)
    assert [entry for entry in entries if entry.split()[0] in ("told", "judged", "save")] == [
        *("told 1", "told 2", "judged 2", "told 3", "save 3", "told 4", "judged 4", "save 4")
    ]
    assert entries.index("told 1") > entries.index("propose 2")


def test_a_slow_step_is_told_of_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_metrics, "AT_ONCE_SECONDS", 0.0)
    book = Book()
    entries = run(trainer_of(config_of(tmp_path), book), book)
    assert entries == [*(entry for n in range(1, STEPS + 1) for entry in (*of_step(n), f"told {n}")), f"save {STEPS}"]


def test_without_a_vote_a_step_is_told_of_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book()
    trainer = trainer_of(config_of(tmp_path), None)
    execute = trainer.runtime.execute

    def executed(*given: Any, **named: Any) -> Any:
        book.write(f"execute {trainer.step + 1}")
        return execute(*given, **named)

    monkeypatch.setattr(trainer.runtime, "execute", executed)
    told = (entry for n in range(1, STEPS + 1) for entry in (f"execute {n}", f"told {n}"))
    assert run(trainer, book) == [*told, f"save {STEPS}"]


def test_rank_failing_during_its_vote_can_still_apply_the_step(tmp_path: Path) -> None:
    """The other ranks may already have committed the step."""
    losses: dict[bool, list[float]] = {}
    for fails in (False, True):
        book = Book(fails="told 2" if fails else "")
        config = config_of(tmp_path, train={"steps": 3}, output_dir=f"run {fails}")
        trainer = trainer_of(config, book)
        if not fails:
            run(trainer, book)
        else:
            with pytest.raises(Broken):
                run(trainer, book)
            assert book.entries[-2:] == ["propose 3", "told 2"]  # neither waited for nor told again
            assert (trainer.step, trainer.voted_step) == (2, 2)
            trainer.apply_voted()
        assert (trainer.step, trainer.voted_step) == (3, None)
        losses[fails] = [metrics.loss for metrics in trainer.done.recent]
        weights = trainer.state.tensors()["model"]
        losses[fails] += [float(tensor.double().sum()) for _, tensor in sorted(weights.items())]
    assert losses[True] == losses[False]


@pytest.mark.parametrize("is_slow", [False, True], ids=["", "a slow step, too"])
def test_fenced_rank_remembers_both_possibly_unlogged_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    if is_slow:
        monkeypatch.setattr(step_metrics, "AT_ONCE_SECONDS", 0.0)
    book = Book(fails="commit 3")
    trainer = trainer_of(config_of(tmp_path), book)
    with pytest.raises(Broken):
        run(trainer, book)
    assert [metrics.step for metrics in trainer.done.recent] == [1, 2]
    trainer.apply_voted()
    assert [metrics.step for metrics in trainer.done.recent] == [2, 3]
    assert book.entries[-1] == "commit 3"  # who is fenced tells nobody


@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "which another rank wrote meanwhile"])
def test_rank_failing_in_a_step_has_logged_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    config = config_of(tmp_path)
    folder = RunFolder(config.output_dir)
    trainer = trainer_of(config, Book())
    execute = trainer.runtime.execute

    def fails(*given: Any, **named: Any) -> Any:
        if trainer.step < 3:
            return execute(*given, **named)
        if elsewhere:
            with (folder.path / "metrics.jsonl").open("a") as file:
                file.write('{"step": 3}\n{"step": 4}\n')
        raise Broken

    monkeypatch.setattr(trainer.runtime, "execute", fails)
    with pytest.raises(Broken), StopSignal() as stop:
        train_to_end(config, trainer, folder, "nothing", stop)
    trainer.close()
    folder.close()
    assert steps_of(folder) == ([1, 2, 3, 4] if elsewhere else [1, 2, 3])


def test_next_rank_logs_the_steps_its_predecessor_missed(tmp_path: Path) -> None:
    """The next rank writes every missing step and writes no step twice."""
    book = Book()
    config = config_of(tmp_path, train={"steps": 3})
    trainer = trainer_of(config, book)
    run(trainer, book)
    for written in (1, 2, 3):
        folder = RunFolder(config.output_dir)
        lines = "".join(f'{{"step": {step}}}\n' for step in range(1, written + 1))
        (folder.path / "metrics.jsonl").write_text(lines)
        with Observer(config, folder, trainer, open_console(quiet=True)) as observer:
            observer.catch_up(trainer.done.recent)
        folder.close()
        assert steps_of(folder) == [1, 2, 3]


def test_what_could_not_be_told_of_is_not_told_again(tmp_path: Path) -> None:
    """A step whose report failed may be half written."""
    book = Book()
    trainer = trainer_of(config_of(tmp_path), book)
    run(trainer, book)
    log = StepLog(1, waits=True)
    told: list[int] = []

    def observe(metrics: StepMetrics) -> None:
        told.append(metrics.step)
        if len(told) == 1:
            raise Broken

    with log.telling(observe):
        for metrics in trainer.done.recent:
            log.add(metrics)
        with pytest.raises(Broken):
            log.catch_up()
        log.catch_up()
    assert told == [STEPS - 1, STEPS]


def test_only_steps_that_are_logged_are_kept_and_told_of(tmp_path: Path) -> None:
    book = Book()
    trainer = trainer_of(config_of(tmp_path, train={"logging_steps": 2}), book)
    told = [entry for entry in run(trainer, book) if entry.startswith("told")]
    assert told == ["told 2", "told 4", "told 5"]
    assert [metrics.step for metrics in trainer.done.recent] == [4, 5]


def steps_of(folder: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
