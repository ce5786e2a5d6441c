"""Experiment trackers: TensorBoard by default; others, by the names that transformers has for them, if requested and
installed. Servers, projects and accounts come from the trackers' own settings and environment variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dilatant.config import UserError


@dataclass(frozen=True, slots=True)
class Tracker:
    """An open tracker. log: takes a step and its scalars by name."""

    log: Callable[[int, Mapping[str, float]], object]
    close: Callable[[], object]


def open_trackers(names: Iterable[str], folder: Path, config: Mapping[str, Any], first_step: int) -> list[Tracker]:
    """Open the trackers called `names` for the run in `folder`, continuing after step `first_step`.

    Raises UserError when a tracker's package is not installed.
    """
    makers: dict[str, Callable[[str, Path, Mapping[str, Any], int], Tracker]] = {
        "tensorboard": _tensorboard,
        **dict.fromkeys(("wandb", "trackio", "swanlab"), _wandb_like),
        "mlflow": _mlflow,
        "comet_ml": _comet,
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


def _tensorboard(name: str, folder: Path, config: Mapping[str, Any], first_step: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides events that a run wrote after the checkpoint it is resumed from.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def log(step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def _wandb_like(name: str, folder: Path, config: Mapping[str, Any], first_step: int) -> Tracker:
    """Open wandb, or trackio or SwanLab, which have the same API."""
    module = _package(name)
    named = {"experiment_name": folder.name} if name == "swanlab" else {"name": folder.name, "resume": "allow"}
    module.init(project="dilatant", config=dict(config), **named)
    return Tracker(lambda step, scalars: module.log(dict(scalars), step=step), module.finish)


def _mlflow(name: str, folder: Path, config: Mapping[str, Any], first_step: int) -> Tracker:
    """Open MLflow. The config is the artifact config.json, since parameters are limited in number and length."""
    module = _package(name)
    goes_on = module.active_run() is not None  # a run that the user has begun is not ended
    if not goes_on:
        module.start_run(run_name=folder.name)
    module.log_dict(dict(config), "config.json")

    def log(step: int, scalars: Mapping[str, float]) -> None:
        # Names of data sets may hold characters that MLflow refuses.
        named = {re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII): value for name, value in scalars.items()}
        module.log_metrics(named, step=step)

    return Tracker(log, (lambda: None) if goes_on else module.end_run)


def _comet(name: str, folder: Path, config: Mapping[str, Any], first_step: int) -> Tracker:
    module = _package(name)
    experiment = module.start(experiment_config=module.ExperimentConfig(name=folder.name))
    experiment.log_parameters(dict(config))
    return Tracker(lambda step, scalars: experiment.log_metrics(dict(scalars), step=step), experiment.end)
