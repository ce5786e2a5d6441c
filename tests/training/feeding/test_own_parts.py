"""A user's own data sets, loss, optimizer, schedule, callbacks and metrics, passed to `dilatant.train`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from transformers import LlamaConfig

import dilatant
from cases.engine_case import focal
from cases.tiny_project import tiny_config, write_images
from dilatant import train
from dilatant.config import UserError, load_config
from dilatant.config.config import parse_config
from dilatant.data.text.encode import encode_sample
from dilatant.plan.boxes import Box
from dilatant.planning.assemble import assemble_samples
from dilatant.report.metrics import StepMetrics
from dilatant.training.callbacks import CallbackList, RunControl
from dilatant.training.evaluation.evaluation import Evaluation
from dilatant.training.optimizers.optimizer import allocate_moments, optimizer_tensors
from dilatant.training.optimizers.own_optimizer import OwnOptimizer
from dilatant.training.own_parts import checked_loss, find_loss
from dilatant.training.rank import RunResult


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def project(folder: Path, name: str = "run", **changes: Any) -> dict[str, Any]:
    """Return a config that trains on images below `folder` into `folder/name`; changes: to its `train` section."""
    tree = tiny_config(**changes)
    return {**tree, "output_dir": str(folder / name)}


def with_file(tree: dict[str, Any], file: Path) -> dict[str, Any]:
    return {**tree, "data": {**tree["data"], "train": [{"path": str(file)}]}}


def records_of(file: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for record in records:
        record["messages"][0]["content"][0]["image"] = Image.open(file.parent / f"images/{record['id'][7:]}.png")
    return records


def without_data(tree: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "data": {key: value for key, value in tree["data"].items() if key != "train"}}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))
    return write_images(tmp_path, 12)


def test_a_list_trains_and_resumes_as_its_file_does(file: Path, tmp_path: Path) -> None:
    constant = {"kind": "constant"}  # the parts of the run have other ends
    train(with_file(project(tmp_path, "file", schedule=constant), file))
    records = records_of(file)
    tree = without_data(project(tmp_path, "list", schedule=constant))
    train({**tree, "train": {**tree["train"], "steps": 3}}, train_data=records, eval_data=records[:4])
    resumed = {**tree, "train": {**tree["train"], "resume": "auto"}}
    result = train(resumed, train_data=records, eval_data=records[:4])
    assert result.evaluation is not None
    assert losses(tmp_path / "list") == losses(tmp_path / "file")
    written = load_config(tmp_path / "list" / "config.yaml")
    assert written.python == ("train_data", "eval_data")
    with pytest.raises(UserError, match=r"got its eval_data in Python .* eval_data=\.\.\.\)"):
        train(written, train_data=records)
    with pytest.raises(UserError, match="the training data changed since the checkpoint"):
        train(resumed, train_data=[*records[:-1], records[0]], eval_data=records[:4])


class Rows(torch.utils.data.Dataset):
    """A map-style data set of torch."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.records[index]


