"""A run as its config asks for it: one that ends with its first lost rank, or one that goes on."""

from __future__ import annotations

from dilatant.config import Config
from dilatant.training.rank import RunResult, Show
from dilatant.training.run import train as train_once


def train(config: Config, *, overwrite: bool = False, show: Show = "nothing") -> RunResult:
    """Train the model of a config, evaluate it on held-out data and export it into the run folder.

    overwrite: start anew in an output_dir that holds a run. show: where progress goes. Starts the ranks of the layout,
    or is one of them under torchrun, Slurm or Kubernetes. Raises UserError for what is wrong with config, data or
    folder, WorkerFailed when a rank fails (with `resilience.enabled`: when nobody can go on), Stopped when a signal
    ends a run before it trains; a run that was asked to stop later is saved and returns.
    """
    if not config.resilience.enabled:
        return train_once(config, overwrite=overwrite, show=show)
    from dilatant.resilience.launch import launch_resiliently

    return train_once(config, overwrite=overwrite, show=show, resilient=launch_resiliently)
