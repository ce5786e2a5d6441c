"""Experiment trackers: TensorBoard by default; wandb and trackio if requested and installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dilatant.config import UserError


class Tracker(Protocol):
    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_trackers(
    names: Iterable[str], folder: Path, config: Mapping[str, Any], first_step: int
) -> list[Tracker]:
    """Open the trackers called `names` for the run in `folder`, continuing after step `first_step`.

    Raises UserError when a tracker's package is not installed.
    """
    makers: dict[str, type[_TensorBoard] | type[_WandbLike]] = {
        "tensorboard": _TensorBoard,
        "wandb": _WandbLike,
        "trackio": _WandbLike,
    }
    return [makers[name](name, folder, config, first_step) for name in names]


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
    """Tracker for wandb, and for trackio, which has the same API."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        try:
            self._module = __import__(name)
        except ImportError:
            raise UserError(
                f"train.report_to names {name!r}, which is not installed; pip install 'dilatant[{name}]'"
            ) from None
        self._module.init(project="dilatant", name=folder.name, config=dict(config), resume="allow")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._module.log(dict(scalars), step=step)

    def close(self) -> None:
        self._module.finish()