class Lines(torch.utils.data.IterableDataset):
    """An iterable data set of torch."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        return iter(self.records)


def test_an_iterable_trains_and_resumes_with_its_next_sample(file: Path, tmp_path: Path) -> None:
    records, constant = records_of(file)[:7], {"kind": "constant"}
    for name, parts in (("whole", (4,)), ("parts", (1, 3, 4))):
        for steps in parts:
            tree = without_data(project(tmp_path, name, steps=steps, schedule=constant, resume="auto"))
            train(tree, train_data=Lines(records))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len({*losses(tmp_path / "whole")}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "datasets", "encoded"])
def test_data_sets_of_every_kind_train_as_their_file_does(kind: str, file: Path, tmp_path: Path) -> None:
    tree = with_file(project(tmp_path, "file", steps=3), file)
    train(tree)
    records: Any = records_of(file)
    if kind == "torch":
        records = Rows(records)
    elif kind == "datasets":
        turns = [[part for turn in each["messages"] for part in (turn["content"],)] for each in records]
        flat = [{"image": asked[0]["image"], "question": asked[1]["text"], "answer": said} for asked, said in turns]
        records = datasets.Dataset.from_list(flat)
    else:
        samples = assemble_samples(parse_config(tree, tmp_path))
        records = [encode_sample(samples.train[index], samples.encoding) for index in range(12)]
    train(without_data(project(tmp_path, kind, steps=3)), train_data=records)
    assert losses(tmp_path / kind) == losses(tmp_path / "file")


def test_what_python_replaces_is_named(file: Path, tmp_path: Path) -> None:
    tree = with_file(project(tmp_path), file)
    with pytest.warns(UserWarning, match="train_data takes the place of data.train"), pytest.raises(
        UserError, match="train_data is empty"
    ):  # fmt: skip
        train(tree, train_data=[])
    with pytest.raises(UserError, match="takes no 'lost'"):
        train(tree, lost=1)
    with pytest.raises(UserError, match="model is a int; give a model of transformers, an id"):
        train(tree, model=3)
    with pytest.raises(UserError, match="is missing; name files or a data set"):
        train(without_data(tree))


def figures(folder: Path) -> dict[int, dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[int, dict[str, Any]] = {}
    for record in map(json.loads, lines):
        found.setdefault(record["step"], {}).update(record.get("figures", {}))
    return found


class Recorder:
    """Writes what it is called for, and stops the run after `last` steps."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.calls: list[str] = []

    def on_step(self, run: RunControl, metrics: StepMetrics) -> None:
        assert run.step == metrics.step
        self.calls.append(f"step {run.step} at {max(metrics.learning_rates.values()):g}")
        run.log({"squared": metrics.step**2})
        if run.step == 2:
            run.learning_rate_factor = 0.1
        if run.step == self.last:
            run.stop()

    def on_evaluation(self, run: RunControl, evaluation: Evaluation) -> None:
        self.calls.append(f"evaluation {run.step} of {len(evaluation.verdicts)}: {[*evaluation.figures][1:]}")
        run.log({"evaluated": 1})

    def on_checkpoint(self, run: RunControl, checkpoint: Path) -> None:
        assert (checkpoint / "manifest.json").exists()
        self.calls.append(checkpoint.name)

    def on_end(self, run: RunControl, result: RunResult) -> None:
        self.calls.append(f"end {result.step}, {result.ended_early}")
        run.log({"ended": 1})


def shortest(expected: Sequence[str], written: Sequence[str]) -> float:
    return float(min(map(len, written)))


def halved(step: int) -> float:
    return 0.5**step


def test_callbacks_stop_log_and_change_the_rate(file: Path, tmp_path: Path) -> None:
    tree = with_file(project(tmp_path, schedule={"kind": "constant"}, logging_steps=3), file)
    tree["evaluation"] = {"steps": 2}
    recorder = Recorder(4)
    result = train(tree, eval_data=records_of(file)[:4], callbacks=[recorder], metrics=[shortest])
    assert (result.step, result.exit_code, result.ended_early) == (4, 0, 4)
    assert (tmp_path / "run" / "export").is_dir()
    evaluated = "of 4: ['exact_match', 'shortest']"
    assert recorder.calls == [
        "step 1 at 0.005",
        "step 2 at 0.005",
        f"evaluation 2 {evaluated}",
        "step 3 at 0.0005",
        "step 4 at 0.0005",
        f"evaluation 4 {evaluated}",
        "step-00000004",
        "end 4, 4",
    ]
    assert figures(tmp_path / "run") == {
        1: {"squared": 1},
        2: {"squared": 4, "evaluated": 1},
        3: {"squared": 9},
        4: {"squared": 16, "evaluated": 1, "ended": 1},
    }
    # A run that a callback ended goes on when it is resumed, at the rate that it had.
    tree["train"]["resume"] = "auto"
    again = Recorder(5)
    assert train(tree, eval_data=records_of(file)[:4], callbacks=[again], metrics=[shortest]).step == 5
    assert again.calls[0] == "step 5 at 0.0005"


class Failing:
    def on_step(self, run: RunControl, metrics: StepMetrics) -> None:
        raise KeyError("lost")


def test_a_callback_that_fails_is_named_and_the_step_saved(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Failing.on_step failed after step 1: KeyError: 'lost' \(test_own_parts.py:"):
        train(with_file(project(tmp_path), file), callbacks=[Failing()])
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()
    with pytest.raises(UserError, match="callbacks: object has none of the methods on_step, on_evaluation"):
        train(with_file(project(tmp_path), file), callbacks=[object()])


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("enough")])
def test_code_that_ends_the_process_is_named(error: BaseException) -> None:
    class Ends:
        def on_step(self, run: RunControl, metrics: StepMetrics) -> None:
            raise error

    with pytest.raises(UserError, match=rf"Ends.on_step failed after step 0: {type(error).__name__}: .*own_parts.py:"):
        CallbackList([Ends()]).call("on_step", None)


