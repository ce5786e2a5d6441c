"""The `debug:` section of the YAML file: knobs of experiments and tests, which may change in any version."""

from __future__ import annotations

from pydantic import Field

from dilatant.config.base import Section


class DebugConfig(Section):
    """Settings that no run needs: for experiments, and for tests that must end early."""

    planned_samples: int = Field(4096, gt=0)
    """Samples to plan with, in training order."""
    planned_steps: int = Field(4, gt=0)
    """Global batches on which every finalist is simulated."""
    finalists: int = Field(24, gt=0)
    """Maximum number of candidates that a search simulates, the most promising first."""
