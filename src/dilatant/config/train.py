"""The `train:` and `evaluation:` sections of the YAML file: steps, optimizer, checkpoints, evaluation."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dilatant.config.base import OWN_NAME, NamedSection, PathRule, Section
from dilatant.config.memory_modes import Compile, Kernels, Precision, Recompute, Shard

LOSS = "loss"
METRICS = ("exact_match", "anls", "wer")
_OWN_METRIC = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
TrackerName = Literal["tensorboard", "wandb", "trackio", "swanlab", "mlflow", "comet_ml"]
_Decay = Annotated[float, Field(ge=0, lt=1)]


class GroupOverride(Section):
    """Settings that differ for a group of weights; see `OptimizerConfig.groups`."""

    learning_rate: float | None = Field(None, ge=0)
    """Learning rate of the group. NAME is a unit (`vision`), a part (`vision.projector`) or a pattern of parameter
    names; if several match, the last one written applies."""
    weight_decay: float | None = Field(None, ge=0)


class MuonConfig(Section):
    """Muon for matrices, beside AdamW for all other weights."""

    weights: tuple[str, ...] = Field(min_length=1)
    """Units, parts or patterns, as in `groups`: their trained matrices within blocks (not embeddings, heads and
    projectors) have orthogonalised updates and one moment."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Its settings `momentum`, `nesterov`, `ns_steps` and `adjust_lr_fn` are as in torch; by default, learning rates
    and weight decay are those that suit AdamW."""
    nesterov: bool = True
    ns_steps: int = Field(5, gt=0, lt=100)
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"


class OptimizerConfig(NamedSection):
    """AdamW and its settings, or the user's own optimizer."""

    WORDS = ("adamw", "adamw_8bit")
    BESIDE = ("ema",)
    name: str = "adamw"
    """`adamw`, or `adamw_8bit`: each moment takes one byte (bitsandbytes, `pip install 'dilatant[8bit]'`; GPUs only).
    Or your own as `package.module.function`, declared with `@dilatant.optimizer`, beside which only `ema` applies;
    `optimizer: package.module.function` is short for that ([python.md](python.md#optimizer-and-schedule))."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate of AdamW; `weight_decay`, `betas` and `eps` are as in torch."""
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    ema: float | None = Field(None, gt=0, lt=1)
    """Also keep an exponential moving average of the weights with this decay (such as 0.999; smaller in the first
    steps). Evaluations and exports use the average; training continues with the weights."""
    offload: bool = False
    """Keep fp32 master weights and moments in host memory and update there: a GPU then holds only weights and
    gradients. Slower; refused without a GPU, since they are in host memory anyway."""
    groups: dict[str, GroupOverride] = Field(default_factory=dict)
    muon: MuonConfig | None = None
    stored_moments: bool = True
    """Go on with AdamW's moments if a checkpoint of torch (DCP) from which the run starts holds them
    ([running.md](running.md)); `false`: begin without."""

    @model_validator(mode="after")
    def _one_way_to_save(self) -> Self:
        if self.muon is not None and (self.offload or self.name != "adamw"):
            with_ = "offload" if self.offload else f"name: {self.name}"
            raise ValueError(f"'muon' goes with AdamW on the device only; leave out {with_!r}")
        if self.offload and self.name != "adamw":
            raise ValueError(
                f"'offload' keeps fp32 moments on the host, 'name: {self.name}' 8-bit ones on the GPU; give one"
            )
        return self


