"""Training engine for verl: its loop and losses, on any layout.

`external_lib: dilatant.training.engines.verl` in verl's model section registers the engine as `strategy: dilatant`.
Importing this module imports verl.

verl's losses are functions of the log-probabilities of all tokens and of any fields of its batch. A step therefore has
two passes. Forwards give the log-probabilities, and the loss with its derivatives by them. Then the model trains with
the sum of log-probabilities weighted by these derivatives, whose gradient is that of the loss. So losses may combine
tokens in any way, and neither microbatches nor layouts change them. The model runs without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from verl.utils import tensordict_utils
from verl.utils.py_functional import append_to_dict
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import EngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from dilatant.comm.gather import any_rank
from dilatant.comm.joined import JoinedRanks
from dilatant.config import OptimizerConfig, UserError
from dilatant.config.errors import file_errors
from dilatant.config.files.durable import write_durably
from dilatant.data.sample import EncodedSample
from dilatant.models.language.language_stage import LanguageStage
from dilatant.models.language.token_loss import TargetPlaces, TokenLoss
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.plan import ParallelSpec
from dilatant.runtime.state.host_copies import HostCopies
from dilatant.training.optimizers.optimizer import allocate_moments, build_optimizer, optimizer_tensors
from dilatant.training.parallelize import parallelize

UNIT = "language"
BATCH_SETTINGS = ("calculate_sum_pi_squared", "distillation_use_topk", "enable_routing_replay")
"""Settings of a batch that cannot be followed."""


@dataclass
class DilatantEngineConfig(EngineConfig):
    """verl's engine section, `_target_: dilatant.training.engines.verl.DilatantEngineConfig`. layout: of the language
    model, with the keys of `parallel.units`; default: a replica per rank. zero: as `train.zero`. microbatches: at least
    as many per replica; rows have up to `max_token_len_per_gpu` tokens."""

    strategy: str = "dilatant"
    layout: dict[str, int] = field(default_factory=dict)
    zero: str = "none"
    microbatches: int = 1


@dataclass(frozen=True, slots=True)
class _Tempered:
    """Vocabulary of logits at a temperature. of_entropy: `cross_entropy` is minus the entropy, whatever the target."""

    vocabulary: Any
    temperature: float
    of_entropy: bool

    def argmax(self, logits: Tensor) -> Tensor:
        return torch.as_tensor(self.vocabulary.argmax(logits))

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not self.of_entropy:
            return torch.as_tensor(self.vocabulary.cross_entropy(logits / self.temperature, targets))
        return -_entropy((self.vocabulary.whole(logits).float() / self.temperature).log_softmax(-1))


@dataclass(frozen=True, slots=True)
class _Slopes:
    """The derivatives of a loss by log-probabilities and entropies, [tokens of all samples] each, times the number of
    samples, by which the step divides. starts: the first token of each sample, [samples]. All on the rank's device."""

    log_probabilities: Tensor
    entropies: Tensor | None
    starts: Tensor
    temperature: float

    def __call__(self, logits: Tensor, targets: Tensor, of_sample: Tensor, places: TargetPlaces) -> Tensor:
        """Return each position's part of the function with these derivatives."""
        numbers = torch.tensor([int(sample.id) for sample in places.samples], device=logits.device)
        at = self.starts[numbers[places.sample_of]] + places.index - 1
        likely = (logits.float() / self.temperature).log_softmax(-1)
        found = self.log_probabilities[at] * likely.gather(-1, targets[:, None])[:, 0]
        return found if self.entropies is None else found + self.entropies[at] * _entropy(likely)


def _entropy(log_probabilities: Tensor) -> Tensor:
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


class _Mode(BaseEngineCtx):
    """verl's context of training and evaluation; training ends without gradients."""

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if self.mode == "train" and (kind is not None or getattr(self, "zero_grad_on_exit", True)):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, value, trace)


