"""The `parallel:` section of the YAML file: parallel layouts, pipeline schedule and communication timeouts."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dilatant.config.base import AnyPath, Section

WORDS = {"auto": True, "single": False}
"""Words that may replace the section, with the value of `auto` that each stands for."""


class UnitParallelism(Section):
    """Layout of one unit: `replicas` chains of `pp` groups of `tp * cp` ranks, each group with `chunks` stages."""

    replicas: int = Field(1, ge=1)
    """Data parallelism: copies that divide the samples among them."""
    tp: int = Field(1, ge=1)
    """Tensor parallelism: ranks that shard each layer."""
    cp: int = Field(1, ge=1)
    """Context parallelism: ranks that split the tokens of each sample."""
    ep: int = Field(1, ge=1)
    """Expert parallelism: ranks that hold different experts; tokens are exchanged between them. A divisor of
    `tp * cp`: ranks of one stage; a multiple of it: those of several `replicas`. A multiple of `tp`. With 1, every rank
    holds all experts, sharded by `tp` like other layers."""
    pp: int = Field(1, ge=1)
    """Pipeline parallelism: groups of ranks that a sample passes through."""
    chunks: int = Field(1, ge=1)
    """Stages per group: a sample passes through the groups this many times (interleaved, or virtual, stages), which
    shortens warm-up and drain and sends more messages. The default schedule is then `interleaved`."""
    cuts: tuple[int, ...] | None = None
    """First layer of each of the `pp * chunks` stages, beginning with 0. Default: cuts that balance the stages' seconds
    by the cost model, in which frozen layers, embedding and head have their own costs (as in plans); a resumed run
    keeps its cuts."""


class ParallelConfig(Section):
    """The source of the layout: `auto`, `units` or `plan`."""

    auto: bool | None = None
    """Plan for the available devices, print the plan and its reasons, and train with it (short: `parallel: auto`);
    `false` trains in one process (`parallel: single`). Default, without `units` and `plan`: planned if this machine has
    several GPUs or a launcher started several processes, else one process."""
    units: dict[str, UnitParallelism] | None = None
    """A layout for each unit, including `language`."""
    colocated: dict[str, str] = Field(default_factory=dict)
    """Units that run on the ranks of another unit (`audio: language`): stage by stage, or without an entry in `units`
    on the ranks of the other unit's first stage."""
    plan: AnyPath | None = None
    """A plan file written by `dilatant plan`, instead of `units`."""
    microbatches: int | None = Field(None, ge=1)
    """Least number of microbatches per step and replica of the language model. Default: as planned, else 4."""
    schedule: Literal["gpipe", "1f1b", "half-eager", "eager", "interleaved", "zb-h1", "zb-h2"] | None = None
    """The pipeline schedule; see docs/schedules.md. Default: as planned, else `eager`, or `interleaved` with
    `chunks`."""
    placement: Literal["auto", "contiguous"] = "auto"
    """Distribution of a row's tokens over the language model's `cp` ranks. `auto`: chosen for each row by its mask (one
    part per rank, two parts from both ends, or blocks dealt by their work); `contiguous`: one part per rank."""
    check_transport: bool = False
    """Send a header with every message to verify that both ends agree on it. Slower; for debugging."""
    timeout_seconds: float = Field(600.0, gt=0, le=1e6)
    """Seconds that a rank waits for another one before the run ends with an error that names the unresponsive ranks."""

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        if value is None:
            return {}
        if isinstance(value, str):
            if value not in WORDS:
                raise ValueError(f"it may be {' or '.join(map(repr, WORDS))}, or a section with 'units' or 'plan'")
            return {"auto": WORDS[value]}
        return value

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        layouts = [name for name in ("auto", "units", "plan") if getattr(self, name) is not None]
        if len(layouts) > 1:
            raise ValueError(
                "give one of 'auto' (planned here), 'units' (a layout for each unit) and 'plan' (a plan file), not "
                + " and ".join(repr(name) for name in layouts)
            )
        if self.colocated and self.units is None:
            raise ValueError(
                "'colocated' goes with 'units'; a plan, from a file or made here, says itself what shares ranks"
            )
        return self

    @property
    def is_laid_out(self) -> bool:
        """Return True if the user gives the layout."""
        return self.units is not None or self.plan is not None

    @property
    def is_cut_here(self) -> bool:
        """Return True if the user leaves the cuts between stages to the run."""
        return any(unit.cuts is None and unit.pp * unit.chunks > 1 for unit in (self.units or {}).values())
