"""`parallel:` in the YAML file: which processes hold which layers, and in which order they work."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dilatant.config.base import Section

WORDS = {"auto": True, "single": False}
"""What `parallel:` may be in place of a section, and the value of `auto` it stands for."""


class UnitParallelism(Section):
    """How one unit is laid out: `replicas` chains of `pp` groups of `tp * cp` ranks, each with `chunks` stages."""

    replicas: int = Field(1, ge=1)
    """Copies that share the samples (data parallelism)."""
    tp: int = Field(1, ge=1)
    """Tensor parallelism: ranks that share each layer."""
    cp: int = Field(1, ge=1)
    """Context parallelism: ranks that share each sample."""
    ep: int = Field(1, ge=1)
    """Expert parallelism: ranks, of the `tp * cp` of each stage, that have different experts, to which tokens travel.
    A multiple of `tp`. With 1 all experts are on every rank, divided by `tp` like other layers."""
    pp: int = Field(1, ge=1)
    """Pipeline parallelism: groups of ranks that a sample goes through."""
    chunks: int = Field(1, ge=1)
    """Stages of each group: a sample goes round the groups this often (interleaved, virtual pipeline stages), which
    shortens warm-up and drain and sends more messages. The default schedule is then `interleaved`."""
    cuts: tuple[int, ...] | None = None
    """The first layer of each of the `pp * chunks` stages, beginning with 0. Default: where the cost model's seconds
    are most even, frozen layers, embedding and head at what they cost (as plans are cut); a run that goes on keeps its
    cuts."""


class ParallelConfig(Section):
    """Who says which process holds what: `auto`, `units` or `plan`."""

    auto: bool | None = None
    """Plan for the devices at hand, say what was planned and why, and train with that (`parallel: auto` for short);
    `false` trains in one process (`parallel: single`). Default, without `units` and `plan`: planned where this machine
    has several GPUs or a launcher started several processes, else one process."""
    units: dict[str, UnitParallelism] | None = None
    """A layout for each unit, `language` included."""
    colocated: dict[str, str] = Field(default_factory=dict)
    """Units without ranks of their own: they run on those of another unit, stage by stage (`audio: language`);
    without an entry in `units`, on those of its first stage."""
    plan: str | None = None
    """A plan file, as `dilatant plan` writes it, instead of `units`."""
    microbatches: int | None = Field(None, ge=1)
    """Microbatches of each replica of the language model in a step, at least. Default: as planned, else 4."""
    schedule: Literal["gpipe", "1f1b", "half-eager", "eager", "interleaved", "zb-h1", "zb-h2"] | None = None
    """In which order a rank works; see docs/schedules.md. Default: as planned, else `eager`, or
    `interleaved` with `chunks`."""
    placement: Literal["auto", "lpt", "zigzag", "contiguous", "document_affine"] = "auto"
    """Which tokens of a row each rank of the language model has with `cp`. `auto`: of each row as its mask asks;
    `zigzag`: two parts, one from either end; `contiguous`: one part; `document_affine`: neighbouring tokens of samples;
    `lpt`: blocks, the heaviest first."""
    check_transport: bool = False
    """Prove with a header that both ends of every message mean the same. Slower; for debugging."""
    timeout_seconds: float = Field(600.0, gt=0, le=1e6)
    """How long a rank waits for another one before the run ends with an error that tells who is silent."""

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        if value is None:
            return {}
        if isinstance(value, str):
            if value not in WORDS:
                raise ValueError(
                    f"it may be {' or '.join(map(repr, WORDS))}, or a section with 'units' or 'plan'"
                )
            return {"auto": WORDS[value]}
        return value

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        given = [name for name in ("auto", "units", "plan") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                "give one of 'auto' (planned here), 'units' (a layout for each unit) and 'plan' (a plan file), not "
                + " and ".join(repr(name) for name in given)
            )
        if self.colocated and self.units is None:
            raise ValueError(
                "'colocated' goes with 'units'; a plan, from a file or made here, says itself what shares ranks"
            )
        return self

    @property
    def is_laid_out(self) -> bool:
        """Whether the user says which rank holds what."""
        return self.units is not None or self.plan is not None

    @property
    def is_cut_here(self) -> bool:
        """Whether the user leaves to the run where stages begin."""
        return any(unit.cuts is None and unit.pp * unit.chunks > 1 for unit in (self.units or {}).values())
