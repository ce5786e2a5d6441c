"""The `resilience:` section of the YAML file: continuing a run when processes or machines are lost."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dilatant.config.base import Section


class ResilienceConfig(Section):
    """Reaction of a run to lost nodes."""

    enabled: bool = False
    """Continue on the remaining nodes: they copy lost layers from other replicas, or else load them from the newest
    checkpoint, and finish the current step. Under Slurm or Kubernetes start one process per machine."""
    fault_tolerance: int = Field(1, ge=0)
    """Nodes that may be lost at once: plans, also the first one of `parallel: auto` or `dilatant plan`, have one more
    copy of every layer than this number, if the nodes can hold them. The run warns if there are fewer."""
    ranks_per_node: int = Field(1, ge=1)
    """Number of processes that are lost together on one machine; with several machines, all processes of a machine."""
    listen: str | None = None
    """HOST:PORT at which this process waits for machines instead of training; machines join with `dilatant agent
    --coordinator HOST:PORT`. HOST is an address of this machine, or 0.0.0.0 for all of them."""
    standby: str | None = None
    """HOST:PORT of another machine that takes over as coordinator when this one is lost; start its agent with
    `--standby`. It takes over when the majority of the members connect to it."""
    restarts: int = Field(0, ge=0)
    """Number of times that lost nodes are restarted: in total on one machine, per node on several. A restarted node
    joins at the end of a step and takes over layers."""
    lease_seconds: float = Field(3.0, gt=0, le=1e5)
    """Seconds without a message until a node is lost (hung or cut off). The end of its process is noticed at once."""
    fence_seconds: float = Field(10.0, gt=0, le=1e5)
    """Seconds that a process has to stop computing when others were lost; then it is killed."""
    progress_seconds: float = Field(60.0, gt=0)
    """A process is considered hung if it computes a step for longer than this and than five times the longest step so
    far. A process that builds stages or reads weights has this time to stop, if longer than `fence_seconds`."""
    drain_seconds: float = Field(600.0, gt=0)
    """Seconds that a node has after a request to leave: it leaves at the end of the step, or exports its gradients of
    the step when a quarter of the time is left. Clouds give 30 to 120 s before they reclaim a machine."""
    evict_slower: float | None = Field(None, gt=1)
    """Ask a node to leave if one of its processes is this many times slower than its peers, one node at a time and
    while `fewest_nodes` remain. Before that, and without this key, slow processes get fewer samples."""
    salvage: bool = True
    """Repeat only the missing part of the current step after a loss, and reuse the gradients of the other processes.
    For this, each process keeps its local gradients until the step commits: 4 bytes per trained weight. With
    `train.shard` steps are repeated whole."""
    when_thin: Literal["go_on", "save", "stop"] = "go_on"
    """Reaction when a change of members leaves a layer with fewer copies than `fault_tolerance` + 1, or still fewer.
    Each time the run prints a line, and `dilatant status` and generations.html show it. `save` also saves a checkpoint
    at once; `stop` saves one and ends the run with code 75."""
    fewest_nodes: int = Field(1, ge=1)
    """With fewer nodes, the run saves a checkpoint and exits with code 75; start it again when there are more. It does
    the same if the remaining nodes cannot hold the model; what none of them holds is then not saved."""

    @property
    def keeps_gradients(self) -> bool:
        """Return True if processes keep their local gradients in addition to the reduced ones."""
        return self.enabled and self.salvage

    @property
    def address(self) -> tuple[str, int] | None:
        """Return `listen` as (host, port), or None."""
        if self.listen is None:
            return None
        host, _, port = self.listen.rpartition(":")
        return host, int(port)

    @model_validator(mode="after")
    def _listen_is_an_address(self) -> Self:
        for key, example in (("listen", "0.0.0.0:29400"), ("standby", "node1:29400")):
            host, _, port = (getattr(self, key) or "any:1").rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"{key}: {getattr(self, key)!r} is no HOST:PORT, such as {example}")
        if self.standby is not None and self.standby == self.listen:
            raise ValueError(f"standby: {self.standby!r} is where the leader listens; name another machine's address")
        return self