def test_ctrl_c_inside_a_users_code_stays_one() -> None:
    class Long:
        def on_step(self, run: RunControl, metrics: StepMetrics) -> None:
            signal.raise_signal(signal.SIGINT)

    # Shells start background jobs with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            CallbackList([Long()]).call("on_step", None)
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_was_reported_is_not_reported_again_when_steps_repeat() -> None:
    recorder = Recorder(9)
    callbacks = CallbackList([recorder])
    for step in (1, 2, 1, 2, 3):
        callbacks.control.step = step
        callbacks.call("on_end", SimpleNamespace(step=step, ended_early=None))
    assert recorder.calls == ["end 1, None", "end 2, None", "end 3, None"]
    # Another rank that takes over knows what the first one reported and decided.
    callbacks.reported("on_end", 7)
    callbacks.control.follow(7, True, 0.5)
    callbacks.call("on_end", None)
    assert len(recorder.calls) == 3
    assert (callbacks.control.is_stopping, callbacks.control.learning_rate_factor) == (True, 0.5)


def momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def test_an_optimizer_and_a_schedule_resume_as_they_were(file: Path, tmp_path: Path) -> None:
    def run(name: str, **changes: Any) -> None:
        tree = project(tmp_path, name, optimizer={}, **changes)
        train(with_file(tree, file), optimizer=momentum, schedule=halved)

    run("whole")
    run("parts", steps=3)
    run("parts", resume="auto")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rates = [json.loads(line)["learning_rates"] for line in lines]
    assert rates == [{"group 0": 0.05 * 0.5**step} for step in range(6)]


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own, whose step count is a plain number."""

    def __init__(self, parameters: Any, lr: float = 0.01, shape: tuple[int, ...] | None = None) -> None:
        super().__init__(parameters, {"lr": lr, "shape": shape})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                shape = group["shape"] or weight.shape
                state["count"] = state.get("count", 0) + 1
                state.setdefault("average", torch.zeros(shape)).mul_(0.9)
                if shape == weight.shape:
                    state["average"].add_(weight.grad, alpha=0.1)
                    weight.sub_(group["lr"] * state["average"].sign())


def test_state_of_an_optimizer_is_written_and_read() -> None:
    weights = {name: torch.nn.Parameter(torch.ones(3, 2)) for name in ("a", "b")}
    boxes = {name: Box.of(name, (3, 2)) for name in weights}
    first, second = (OwnOptimizer(Lion, weights, weights, boxes) for _ in range(2))
    assert first.scalars == {"count"}
    weights["a"].grad = torch.full((3, 2), 2.0)
    weights["b"].grad = torch.zeros(3, 2)
    first.step()
    written = optimizer_tensors(first)
    assert float(written["a"]["count"]) == 1
    allocate_moments(second, {"a"})
    for kind, tensor in optimizer_tensors(second)["a"].items():
        tensor.copy_(written["a"][kind])
    second.loaded()
    assert second.state[weights["a"]]["count"] == 1
    assert isinstance(second.state[weights["a"]]["count"], int)
    torch.testing.assert_close(second.state[weights["a"]]["average"], torch.full((3, 2), 0.2))


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        (lambda parameters: Lion(parameters, shape=(2,)), r"Lion keeps 'average', \[2\], beside a weight \[4, 4\]"),
        (lambda parameters: torch.optim.LBFGS(parameters), "LBFGS cannot update: TypeError"),
        (lambda parameters: parameters, "the factory returned a list"),
        (lambda parameters: 1 / 0, "it cannot be made: ZeroDivisionError"),
        (lambda parameters: sys.exit("no"), "it cannot be made: SystemExit: no"),
        (Lion, "Lion may need whole weights, and this rank has a part of 'a'"),
    ],
)
def test_an_optimizer_that_would_go_wrong_is_refused(factory: Any, problem: str) -> None:
    weights = {"a": torch.nn.Parameter(torch.ones(3, 2))}
    part = Box("a", (6, 2), (((0, 3),), ((0, 2),)))
    with pytest.raises(UserError, match=problem):
        OwnOptimizer(factory, weights, weights, {"a": part if factory is Lion else Box.of("a", (3, 2))})
    Lion.elementwise = True
    try:
        OwnOptimizer(Lion, weights, weights, {"a": part})
        OwnOptimizer(momentum, weights, weights, {"a": part})
    finally:
        del Lion.elementwise


def test_label_smoothing_is_a_loss_per_token(file: Path, tmp_path: Path) -> None:
    config = parse_config(with_file(project(tmp_path, label_smoothing=0.1), file), tmp_path)
    loss = find_loss(config)
    assert loss is not None
    assert checked_loss(loss, LlamaConfig(vocab_size=11)).is_per_token
    assert find_loss(parse_config(with_file(project(tmp_path), file), tmp_path)) is None


class Unit:
    """Pulls the hidden states of target positions to length 1, and notes their width."""

    def __init__(self) -> None:
        self.widths: set[int] = set()

    def __call__(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.widths.add(hidden.shape[-1])
        return (hidden.float().norm(dim=-1) - 1).square()


def test_a_loss_of_hidden_states_trains_without_the_head(file: Path, tmp_path: Path) -> None:
    unit = dilatant.loss(Unit(), of="hidden_states")
    tree = with_file(project(tmp_path, steps=6, schedule={"kind": "constant"}, optimizer={"learning_rate": 0.1}), file)
    train(tree, loss=unit)
    assert unit.widths == {16}
    assert losses(tmp_path / "run")[-1] < 0.5 * losses(tmp_path / "run")[0]
    with pytest.raises(UserError, match="of is 'hidden'; give one of logits, hidden_states"):
        dilatant.loss(of="hidden")(focal)


@pytest.mark.parametrize(
    ("changes", "parts", "problem"),
    [
        ({"optimizer": {"learning_rate": 1.0}}, {"optimizer": momentum}, "train.optimizer is not used with optimizer="),
        ({"schedule": {"warmup_steps": 3}}, {"schedule": halved}, "train.schedule is not used with schedule="),
        ({}, {"schedule": 3}, "schedule is a int; give a function"),
        ({}, {"metrics": [shortest]}, "metrics: there is nothing to evaluate on"),
        ({}, {"metrics": [shortest, shortest], "eval_data": [1]}, "'shortest' has none"),
        ({"loss": "a.b"}, {"loss": focal}, "train.loss names another one"),
        ({"label_smoothing": 0.1}, {"loss": focal}, "train.label_smoothing is for the cross entropy"),
        ({"loss": "json.dumps"}, {}, "'json.dumps' is not declared as a loss; put @dilatant.loss above"),
        ({"loss": "cases.engine_case.focal"}, {}, "'cases.engine_case.focal' is not declared as a loss"),
    ],
)
def test_parts_that_contradict_the_config_are_refused(
    changes: dict[str, Any], parts: Any, problem: str, file: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=problem):
        train(with_file(project(tmp_path, **changes), file), **parts)


def test_parts_over_several_machines_are_refused_with_a_remedy(file: Path, tmp_path: Path) -> None:
    tree = with_file(project(tmp_path), file)
    tree["resilience"] = {"enabled": True, "listen": "127.0.0.1:29517"}
    with pytest.raises(UserError, match=r"passed \(loss, callbacks\): use files and dotted names \(train.loss, train"):
        train(tree, loss=focal, callbacks=[Recorder(1)])


ON_STANDARD_INPUT = """
import json, sys
import torch
import dilatant

