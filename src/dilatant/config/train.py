"""`train:` and `evaluation:` in the YAML file: how long, how fast, how often to save and to look."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dilatant.config.base import Section
from dilatant.config.recompute import Recompute

LOSS = "loss"
METRICS = ("exact_match", "anls", "wer")
_OWN_METRIC = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_Decay = Annotated[float, Field(ge=0, lt=1)]


class GroupOverride(Section):
    """What differs for a group of weights; see `OptimizerConfig.groups`."""

    learning_rate: float | None = Field(None, ge=0, allow_inf_nan=False)
    """NAME is a unit (`vision`), a part (`vision.projector`) or a pattern of parameter names; of several that fit, the
    last written counts."""
    weight_decay: float | None = Field(None, ge=0, allow_inf_nan=False)


class OptimizerConfig(Section):
    """AdamW."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit`: moments take a byte each (bitsandbytes, `pip install 'dilatant[8bit]'`; GPUs only)."""
    learning_rate: float = Field(1e-4, gt=0, allow_inf_nan=False)
    """Of AdamW, at its peak; as `weight_decay`, `betas` and `eps` in torch."""
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False)
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    ema: float | None = Field(None, gt=0, lt=1)
    """Keep an average of the weights besides, of which each step keeps this share (0.999), less in the first steps.
    Evaluations judge it and exports are of it; training goes on with the weights."""
    offload: bool = False
    """Keep fp32 masters and moments in the host's memory and update there: a GPU then holds weights and gradients only.
    Slower; refused without a GPU, where they are in the host's memory anyway."""
    groups: dict[str, GroupOverride] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_way_to_save(self) -> Self:
        if self.offload and self.name != "adamw":
            raise ValueError(
                f"'offload' keeps fp32 moments on the host, 'name: {self.name}' 8-bit ones on the GPU; give one"
            )
        return self


class RateSchedule(Section):
    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    final_ratio: float = Field(0.0, ge=0, le=1)
    """The last learning rate as a share of the peak."""


