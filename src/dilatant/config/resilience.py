"""`resilience:` in the YAML file: going on when processes or machines are lost."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from dilatant.config.base import Section


class ResilienceConfig(Section):
    """What a run does when nodes are lost."""

    enabled: bool = False
    """Go on with those who are left: they take over the lost layers from whoever holds them too, else from the newest
    checkpoint, and finish the step in hand. Under Slurm or Kubernetes start one process a machine."""
    fault_tolerance: int = Field(1, ge=0)
    """Nodes that may be lost at once: a recovery keeps one more copy of every layer than that, as far as there are
    ranks for them. The first plan is yours; the run warns where it has fewer."""
    ranks_per_node: int = Field(1, ge=1)
    """Processes that are lost together: of several machines those of each, of one machine so many of it."""
    listen: str | None = None
    """HOST:PORT at which this process waits for machines instead of training itself: there `dilatant agent
    --coordinator HOST:PORT` joins. HOST is an address of this machine, or 0.0.0.0 for all of them."""
    standby: str | None = None
    """HOST:PORT of another machine that leads when this one is gone for good: the agent there is started with
    `--standby`. It does so when most of those who are members come to it."""
    restarts: int = Field(0, ge=0)
    """How often a lost node is started again, on one machine all in all, on several each of them; it joins at the end
    of a step, and takes over layers."""
    lease_seconds: float = Field(3.0, gt=0, le=1e5)
    """A node that is silent for longer is lost, be it stopped or cut off. One whose process ends is noticed at once."""
    fence_seconds: float = Field(10.0, gt=0, le=1e5)
    """What a process has to stop what it computes when others were lost; who hangs longer is killed."""
    progress_seconds: float = Field(60.0, gt=0)
    """A process that has computed a step for longer than this, and than five of the longest steps before, hangs; one
    that builds, or reads weights, has this instead of `fence_seconds`."""
    drain_seconds: float = Field(600.0, gt=0)
    """What a node has that was asked to leave: it goes at the end of the step, or with a quarter of the time left hands
    over what it has finished of it. A cloud gives 30 to 120 s before it takes a machine."""
    evict_slower: float | None = Field(None, gt=1)
    """A node with a process so many times slower than others that do the like is left out, as one that was asked to
    leave, one at a time and while `fewest_nodes` remain. Before that, and without this, slow ones get fewer samples."""
    salvage: bool = True
    """After a loss only what is missing of the step in hand runs again: what the others had finished is kept. For that
    every process keeps its own gradients beside the sums until the step counts: 4 bytes for each weight that trains."""
    fewest_nodes: int = Field(1, ge=1)
    """With fewer the run is saved and ends with exit code 75: start it again when there are more."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether processes keep their own gradients beside the sums."""
        return self.enabled and self.salvage

    @property
    def address(self) -> tuple[str, int] | None:
        """`listen` as host and port."""
        if self.listen is None:
            return None
        host, _, port = self.listen.rpartition(":")
        return host, int(port)

    @model_validator(mode="after")
    def _listen_is_an_address(self) -> Self:
        host, _, port = (self.listen or "any:1").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"listen: {self.listen!r} is no HOST:PORT, such as 0.0.0.0:29400")
        host, _, port = (self.standby or "any:1").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"standby: {self.standby!r} is no HOST:PORT, such as node1:29400")
        if self.standby is not None and self.standby == self.listen:
            raise ValueError(
                f"standby: {self.standby!r} is where the leader listens; name another machine's address"
            )
        return self
