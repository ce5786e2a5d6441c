"""`dilatant.train`: train as configured, in ranks that fail together or that recover from losses.

This module imports little, so that the fork server's imports run beside those of this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from dilatant.comm.fork_server import require_main_guard, warm_up
from dilatant.config import Config
from dilatant.config.environment import place_from
from dilatant.config.own_parts import Parts

if TYPE_CHECKING:
    from dilatant.training.rank import RunResult, Show


def train(
    config: Config | Mapping[str, Any] | str | Path,
    *,
    overwrite: bool = False,
    show: Show = "nothing",
    **parts: Unpack[Parts],
) -> RunResult:
    """Train the model of a config, evaluate it on held-out data and export it into the run folder.

    config: also a YAML file, or a mapping of its sections. overwrite: start anew in an output_dir that holds a run.
    show: where progress is shown. parts: the user's own data sets, loss, optimizer, schedule, callbacks and metrics,
    or model, see `Parts` and docs/python.md. Starts the ranks of the layout, or is one of them under torchrun, Slurm or
    Kubernetes. With `resilience.enabled` a launcher starts one process per machine instead: the first is the leader,
    the others are agents. Raises UserError for a mistake in config, parts, data or folder, WorkerFailed when a rank
    fails (with `resilience.enabled`: when no rank can continue), RunStopped when a signal ends a run before it trains;
    after a later signal the run saves and returns.
    """
    require_main_guard()
    if parts or not isinstance(config, Config) or config.python:
        from dilatant.training.own_parts import config_with_parts

        config = config_with_parts(config, parts, overwrite)
    if place_from() is None and (config.parallel.is_laid_out or config.parallel.auto):
        warm_up()

    from dilatant.resilience.launch import train_as_configured

    return train_as_configured(config, overwrite=overwrite, show=show)
