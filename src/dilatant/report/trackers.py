"""Experiment trackers: TensorBoard by default; others, by the names that transformers has for them, if requested and
installed. Servers, projects and accounts come from the trackers' own settings and environment variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from dilatant.config import UserError


class Tracker(Protocol):
    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_trackers(names: Iterable[str], folder: Path, config: Mapping[str, Any], first_step: int) -> list[Tracker]:
    """Open the trackers called `names` for the run in `folder`, continuing after step `first_step`.

    Raises UserError when a tracker's package is not installed.
    """
    makers: dict[str, Callable[[str, Path, Mapping[str, Any], int], Tracker]] = {
        "tensorboard": _TensorBoard,
        **dict.fromkeys(("wandb", "trackio", "swanlab"), _WandbLike),
        "mlflow": _MLflow,
        "comet_ml": _Comet,
    }
    return [makers[name](name, folder, config, first_step) for name in names]


def check_trackers(names: Iterable[str]) -> None:
    """Raise UserError for a tracker whose package is not installed; nothing is imported."""
    for name in names:
        if name != "tensorboard" and find_spec(name) is None:
            raise _not_installed(name)


def _not_installed(name: str) -> UserError:
    return UserError(f"train.report_to names {name!r}, which is not installed; pip install 'dilatant[{name}]'")


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise _not_installed(name) from None


class _TensorBoard:
    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides events that a run wrote after the checkpoint it is resumed from.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandbLike:
    """Tracker for wandb, and for trackio and SwanLab, which have the same API."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        self._module = _package(name)
        named = {"experiment_name": folder.name} if name == "swanlab" else {"name": folder.name, "resume": "allow"}
        self._module.init(project="dilatant", config=dict(config), **named)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._module.log(dict(scalars), step=step)

    def close(self) -> None:
        self._module.finish()


class _MLflow:
    """Tracker for MLflow. The config is the artifact config.json, since parameters are limited in number and length."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        self._module = _package(name)
        self._ends = self._module.active_run() is None  # a run that the user has begun goes on
        if self._ends:
            self._module.start_run(run_name=folder.name)
        self._module.log_dict(dict(config), "config.json")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        # Names of data sets may hold characters that MLflow refuses.
        named = {re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII): value for name, value in scalars.items()}
        self._module.log_metrics(named, step=step)

    def close(self) -> None:
        if self._ends:
            self._module.end_run()


class _Comet:
    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        module = _package(name)
        self._experiment = module.start(experiment_config=module.ExperimentConfig(name=folder.name))
        self._experiment.log_parameters(dict(config))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._experiment.log_metrics(dict(scalars), step=step)

    def close(self) -> None:
        self._experiment.end()
