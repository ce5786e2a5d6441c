"""`parallel:` in the YAML file: which processes hold which layers, and in which order they work."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dilatant.config.base import Section


class UnitParallelism(Section):
    """How one unit is laid out: `replicas` chains of `pp` stages of `tp * cp` ranks."""

    replicas: int = Field(1, ge=1)
    """Copies that share the samples (data parallelism)."""
    tp: int = Field(1, ge=1)
    """Tensor parallelism: ranks that share each layer."""
    cp: int = Field(1, ge=1)
    """Context parallelism: ranks that share each sample."""
    pp: int = Field(1, ge=1)
    """Pipeline parallelism: stages."""
    cuts: tuple[int, ...] | None = None
    """The first layer of every stage, beginning with 0. Default: stages of equally many layers."""


class ParallelConfig(Section):
    units: dict[str, UnitParallelism] | None = None
    """A layout for each unit, `language` included."""
    colocated: dict[str, str] = Field(default_factory=dict)
    """Units without ranks of their own: they run on those of another unit, stage by stage (`audio: language`)."""
    plan: str | None = None
    """A plan file, as `dilatant plan` writes it, instead of `units`."""
    microbatches: int | None = Field(None, ge=1)
    """Microbatches of each replica of the language model in a step, at least. Default: as `plan` says, else 4."""
    schedule: Literal["gpipe", "1f1b", "half-eager", "eager", "interleaved", "zb-h1", "zb-h2"] | None = None
    """In which order a rank works; see docs/schedules.md. Default: as `plan` says, else `eager`."""
    check_transport: bool = False
    """Prove with a header that both ends of every message mean the same. Slower; for debugging."""
    timeout_seconds: float = Field(600.0, gt=0)
    """How long a rank waits for another one before the run ends with an error that tells who is silent."""

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        if (self.units is None) == (self.plan is None):
            raise ValueError("give either 'units' (a layout for each unit) or 'plan' (a plan file)")
        if self.plan is not None and self.colocated:
            raise ValueError("'colocated' goes with 'units'; a plan file says itself what shares ranks")
        return self
