"""Each tracker gets a run's name, config and scalars through its own package, and is refused where that is absent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock, call

import pytest

from dilatant.config import UserError
from dilatant.config.train import TrackerName
from dilatant.report.trackers import check_trackers, open_trackers

RUN, CONFIG = Path("runs/mine"), {"train": {"steps": 2}}
SCALARS = {"train/loss": 0.5, "source_losses/photos (v2)": 0.25}


def calls_of(name: str, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> list[Any]:
    """What a package is asked for in a run of one step, in order."""
    package = Mock()
    package.configure_mock(**answers)
    monkeypatch.setitem(sys.modules, name, package)
    (tracker,) = open_trackers([name], RUN, CONFIG, 0)
    tracker.log(1, SCALARS)
    tracker.close()
    return package.mock_calls


@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab"])
def test_wandb_and_its_likes_are_one_api(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = {"experiment_name": "mine"} if name == "swanlab" else {"name": "mine", "resume": "allow"}
    assert calls_of(name, monkeypatch) == [
        call.init(project="dilatant", config=CONFIG, **called),
        call.log(SCALARS, step=1),
        call.finish(),
    ]


def test_mlflow_gets_names_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of("mlflow", monkeypatch, **{"active_run.return_value": None}) == [
        call.active_run(),
        call.start_run(run_name="mine"),
        call.log_dict(CONFIG, "config.json"),
        call.log_metrics({"train/loss": 0.5, "source_losses/photos _v2_": 0.25}, step=1),
        call.end_run(),
    ]


def test_a_run_of_mlflow_that_the_user_began_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [each[0] for each in calls_of("mlflow", monkeypatch)]
    assert asked == ["active_run", "log_dict", "log_metrics"]


@pytest.mark.slow
def test_the_real_mlflow_stores_what_a_run_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for a database else
    mlflow = pytest.importorskip("mlflow", reason="without MLflow only a stand-in shows what it is asked for")
    check_trackers(["mlflow"])
    (tracker,) = open_trackers(["mlflow"], RUN, CONFIG, 0)
    tracker.log(1, SCALARS)
    tracker.log(2, {"train/loss": 0.25})
    tracker.close()
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 0.25)]
    assert run.data.metrics == {"train/loss": 0.25, "source_losses/photos _v2_": 0.25}
    assert mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/config.json") == CONFIG


def test_comet_names_an_experiment_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called = calls_of("comet_ml", monkeypatch, **{"ExperimentConfig.return_value": "the config"})
    assert called == [
        call.ExperimentConfig(name="mine"),
        call.start(experiment_config="the config"),
        call.start().log_parameters(CONFIG),
        call.start().log_metrics(SCALARS, step=1),
        call.start().end(),
    ]


@pytest.mark.parametrize("name", [name for name in get_args(TrackerName) if name != "tensorboard"])
def test_a_tracker_that_is_not_installed_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it was not there
    with pytest.raises(UserError, match=rf"names '{name}', which is not installed; .*dilatant\[{name}\]"):
        open_trackers([name], RUN, CONFIG, 0)
    with pytest.raises(UserError, match=f"names '{name}', which is not installed"):
        check_trackers(["tensorboard", name])
    check_trackers(["tensorboard"])


def test_every_tracker_has_an_extra_of_its_name() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {*get_args(TrackerName)} - {"tensorboard"} <= {*project["optional-dependencies"]}