class RateSchedule(NamedSection):
    WORDS = ("cosine", "linear", "constant")
    kind: str = "cosine"
    """Shape of the learning rate's decay after the warm-up: `cosine`, `linear` or `constant`. Or your own function as
    `package.module.function`, declared with `@dilatant.rate_schedule`, instead of all other keys;
    `schedule: package.module.function` is short for that."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    warmup_ratio: float | None = Field(None, ge=0, lt=1)
    """Instead of `warmup_steps`: share of the run's steps, rounded up."""
    final_ratio: float = Field(0.0, ge=0, le=1)
    """Final, and lowest, learning rate as a share of the peak, for each group of weights."""

    @model_validator(mode="after")
    def _is_used_once(self) -> Self:
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError("'warmup_steps' and 'warmup_ratio' both set the warm-up; give one of them")
        if self.final_ratio and self.kind == "constant":
            raise ValueError("'final_ratio' is where a decay ends, and 'kind: constant' has none; leave one out")
        return self

    def warm_up(self, total_steps: int) -> int:
        """Return the number of steps of the warm-up in a run of `total_steps`."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(total_steps * self.warmup_ratio)


class ProfileConfig(Section):
    """Profiler of chosen steps; `{}` only records memory."""

    steps: tuple[int, ...] | None = None
    """First and last step to profile, numbered as in metrics.jsonl, as in `[5, 7]`. Every rank writes a trace of each
    of these steps into `traces/` of the run folder ([how to read them](parallel.md#traces-of-steps))."""
    memory: bool = True
    """On GPUs, record allocations during the whole run, and write a memory snapshot if memory runs out in a step."""

    @field_validator("steps")
    @classmethod
    def _first_and_last(cls, steps: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if steps is not None and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
            raise ValueError(f"{[*steps]} must be the first and the last step, counted from 1, as in [5, 7]")
        return steps


class PreferencesConfig(Section):
    """Training on pairs of a better and a worse answer to one prompt, or on answers with marks; `{}` for DPO."""

    method: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = "dpo"
    """The loss of a pair of answers or, with `kto`, of an answer that is marked as good or bad
    ([preferences.md](preferences.md)). `dpo`, `ipo` and `kto` compare with the model that the run starts from; `simpo`
    and `orpo` need no such reference."""
    beta: float | None = Field(None, gt=0)
    """Scale of the rewards; with `orpo`, weight of the odds ratio. Default: 0.1, with `simpo` 2."""
    gamma: float | None = Field(None, ge=0)
    """With `simpo`: the margin of rewards that a pair should have. Default: 1."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """With `dpo` and `simpo`: the share of pairs whose answers are supposed to be in the wrong order."""
    sft_weight: float | None = Field(None, ge=0)
    """Weight of the mean cross entropy of the chosen answer's tokens, added to the loss of its pair. Default: 0, with
    `orpo` 1. Not with `kto`."""
    desirable_weight: float | None = Field(None, ge=0)
    """With `kto`: the weight of the loss of good answers. Default: 1."""
    undesirable_weight: float | None = Field(None, ge=0)
    """With `kto`: the weight of the loss of bad answers. Default: 1."""
    share_prompt: bool = True
    """Run the prompt and its media once for both answers. `false` runs them for each answer, as some models need."""

    @model_validator(mode="after")
    def _keys_of_the_method(self) -> Self:
        for key, method in (("gamma", "simpo"), ("desirable_weight", "kto"), ("undesirable_weight", "kto")):
            if getattr(self, key) is not None and self.method != method:
                raise ValueError(f"{key!r} is for {method}, and the method is {self.method}; leave it out")
        if self.sft_weight and self.method == "kto":
            raise ValueError("'sft_weight' is for pairs, and the method is kto; leave it out")
        if self.label_smoothing and self.method not in ("dpo", "simpo"):
            raise ValueError(f"'label_smoothing' is for dpo and simpo, not {self.method}; leave it out")
        return self

    @property
    def has_reference(self) -> bool:
        """Return True if the loss needs log-probabilities by the model that the run starts from."""
        return self.method in ("dpo", "ipo", "kto")


class TrainConfig(Section):
    steps: int | None = Field(None, gt=0)
    """Total optimizer steps, including those before a resume."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the training data if `steps` is not given. Default: 1."""
    global_batch_size: int = Field(32, gt=0, le=1 << 24)
    """Samples of one optimizer step, over all devices."""
    row_tokens: int | None = Field(None, gt=0)
    """Maximum language-model tokens of one packed row. Default: `data.max_length`; on GPUs without pipelines,
    the largest of this, 4,096, 8,192 and 16,384 whose predicted memory fits."""
    row_multiple: int | None = Field(None, gt=1)
    """Pad packed rows behind their samples to a multiple of so many tokens, for kernels that are faster on aligned
    lengths (128). Default: no padding."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: RateSchedule = RateSchedule()
    zero: Literal["none", "node", "all"] | None = None
    """Sharding of optimizer state (ZeRO stage 1): none, over the ranks of a node that hold a weight, or over all ranks
    that hold it. With `all`, a lost rank's state is lost too, so that a run continues only from a checkpoint. Default:
    the fastest according to the plan (never `all` with `resilience.enabled`); without a plan `node`."""
    shard: Shard | dict[str, Shard] | None = None
    """What the ranks that share optimizer state (`zero`) shard besides it, for all units that can be sharded or by unit
    (`{language: weights}`; others `none`). `gradients` (ZeRO stage 2): a rank accumulates only its part of the
    gradients. `weights` (ZeRO stage 3, FSDP; with `zero: node` HSDP): it also holds only its part of the weights, and
    gathers those of each block before use, in every microbatch. `weights_by_step`: it gathers them in the first
    microbatch and keeps them until the step ends. Default: `none`, or what a plan chooses for each unit if nothing else
    fits memory or its steps are 5 % faster. Not with `deterministic`; with `resilience.enabled`, ranks of a node share,
    and other nodes hold the same ([parallel.md](parallel.md#sharded-weights-and-gradients))."""
    loss: str | None = Field(None, pattern=OWN_NAME)
    """Your own loss as `package.module.function`, declared with `@dilatant.loss`, in place of the cross entropy
    ([python.md](python.md#loss)). The `loss` of evaluations stays the cross entropy."""
    callbacks: tuple[str, ...] = ()
    """Your own callbacks as `package.module.name`: classes that need no arguments, or objects, declared with
    `@dilatant.callback` ([python.md](python.md#callbacks))."""
    preferences: PreferencesConfig | None = None
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of a token's loss that all tokens of the vocabulary have alike, in training."""
    neftune_noise_alpha: float | None = Field(None, gt=0)
    """NEFTune: uniform noise on token embeddings in training, of this size over the square root of the sample's tokens
    times the width. The same in every layout, as dropout is."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Clip gradients to this norm over the whole model; `null`: no clipping."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a non-finite loss or gradient, which is never applied: stop with an error that names the samples, or
    continue without this update and count it."""
    deterministic: bool = False
    """Make losses and weights bitwise equal for any number of replicas, any cuts into stages and after losses of ranks:
    every sample is a microbatch, and gradients are summed as integers. Slower, with 8 more bytes per trained weight.
    Not across tp, cp or ep, nor for tied weights whose layers are on one stage in one plan but not in another."""
    device: Literal["auto", "cpu"] = "auto"
    """`auto`: GPUs if there are any; `cpu`: never."""
    precision: Precision = "auto"
    """`auto`: bf16 on a GPU that supports it, fp32 on a CPU. With bf16, weights, activations and transferred rows are
    bf16; gradients, master weights and moments are fp32. `fp8`: besides, the linear layers of blocks multiply in FP8
    (E4M3, a scale for each row) in forward and input gradient; adapters, routers, experts, embeddings and heads do not.
    It needs NVIDIA GPUs since Ada; a CPU emulates the rounding. Not yet run on a GPU."""
    recompute: Recompute | dict[str, Recompute] | None = None
    """Activation recomputation in the backward, for all units or by unit (`{vision: block}`; others `none`). `block`:
    keep only the input of each block; `block_keep_attention`: also keep the output of attention; `block_offload`: keep
    the input in host memory. Default: chosen by the plan for each block, as little as fits memory; without a plan
    `none`."""
    compile: Compile = "auto"
    """`blocks`: compile the blocks of every unit with torch.compile. The first step takes longer; blocks that cannot be
    compiled run as before, with a warning. `auto`: none, until compiled steps were tested on a GPU
    ([parallel.md](parallel.md#compiled-and-fused-blocks))."""
    kernels: Kernels = "auto"
    """`liger`: fused norms, gated activations and rotary embeddings of liger-kernel (`pip install 'dilatant[kernels]'`;
    GPUs only) in units that are not compiled. `auto`: none, until steps with it were tested on a GPU."""
    loss_chunk: int | None = Field(1024, gt=0)
    """Maximum target tokens whose logits exist at once; a microbatch with more recomputes the head for each chunk in
    the backward. `null`: keep all logits."""
    logging_steps: int = Field(1, gt=0)
    """Steps between lines of metrics.jsonl."""
    save_steps: int | None = Field(500, gt=0)
    """Steps between checkpoints. A last one is always written, also if the run is stopped or fails on bad data; `null`:
    only that one."""
    keep_checkpoints: int = Field(2, gt=0)
    """Number of newest checkpoints to keep; older ones are deleted."""
    resume: Annotated[str, PathRule(("never", "auto"))] = "never"
    """`never`, `auto` (newest valid checkpoint of `output_dir`, if any), or a checkpoint folder."""
    report_to: tuple[TrackerName, ...] = ("tensorboard",)
    """Experiment trackers besides metrics.jsonl: one name or a list; `none`, `[]` or null for none. All but
    `tensorboard` need the extra of their name, and take account, server and project from their own settings."""
    profile: ProfileConfig | None = None

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        if value in (None, "none", ["none"]):
            return ()
        return (value,) if isinstance(value, str) else value

    @property
    def learns_from(self) -> str:
        """The kind of answers that the run learns from, which checkpoints hold."""
        method = None if self.preferences is None else self.preferences.method
        return {None: "single answers", "kto": "marked answers"}.get(method, "pairs of answers")

    @property
    def shards(self) -> bool:
        """True if the config asks for sharded gradients or weights."""
        words = self.shard.values() if isinstance(self.shard, dict) else (self.shard,)
        return any(word not in (None, "none") for word in words)

    @model_validator(mode="after")
    def _shards_what_can_be_sharded(self) -> Self:
        if self.shards and self.zero == "none":
            raise ValueError(
                "'shard' shards among the ranks that share optimizer state, and 'zero: none' has none; write "
                "'zero: node' or 'all'"
            )
        if self.shards and self.deterministic:
            raise ValueError(
                "'deterministic' sums the whole gradient of every sample, 'shard' holds only parts; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _fuses_once(self) -> Self:
        if self.compile == "blocks" and self.kernels == "liger":
            raise ValueError("'compile: blocks' fuses what 'kernels: liger' would replace; leave one out")
        if self.compile == "blocks" and self.deterministic:
            raise ValueError(
                "'compile: blocks' may round otherwise for rows of other lengths; leave out 'deterministic'"
            )
        return self

    @model_validator(mode="after")
    def _profiles_steps_that_run(self) -> Self:
        steps = None if self.profile is None else self.profile.steps
        if steps and self.steps and steps[0] > self.steps:
            raise ValueError(f"'profile.steps' begin after 'steps: {self.steps}'; name earlier ones")
        return self


class EvaluationConfig(Section):
    """Loss and metrics on held-out data (`data.eval` or `data.val_size`): after training, and every `steps`."""

    steps: int | None = Field(None, gt=0)
    """Steps between evaluations. Default: only after training."""
    limit: int | None = Field(None, gt=0)
    """Number of held-out samples to use of each data set, from the first on."""
    batch_size: int = Field(64, gt=0)
    """Samples per batch."""
    max_new_tokens: int = Field(16, gt=0)
    """Maximum tokens of a generated answer."""
    metrics: tuple[str, ...] = ("exact_match",)
    """Metrics besides the loss: `exact_match`, `anls` (text similarity, as in DocVQA), `wer` (word error rate), or your
    own as `module:function`, declared with `@dilatant.metric`, which gets the expected and the generated answers as
    lists of texts and returns a number. All but `exact_match` need complete answers, which take a forward pass for
    every few tokens."""
    keep_best: str | None = None
    """Keep the checkpoint with the best value of this metric (`loss`, or one of `metrics`), and export it. Needs
    `steps`."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Direction of improvement of `keep_best`: down (`min`) or up (`max`). `auto` works for the built-in metrics."""
    patience: int | None = Field(None, gt=0)
    """Stop after this many evaluations without improvement of `keep_best`."""
    min_delta: float = Field(0.0, ge=0)
    """Smallest change of the metric that counts as an improvement."""

    @field_validator("metrics", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

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
                raise ValueError(f"{(lacking or ['mode'])[0]!r} is about 'keep_best'; give that, too: keep_best: loss")
            return self
        if best not in (LOSS, *self.metrics):
            raise ValueError(f"'keep_best' is {best!r}; give one of {', '.join((LOSS, *self.metrics))}")
        if self.steps is None:
            raise ValueError("'keep_best' needs 'steps', between the evaluations of which it chooses")
        if self.mode == "auto" and best not in (LOSS, *METRICS):
            raise ValueError(f"'keep_best' is your {best!r}; say 'mode: max' or 'mode: min', which of them is better")
        return self

    @property
    def smaller_is_better(self) -> bool:
        """Return True if smaller values of `keep_best` are better."""
        return self.mode == "min" or (self.mode == "auto" and self.keep_best in (LOSS, "wer"))
