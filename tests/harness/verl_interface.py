"""What verl 0.9 says of its engines: the package itself where it is installed, else modules with the same interface.

The stand-ins hold facts (names, signatures, defaults), and as much behaviour as an engine relies on.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

ENGINE = "dilatant.training.engines.verl"
BASE = "verl.workers.engine.base"
PACKAGES = ("verl", "verl.utils", "verl.workers", "verl.workers.engine")


class BaseEngine:
    """The methods that verl's workers call."""

    def initialize(self): ...
    @property
    @abstractmethod
    def is_param_offload_enabled(self) -> bool: ...
    @property
    @abstractmethod
    def is_optimizer_offload_enabled(self) -> bool: ...
    def train_mode(self, **kwargs): ...
    def eval_mode(self, **kwargs): ...
    def optimizer_zero_grad(self): ...
    def optimizer_step(self): ...
    def lr_scheduler_step(self): ...
    def forward_backward_batch(self, data, loss_function: Callable, forward_only=False) -> Any: ...
    def get_per_tensor_param(self): ...
    def get_data_parallel_size(self): ...
    def get_data_parallel_rank(self): ...
    def get_data_parallel_group(self): ...
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True): ...
    def save_checkpoint(
        self, local_path: str, hdfs_path=None, global_step: int = 0, max_ckpt_to_keep=None, **kwargs
    ) -> None: ...
    def load_checkpoint(self, local_path: str, hdfs_path=None, del_local_after_load: bool = True, **kwargs) -> None: ...
    def is_mp_src_rank_with_outputs(self): ...

    def train_batch(self, data, loss_function: Callable) -> Any:
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        outputs["metrics"]["grad_norm"] = self.optimizer_step()
        return outputs


def get_device_name() -> str:
    return "cpu"


class BaseEngineCtx:
    def __init__(self, engine: BaseEngine, mode, **kwargs):
        self.engine, self.mode = engine, mode

    def _context_switch(self, device):
        model, optimizer = self.engine.is_param_offload_enabled, self.engine.is_optimizer_offload_enabled
        if device == "cpu" or model or optimizer:
            trains = self.mode == "train"
            self.engine.to(device=device, model=model, optimizer=optimizer and trains, grad=model and trains)

    def __enter__(self):
        self.engine.mode = self.mode
        self._context_switch(sys.modules[BASE].get_device_name())

    def __exit__(self, exc_type, exc_val, exc_tb):
        self._context_switch("cpu")
        self.engine.mode = None


class EngineRegistry:
    _engines: ClassVar[dict[Any, Any]] = {}

    @classmethod
    def register(cls, model_type: str, backend: list[str] | str, device: list[str] | str = "cuda", vendor=None):
        def decorator(engine_class):
            assert issubclass(engine_class, BaseEngine)
            for one in device if isinstance(device, list) else [device]:
                cls._engines[model_type, backend, one] = engine_class
            return engine_class

        return decorator

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str):
        return cls._engines[model_type, backend, "cpu"]


@dataclass
class BaseConfig:
    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)


@dataclass
class EngineConfig(BaseConfig):
    param_offload: bool = False
    optimizer_offload: bool = False
    forward_only: bool = False
    strategy: str | None = None
    max_token_len_per_gpu: int | None = None


@dataclass
class OptimizerConfig(BaseConfig):
    lr: float = 1e-3
    lr_warmup_steps_ratio: float = 0.0
    total_training_steps: int = -1
    weight_decay: float = 0.01
    lr_warmup_steps: int | None = -1
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad: float = 1.0


@dataclass
class HFModelConfig(BaseConfig):
    """Of the many fields, those that an engine reads."""

    local_path: str = ""
    lora_rank: int = 0
    trust_remote_code: bool = False


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    def factor(step: int) -> float:
        return step / num_warmup_steps if step < num_warmup_steps else 1.0

    return LambdaLR(optimizer, factor, last_epoch)


def get_cosine_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, **more: Any):
    raise NotImplementedError


def append_to_dict(data: dict, new_data: dict, prefix: str = "") -> None:
    for key, value in new_data.items():
        data.setdefault(key, []).append(value)


def assign_non_tensor(tensor_dict: dict, **kwargs: Any) -> None:
    tensor_dict.update(kwargs)


def get_non_tensor_data(data: dict, key: str, default: Any) -> Any:
    return data.get(key, default)


def unwrap_non_tensor_data(data: Any) -> Any:
    return data


STAND_INS: dict[str, tuple[Any, ...]] = {
    BASE: (BaseEngine, BaseEngineCtx, EngineRegistry, get_device_name),
    "verl.workers.config": (EngineConfig,),
    "verl.utils.tensordict_utils": (assign_non_tensor, get_non_tensor_data, unwrap_non_tensor_data),
    "verl.utils.py_functional": (append_to_dict,),
    "verl.utils.torch_functional": (get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup),
}


def batch_of(fields: dict[str, Any]) -> Any:
    """Return what verl's workers make of the fields of a batch; inside `engine_module`."""
    tools = sys.modules["verl.utils.tensordict_utils"]
    if not hasattr(tools, "get_tensordict"):
        return dict(fields)
    tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor | list)}
    return tools.get_tensordict(tensors, {name: value for name, value in fields.items() if name not in tensors})


@contextmanager
def engine_module() -> Iterator[ModuleType]:
    """Import our engine against verl, or against the stand-ins, which go afterwards."""
    with suppress(ImportError):
        importlib.import_module(BASE)
        yield importlib.import_module(ENGINE)
        return
    made = {name: ModuleType(name) for name in (*PACKAGES, *STAND_INS)}
    for name, values in STAND_INS.items():
        for value in values:
            setattr(made[name], value.__name__, value)
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
    sys.modules.update(made)
    try:
        yield importlib.import_module(ENGINE)
    finally:
        for name in (*made, ENGINE):
            sys.modules.pop(name, None)


def calls_that_fail(engine: type) -> list[str]:
    """Return the methods of the interface that the engine lacks, or that cannot be called as the interface says."""
    wrong = []
    for name, fact in vars(BaseEngine).items():
        if name.startswith("_") or name == "train_batch":
            continue
        own = inspect.getattr_static(engine, name)
        if own is fact or not callable(own):
            wrong += [name] if own is fact else []
            continue
        positional = [
            each.name for each in inspect.signature(fact).parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD
        ]
        taken = list(inspect.signature(own).parameters)
        wrong += [name] if taken[: len(positional)] != positional else []
    return wrong
