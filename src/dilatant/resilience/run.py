"""Train as configured: fail with the first lost rank, or recover from losses."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from dilatant.config import Config, UserError
from dilatant.config.environment import place_from
from dilatant.resilience.processes.agent_run import coordinator_port, launched_agent, run_agent
from dilatant.resilience.processes.messages import is_loopback
from dilatant.training.rank import RunResult, Show
from dilatant.training.run import Resilient
from dilatant.training.run import train as train_once


def train(config: Config, *, overwrite: bool = False, show: Show = "nothing") -> RunResult:
    """Train the model of a config, evaluate it on held-out data and export it into the run folder.

    overwrite: start anew in an output_dir that holds a run. show: where progress is shown. Starts the ranks of the
    layout, or is one of them under torchrun, Slurm or Kubernetes. With `resilience.enabled` a launcher starts one
    process per machine instead: the first is the leader, the others are agents. Raises UserError for a mistake in
    config, data or folder, WorkerFailed when a rank fails (with `resilience.enabled`: when no rank can continue),
    RunStopped when a signal ends a run before it trains; after a later signal the run saves and returns.
    """
    if not config.resilience.enabled:
        return train_once(config, overwrite=overwrite, show=show)
    place, address = place_from(), config.resilience.address
    if place is None and address is None:
        if config.resilience.standby is not None:
            raise UserError(
                "resilience.standby: the run is on one machine, so there is nobody to lead it when that is gone; leave "
                "it out, or set resilience.listen"
            )
        from dilatant.resilience.launch import launch_resiliently

        return train_once(config, overwrite=overwrite, show=show, resilient=Resilient(launch_resiliently))
    if place is not None:
        if place.rank:
            code = run_agent(launched_agent(config, place))
            return RunResult(Path(config.output_dir), 0, 0, 0.0, code, is_first=False)
        address = (place.host if is_loopback(place.host) else ""), coordinator_port(place)
    from dilatant.resilience.launch import LeaderAddresses, run_leader

    assert address is not None
    name = address[0] if place is None else place.host
    leading = LeaderAddresses(*address, name, trains_here=place is not None)
    nodes = config.cluster.nodes if place is None else place.size
    launcher = "resilience.listen" if place is None else place.launcher
    resilient = Resilient(partial(run_leader, leading), nodes, launcher)
    return train_once(config, overwrite=overwrite, show=show, resilient=resilient)
