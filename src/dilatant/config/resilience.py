"""`resilience:` in the YAML file: going on when processes or machines are lost."""

from __future__ import annotations

from pydantic import Field

from dilatant.config.base import Section


class ResilienceConfig(Section):
    """What a run does when nodes are lost."""

    enabled: bool = False
    """Go on with those who are left: they take over the lost layers from whoever holds them too, else from the newest
    checkpoint, and repeat the step in hand. So far on one machine."""
    fault_tolerance: int = Field(1, ge=0)
    """Nodes that may be lost at once: a recovery keeps one more copy of every layer than that, as far as there are
    ranks for them. The first plan is yours; the run warns where it has fewer."""
    ranks_per_node: int = Field(1, ge=1)
    """Processes of one machine that are lost together."""
    restarts: int = Field(0, ge=0)
    """How often, all in all, a lost node is started again; it joins at the end of a step, and takes over layers."""
    lease_seconds: float = Field(3.0, gt=0, le=1e5)
    """A node that is silent for longer is lost, be it stopped or cut off. One whose process ends is noticed at once."""
    fence_seconds: float = Field(10.0, gt=0, le=1e5)
    """What a process has to stop what it computes when others were lost; who hangs longer is killed."""
    fewest_nodes: int = Field(1, ge=1)
    """With fewer the run ends, with exit code 75: start it again when there are more."""