class TrainConfig(Section):
    steps: int | None = Field(None, gt=0)
    """Optimizer steps in all, those before a resume included."""
    epochs: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Passes over the training data, when `steps` is not given. Default: 1."""
    global_batch_size: int = Field(32, gt=0, le=1 << 24)
    """Samples of one optimizer step, over all devices."""
    row_tokens: int | None = Field(None, gt=0)
    """Most language-model tokens of one packed microbatch. Default: `data.max_length`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: RateSchedule = RateSchedule()
    zero: Literal["none", "node", "all"] | None = None
    """Who shares the optimizer state of a weight (ZeRO stage 1): nobody, the ranks of a node that hold it, or all that
    do. With `all` a lost rank takes state along, so that a run can only go on from a checkpoint. Default: what the plan
    says, which is the fastest (never `all` with `resilience.enabled`); without a plan `node`."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients are clipped to this norm over the whole model; `null`: not."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What happens at a loss or gradient that is not finite, which is never applied: the run stops and names the
    samples, or goes on without the update and counts it."""
    deterministic: bool = False
    """Losses and weights are the same to the bit under any number of replicas and cuts into stages, also if some are
    lost: every sample is a microbatch, and gradients are added up as integers. Slower, and takes 8 bytes more for each
    weight that trains. Not with tied weights whose layers come to lie together or apart, nor across tp, cp or ep."""
    device: Literal["auto", "cpu"] = "auto"
    """`auto`: GPUs where there are any; `cpu`: never."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto`: bf16 on a GPU that has it, fp32 on a CPU. In bf16 weights, activations and
    what travels are bf16; gradients, the optimizer's master weights and its moments are fp32."""
    recompute: Recompute | dict[str, Recompute] | None = None
    """What the backward computes again, for all units or by unit (`{vision: block}`; others `none`). `block`: only the
    input of each block is kept; `block_keep_attention`: that and what attention made, which is not computed twice.
    Default: what the plan says of each block, which is as little as fits memory; without a plan `none`."""
    loss_chunk: int | None = Field(1024, gt=0)
    """Targets whose logits exist at once: with more in a microbatch the head runs again for each chunk in the backward.
    `null`: all logits are kept."""
    logging_steps: int = Field(1, gt=0)
    """Steps between lines of metrics.jsonl."""
    save_steps: int | None = Field(500, gt=0)
    """Steps between checkpoints. A last one is always written, also when the run is stopped or the data are wrong;
    `null`: only that one."""
    keep_checkpoints: int = Field(2, gt=0)
    """The newest ones stay, older ones are deleted."""
    resume: str = "never"
    """`never`, `auto` (newest valid checkpoint of `output_dir`, if any), or a checkpoint folder."""
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """Trackers, besides metrics.jsonl: one name or a list; `none`, `[]` or null for none."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_or_more(cls, given: object) -> object:
        if given in (None, "none", ["none"]):
            return ()
        return (given,) if isinstance(given, str) else given


class EvaluationConfig(Section):
    """Loss and metrics of held-out answers (`data.eval`, or `data.val_size`): after training, and every `steps`."""

    steps: int | None = Field(None, gt=0)
    """Steps between evaluations. Default: only after training."""
    limit: int | None = Field(None, gt=0)
    """Use only the first held-out samples of each data set."""
    batch_size: int = Field(64, gt=0)
    """Samples at once."""
    max_new_tokens: int = Field(16, gt=0)
    """The longest answer that is written."""
    metrics: tuple[str, ...] = ("exact_match",)
    """Besides the loss: `exact_match`, `anls` (similarity of texts, as of DocVQA), `wer` (errors a word), or one of
    yours as `module:function`, declared with `@dilatant.metric`, which is given the expected and the written answers as
    lists of text and returns a number. All but `exact_match` need whole answers, which take a forward pass for every
    few tokens."""
    keep_best: str | None = None
    """Keep the checkpoint at which this figure was best (`loss`, or one of `metrics`), and export that one. Needs
    `steps`."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether `keep_best` is better when it is smaller. `auto` knows the figures that are not yours."""
    patience: int | None = Field(None, gt=0)
    """Stop after so many evaluations without a better `keep_best`."""
    min_delta: float = Field(0.0, ge=0, allow_inf_nan=False)
    """By how much a figure must be better to count as better."""

    @field_validator("metrics", mode="before")
    @classmethod
    def _one_or_more(cls, given: object) -> object:
        return (given,) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _best_is_known(self) -> Self:
        for name in self.metrics:
            if name not in METRICS and not _OWN_METRIC.fullmatch(name):
                raise ValueError(
                    f"'metrics' has {name!r}; there are {', '.join(METRICS)}, and yours as module:function"
                )
        if len(set(self.metrics)) < len(self.metrics):
            raise ValueError("'metrics' names one of them twice")
        best = self.keep_best
        if best is None:
            lacking = [key for key in ("patience", "min_delta") if getattr(self, key)]
            if lacking or self.mode != "auto":
                raise ValueError(
                    f"{(lacking or ['mode'])[0]!r} is about 'keep_best'; give that, too: keep_best: loss"
                )
            return self
        if best not in (LOSS, *self.metrics):
            raise ValueError(f"'keep_best' is {best!r}; give one of {', '.join((LOSS, *self.metrics))}")
        if self.steps is None:
            raise ValueError("'keep_best' needs 'steps', between the evaluations of which it chooses")
        if self.mode == "auto" and best not in (LOSS, *METRICS):
            raise ValueError(
                f"'keep_best' is your {best!r}; say 'mode: max' or 'mode: min', which of them is better"
            )
        return self

    @property
    def smaller_is_better(self) -> bool:
        """Of the figure `keep_best`."""
        return self.mode == "min" or (self.mode == "auto" and self.keep_best in (LOSS, "wer"))