@EngineRegistry.register(model_type="language_model", backend="dilatant", device=["cuda", "cpu"])
class DilatantEngine(BaseEngine):
    """verl's `BaseEngine` for text policies. All ranks are one data-parallel rank of verl's: each gets the whole batch,
    which plan and assignment divide. Raises UserError for settings that cannot be followed."""

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any, **others: Any
    ) -> None:
        super().__init__()
        of_model = {f"model.{name}": model_config.get(name) for name in ("lora_rank", "trust_remote_code")}
        _refuse({**of_model, **others})
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self._slopes: _Slopes
        self.runtime: Any = None  # a `Runtime`, from `initialize` on
        self.optimizer: Any = None
        self._on_host: dict[str, HostCopies] = {}
        self._saved: list[Path] = []
        self._ranks = JoinedRanks()

    def close(self) -> None:
        """Close the runtime and, on rank 0, the store of the ranks. Called by all ranks; verl itself never does."""
        if self.runtime is not None:
            self.runtime.close()
        self._ranks.close()

    def initialize(self) -> None:
        """Open the model with its stored weights, and make a new optimizer. Called by all ranks, perhaps again."""
        if self.runtime is not None:
            self.runtime.close()
        ranks, how = self._ranks.worker, self.engine_config
        model = MultimodalModel({}, self.model_config.local_path)
        model.use_loss(TokenLoss(lambda *position: self._slopes(*position), "verl's loss", lambda sample: 1.0, 4))
        self.runtime = parallelize(
            model,
            {UNIT: ParallelSpec(**(how.layout or {"replicas": ranks.size}))},
            num_microbatches=how.microbatches,
            worker=ranks,
            row_tokens=how.max_token_len_per_gpu,
            precision="auto",
            zero=how.zero,
        )
        self.runtime.train(False)
        self.lr_scheduler: Any = None
        self._on_host = {}
        if not how.forward_only:
            self._make_optimizer()
        self._rest()

    def _make_optimizer(self) -> None:
        rates = self.optimizer_config
        settings = OptimizerConfig(
            learning_rate=rates.lr, weight_decay=rates.weight_decay, betas=tuple(rates.betas), eps=1e-8
        )
        self.optimizer = build_optimizer(self.runtime.owned.parameters, settings, lambda pattern: set())
        warm_up, total = rates.lr_warmup_steps or 0, rates.total_training_steps
        warm_up = warm_up if warm_up > 0 else int(rates.lr_warmup_steps_ratio * total)
        kind = rates.get("lr_scheduler_type", "constant")
        if kind == "cosine":
            lowest = rates.get("min_lr_ratio") or 0.0
            self.lr_scheduler = get_cosine_schedule_with_warmup(self.optimizer, warm_up, total, min_lr_ratio=lowest)
        elif kind == "constant":
            self.lr_scheduler = get_constant_schedule_with_warmup(self.optimizer, warm_up)
        else:
            raise UserError(f"optim.lr_scheduler_type: {kind!r} is not known to strategy: dilatant; constant or cosine")

    # Data parallelism, as verl sees it.

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> Any:
        return self._ranks.alone

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self._ranks.worker.rank == 0

    # Steps.

    def train_mode(self, **settings: Any) -> BaseEngineCtx:
        return _Mode(self, mode="train", **settings)

    def eval_mode(self, **settings: Any) -> BaseEngineCtx:
        return _Mode(self, mode="eval", **settings)

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Return model outputs, loss and metrics of a batch; without `forward_only` gradients are added, too. Called by
        all ranks with the whole batch. Raises UserError for a batch that asks for more."""
        media = data.get("multi_modal_inputs", None)  # of each sample
        has_media = any(map(tensordict_utils.unwrap_non_tensor_data, () if media is None else media))
        _refuse({"multi_modal_inputs": has_media, **{name: _setting(data, name) for name in BATCH_SETTINGS}})
        mask = data["loss_mask"]
        tokens = int((mask.values() if mask.is_nested else mask).sum())
        tensordict_utils.assign_non_tensor(data, batch_num_tokens=tokens, dp_size=1)
        samples, temperature = samples_of(data), _temperature(data)
        offsets = data["input_ids"].offsets()
        trains = not forward_only
        measured = {"log_probs": self._measure(samples, temperature, False).to(offsets.device).requires_grad_(trains)}
        if _setting(data, "calculate_entropy"):
            measured["entropy"] = self._measure(samples, temperature, True).to(offsets.device).requires_grad_(trains)
        output = {name: torch.nested.nested_tensor_from_jagged(each, offsets) for name, each in measured.items()}
        loss, metrics = torch.tensor(1.0), {}
        if loss_function is not None:
            with torch.set_grad_enabled(trains):
                loss, metrics = loss_function(model_output=output, data=data, dp_group=self.get_data_parallel_group())
        if trains:
            if loss.requires_grad:  # else nothing is learned from this batch
                loss.backward()
            device = self._ranks.worker.device
            slopes = {
                name: (torch.zeros_like(each) if each.grad is None else each.grad * len(samples)).to(device)
                for name, each in measured.items()
            }
            starts = offsets[:-1].to(device)
            self._slopes = _Slopes(slopes["log_probs"], slopes.get("entropy"), starts, temperature)
            self.runtime.execute(samples)
        listed: dict[str, Any] = {}
        append_to_dict(listed, metrics)
        return {
            "model_output": {name: each.detach() for name, each in output.items()},
            "loss": [float(loss.detach())],
            "metrics": listed,
        }

    def _measure(self, samples: list[EncodedSample], temperature: float, of_entropy: bool) -> Tensor:
        """Return the log-probability of the token after each one, or the entropy there: [tokens of all samples], 0 at
        each sample's last token."""
        with _tempered(self.runtime.modules, temperature, of_entropy):
            found = self.runtime.log_probabilities(samples)
        return torch.cat([nn.functional.pad(each, (0, 1)) for each in found])

    def optimizer_zero_grad(self) -> None:
        if self.lr_scheduler is not None:
            self.optimizer.zero_grad()
        self.runtime.clear_gradients()

    def optimizer_step(self) -> float:
        """Clip gradients and update the weights, unless the norm is not finite. Returns the norm before."""
        norm = self.runtime.clip_grad_norm_(self.optimizer_config.clip_grad)
        if np.isfinite(norm):
            self.optimizer.step()
            self.runtime.owned.gather()
        else:
            self.optimizer_zero_grad()
        return norm

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    # Weights and state.

    def get_per_tensor_param(self, **settings: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Return the whole weights by the keys of the transformers model, on every rank, which gathers them one by one.
        All ranks iterate to the end."""
        return self._weights(), None

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        with self._awake(optimizer=False):
            for name, tensor in self.runtime.named_weights(everywhere=True):
                yield name, tensor.to(self._ranks.worker.device)

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.get("param_offload"))

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.get("optimizer_offload"))

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move weights with their gradients, and the optimizer, to the host or back to the device in use. Raises
        UserError for another one."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        own, there = self._ranks.worker.device.type, torch.device(device).type
        if there not in (own, "cpu"):
            raise UserError(f"strategy: dilatant is on {own} and moves to the host and back, not to {device}")
        parts = {"model": model, "optimizer": optimizer and self.optimizer is not None}
        for name in (name for name, moves in parts.items() if moves):
            if there == own:
                if name in self._on_host:
                    self._on_host.pop(name).restore()
            elif name not in self._on_host:
                which = () if name == "model" else (self.optimizer,)
                self._on_host[name] = self.runtime.offload(*which, weights=name == "model")

    def _rest(self) -> None:
        """Move to the host what verl wants there between its calls."""
        model = self.is_param_offload_enabled
        self.to("cpu", model=model, optimizer=self.is_optimizer_offload_enabled, grad=model)

    @contextmanager
    def _awake(self, optimizer: bool = True) -> Iterator[None]:
        self.to(self._ranks.worker.device.type, optimizer=optimizer)
        yield
        self._rest()

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **settings: Any,
    ) -> None:
        """Write this rank's weights, moments and schedule into `local_path`. Called by all ranks."""
        _refuse({"hdfs_path": hdfs_path})
        folder = Path(local_path)
        with self._awake(), file_errors(f"checkpoint {local_path!r} cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)
            from safetensors.torch import save

            about = {"plan": self.runtime.plan.to_json(), "schedule": str(self.lr_scheduler.last_epoch)}
            write_durably(self._file(folder), save({k: t.contiguous() for k, t in self._state().items()}, about))
        any_rank(self.runtime.comm, False, "all to have written the checkpoint")
        self._saved = [*(path for path in self._saved if path != folder), folder]
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            self._file(self._saved.pop(0)).unlink(missing_ok=True)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **settings: Any
    ) -> None:
        """Read what `save_checkpoint` wrote under the same layout. Called by all ranks. Raises UserError."""
        _refuse({"hdfs_path": hdfs_path})
        from safetensors import SafetensorError, safe_open

        file = self._file(Path(local_path))
        try:
            with safe_open(file, framework="pt") as reader:
                about = reader.metadata() or {}
                if about.get("plan") != self.runtime.plan.to_json():
                    raise UserError(f"checkpoint {local_path!r} was written under another layout; train with that one")
                kept = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118  # no mapping
        except (OSError, SafetensorError) as error:
            raise UserError(f"checkpoint {local_path!r} cannot be read: {error}") from None
        with self._awake(), torch.no_grad():
            allocate_moments(self.optimizer, {name.partition("/")[2] for name in kept if name.startswith("exp_avg/")})
            for name, tensor in self._state().items():
                tensor.copy_(kept[name])
            self.optimizer.loaded()
            self.runtime.owned.gather()
        schedule, step = self.lr_scheduler, int(about["schedule"])
        schedule.last_epoch = step
        for group, peak, factor in zip(self.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas):
            group["lr"] = peak * factor(step)

    def _file(self, folder: Path) -> Path:
        return folder / f"dilatant-{self._ranks.worker.rank}-of-{self._ranks.worker.size}.safetensors"

    def _state(self) -> dict[str, Tensor]:
        """Return kind/key → what this rank owns of masters and moments; not copies."""
        masters = {f"master/{key}": master.detach() for key, master in self.optimizer.masters.items()}
        moments = optimizer_tensors(self.optimizer).items()
        return masters | {f"{kind}/{key}": each for key, of_key in moments for kind, each in of_key.items()}


def samples_of(data: Any) -> list[EncodedSample]:
    """Return the sequences of verl's batch as samples, in which every token but the first is a target. Their `id` is
    the place in the batch."""
    found = []
    for number, sequence in enumerate(data["input_ids"].unbind()):
        ids = sequence.cpu().numpy().astype(np.int64)
        labels = ids.copy()
        labels[:1] = -100
        found.append(EncodedSample(str(number), ids, labels, sizes={UNIT: len(ids)}, draw=number))
    return found


@contextmanager
def _tempered(modules: Mapping[int, Any], temperature: float, of_entropy: bool) -> Iterator[None]:
    """Context in which the last stage held here predicts at a temperature; see `_Tempered`."""
    heads = [stage for stage in modules.values() if isinstance(stage, LanguageStage) and stage.span.is_last]
    before = [stage.vocabulary for stage in heads]
    for stage, vocabulary in zip(heads, before, strict=True):
        stage.vocabulary = _Tempered(vocabulary, temperature, of_entropy)  # type: ignore[assignment]
    try:
        yield
    finally:
        for stage, vocabulary in zip(heads, before, strict=True):
            stage.vocabulary = vocabulary


def _setting(data: Any, key: str) -> Any:
    return tensordict_utils.get_non_tensor_data(data=data, key=key, default=None)


def _temperature(data: Any) -> float:
    value = data["temperature"] if "temperature" in data.keys() else 1.0  # noqa: SIM118  # no membership checks there
    values = set(value.flatten().tolist()) if isinstance(value, Tensor) else {float(value)}
    if len(values) > 1:
        raise UserError("strategy: dilatant has one temperature for a batch, and this one has several")
    return max(1e-8, values.pop())


def _refuse(settings: Mapping[str, Any]) -> None:
    """Raise UserError that names the settings which are on."""
    if names := [name for name, value in settings.items() if value]:
        raise UserError(f"strategy: dilatant does not have {', '.join(names)}; leave out, or take another strategy")