tree, records, ranks = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
weight = torch.tensor(2.0)

class Records:
    def __len__(self):
        return len(records)
    def __getitem__(self, index):
        return records[index]

class Last:
    def on_end(self, run, result):
        run.log({"seen": seen(result.step)})

def seen(step):
    return 10 * step

def doubled(logits, targets):
    return weight * torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")

if ranks > 1:
    tree["parallel"] = {"units": {"vision": {}, "language": {}}}
result = dilatant.train(tree, train_data=Records(), loss=doubled, callbacks=[Last()])
print(result.step, result._repr_html_()[:40])
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_of_a_notebook_need_no_main_guard(ranks: int, file: Path, tmp_path: Path) -> None:
    """A script on standard input is to multiprocessing what a notebook is: it cannot be imported. Data workers decode,
    and with two ranks all parts are sent."""
    tree = without_data(project(tmp_path, steps=2))
    tree["data"]["workers"] = 1
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for record in records:
        record["messages"][0]["content"][0]["image"] = str(file.parent / f"images/{record['id'][7:]}.png")
    arguments = [json.dumps(tree), json.dumps(records), str(ranks)]
    ended = subprocess.run(
        [sys.executable, "-", *arguments], input=ON_STANDARD_INPUT, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("2 <")
    assert figures(tmp_path / "run")[2] == {"seen": 20}
    assert losses(tmp_path / "run")[0] > 8  # twice the cross entropy of 260 bytes
