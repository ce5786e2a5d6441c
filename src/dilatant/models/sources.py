"""Sources of transformers models: an instance, a config, or an id."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils import logging as transformers_logging

from dilatant.config.errors import UserError, as_user_error, file_errors, list_problems, one_line
from dilatant.config.files.own_files import read_text
from dilatant.models.core.geometry import PATCH_MERGER_ENCODERS
from dilatant.models.core.structure import DEPTH_KEYS, on_meta
from dilatant.models.core.weight_files import named_if_damaged, require_finite, unlike_tie
from dilatant.models.families.families import FAMILIES

HUB_TIMEOUT_SECONDS = 10.0
MOST_BLOCKS = 1_000
"""Limit against mistakes and traps: allocating more blocks alone would take minutes."""
MOST_CONFIG = 16 << 20
"""Maximum bytes of a config.json; transformers takes half a minute for 200 MB."""
_ENCODER_INPUTS = ("pixel_values", "input_features", "input_values")
_WIDTHS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_UNLISTED = {
    "qwen2_vl_vision": ("transformers.models.qwen2_vl.modeling_qwen2_vl", "Qwen2VisionTransformerPretrainedModel")
}
"""Encoders that transformers' AutoModel does not list: module and class."""
_ENCODER_CONFIG_KEYS = ("vision_config", "audio_config")


def load_language_model(source: Any, where: str = "language_model", **options: Any) -> PreTrainedModel:
    """Load a causal language model with its head.

    source: a transformers model, returned unchanged; a config or mapping with `model_type`, built on the meta device
    (see `materialize`); or an id or folder, loaded with its weights. options: dtype (default: fp32 from a config, as
    saved from an id), attn_implementation (default: sdpa if the family has it, else eager), trust_remote_code. Raises
    UserError that begins with `where`.
    """
    model = _load(source, where, _build_language_model, _pretrained_language_model, options)
    if model.get_input_embeddings() is None or model.get_output_embeddings() is None:
        raise UserError(f"{where}: {type(model).__name__} has no language-model head; give a ...ForCausalLM model")
    return model


def load_encoder(source: Any, where: str = "encoder", **options: Any) -> PreTrainedModel:
    """Load an encoder; of a composite model, only the vision or audio part. See `load_language_model`."""
    model = _load(source, where, _build_encoder, _pretrained_encoder, options)
    if model.main_input_name not in _ENCODER_INPUTS and model.config.model_type not in PATCH_MERGER_ENCODERS:
        raise UserError(
            f"{where}: {type(model).__name__} reads {model.main_input_name!r}, so it is not an encoder of images or "
            "audio"
        )
    return model


def parse_config(settings: Mapping[str, Any], where: str) -> PreTrainedConfig:
    """Build a transformers config from `model_type` and settings. Raises UserError for unknown types, keys, values."""
    settings = dict(settings)
    _refuse_absurd(settings, where)
    model_type = settings.pop("model_type", None)
    if model_type not in CONFIG_MAPPING_NAMES:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING_NAMES), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "see the model types of transformers"
        raise UserError(f"{where}: transformers has no model_type {model_type!r}; {hint}")
    config_class = CONFIG_MAPPING[model_type]
    known = {*config_class().to_dict(), *getattr(config_class, "attribute_map", {})} - {"model_type"}
    unknown = []
    for key in settings:
        if key not in known and not _is_read_by_the_model(config_class, key):
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            unknown.append(f"{key!r} is not a setting of {model_type}{hint}")
    if unknown:
        raise list_problems(f"{where}:", unknown)
    with as_user_error(f"{where}: {model_type} refuses these settings"):
        return config_class(**settings)


def _plain_config(path: Path, where: str) -> Any:
    what = f"{where}: {str(path)!r} cannot be read, download it again"
    if not path.exists():
        raise UserError(f"{what}: it is a broken link")
    with file_errors(what), as_user_error(what, ValueError, RecursionError):
        return json.loads(read_text(path, MOST_CONFIG))


def _refuse_absurd(settings: Any, where: str) -> None:
    """Raise UserError for settings that make no model, nested ones of encoders included: absurdly many blocks, zero
    width, heads that do not share keys evenly, what is no number."""
    if not isinstance(settings, Mapping):
        return
    for key, value in settings.items():
        if key in DEPTH_KEYS and isinstance(value, int | float) and not value <= MOST_BLOCKS:
            raise UserError(f"{where}: {key} is {value:,}; a model has {MOST_BLOCKS:,} blocks at most")
        if key in _WIDTHS and isinstance(value, int | float) and value < 1:
            raise UserError(f"{where}: {key} is {value}; it must be at least 1")
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"{where}: {key} is {value}; it must be a number")
        if str(key).endswith("_config"):
            _refuse_absurd(value, where)
    heads, shared = (settings.get(key) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        raise UserError(
            f"{where}: num_key_value_heads is {shared}; it must divide num_attention_heads, which is {heads}"
        )


def _is_read_by_the_model(config_class: type[PreTrainedConfig], key: str) -> bool:
    """Return True for a setting that the model reads but its config class lacks (SigLIP's vision_use_head)."""
    try:
        module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
        return re.search(rf"""(config\.|["']){re.escape(key)}\b""", inspect.getsource(module)) is not None
    except (ImportError, OSError):
        return False


def _load(
    source: Any,
    where: str,
    build: Callable[..., PreTrainedModel],
    pretrained: Callable[..., PreTrainedModel],
    options: Mapping[str, Any],
) -> PreTrainedModel:
    if isinstance(source, PreTrainedModel):
        return source
    if isinstance(source, PreTrainedConfig | Mapping):
        config = source if isinstance(source, PreTrainedConfig) else parse_config(source, where)
        return build(config, where, **options)
    if isinstance(source, str | Path):
        return pretrained(str(source), where, **options)
    raise UserError(f"{where}: give a transformers model, a config or an id, not {type(source).__name__}")


def _build_language_model(config: PreTrainedConfig, where: str, **options: Any) -> PreTrainedModel:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{where}: {config.model_type!r} is not a causal language model")
    return _on_meta(AutoModelForCausalLM.from_config, config, where, **options)


def _build_encoder(config: PreTrainedConfig, where: str, **options: Any) -> PreTrainedModel:
    tower = encoder_config(config)
    encoder_class = _class_of(tower, where)

    def construct(config: PreTrainedConfig, **kwargs: Any) -> PreTrainedModel:
        model = encoder_class._from_config(config, **kwargs)
        return model.get_encoder() if config.is_encoder_decoder else model

    return _on_meta(construct, tower, where, **options)


def _on_meta(
    construct: Callable[..., PreTrainedModel],
    config: PreTrainedConfig,
    where: str,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    with as_user_error(f"{where}: {config.model_type} cannot be built"), on_meta():
        model = construct(config, attn_implementation=attn_implementation, dtype=dtype or torch.float32)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if not weight.is_meta:  # the memory of torch.FloatTensor(...) has no values yet
                setattr(module, name, nn.Parameter(weight.to("meta"), weight.requires_grad))
    return model


def _pretrained_language_model(name: str, where: str, **options: Any) -> PreTrainedModel:
    config = load_pretrained_config(name, where, options.get("trust_remote_code", False))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None):
        whole = "; a whole model goes under model.id" if config.model_type in FAMILIES else ""
        raise UserError(f"{where}: {name!r} is of type {config.model_type!r}, not a causal language model{whole}")
    model, missing = _from_pretrained(AutoModelForCausalLM, name, where, config, options)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        tie = ""
        if missing == ["lm_head.weight"]:
            tie = "write tie_word_embeddings: true in its config.json if the head is the embedding, "
        raise UserError(
            f"{where}: {name!r} lacks {missing[0]!r}{more} of the weights of its model; {tie}fetch it again, or begin "
            "with random weights (config)"
        )
    return model


def _pretrained_encoder(name: str, where: str, **options: Any) -> PreTrainedModel:
    config = load_pretrained_config(name, where, options.get("trust_remote_code", False))
    tower = encoder_config(config)
    loader: Any = AutoModel
    if tower is not config or (type(config) not in MODEL_MAPPING and config.model_type in _UNLISTED):
        loader = _class_of(tower, where)
    elif config.is_encoder_decoder:
        with torch.device("meta"):
            encoder_class = type(AutoModel.from_config(config).get_encoder())
        if encoder_class.__name__ in (config.architectures or ()):
            loader = encoder_class
    model, missing = _from_pretrained(loader, name, where, tower, options)
    if missing:  # often an unused pooler
        warnings.warn(
            f"{where}: {name!r} lacks {len(missing)} weights of its encoder ({missing[0]}, ...); they begin at random",
            stacklevel=2,
        )
    return model.get_encoder() if loader is AutoModel and config.is_encoder_decoder else model


def _class_of(config: PreTrainedConfig, where: str) -> Any:
    """Return the class of an encoder. Raises UserError."""
    if type(config) in MODEL_MAPPING:
        return MODEL_MAPPING[type(config)]
    if config.model_type not in _UNLISTED:
        raise UserError(f"{where}: {config.model_type!r} is not an encoder that transformers can build alone")
    module, name = _UNLISTED[config.model_type]
    return getattr(importlib.import_module(module), name)


def load_pretrained_config(name: str, where: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the config of an id or folder, cache first. Raises UserError, without long retries when offline."""
    if os.path.isfile(name):
        raise UserError(f"{where}: {name!r} is a file; name the folder that it is in")
    if os.path.isdir(name) and not os.path.lexists(Path(name) / "config.json"):
        found = ""
        if (Path(name) / "adapter_config.json").is_file():
            found = "; it is an adapter: write 'model.lora.adapter' for it, and the id of its model here"
        elif (Path(name) / ".metadata").is_file():
            found = "; copy config.json and the tokenizer of its model beside the checkpoint of torch"
        raise UserError(f"{where}: folder {name!r} has no config.json, so it is not in the Hugging Face layout{found}")
    if os.path.isdir(name):
        settings = _plain_config(Path(name) / "config.json", where)
        if not isinstance(settings, Mapping) or not isinstance(settings.get("model_type", ""), str):
            raise UserError(f"{where}: the config.json of {name!r} is no object with a model_type; download it again")
        _refuse_absurd(settings, where)
    config = _parsed(name, where, trust_remote_code)
    unread = [key for key in ("text_config", *_ENCODER_CONFIG_KEYS) if isinstance(getattr(config, key, None), Mapping)]
    if unread and not trust_remote_code:
        raise UserError(
            f"{where}: the config.json of {name!r} has a {unread[0]}, which its model_type {config.model_type!r} does "
            f"not read; write the model_type of the whole model there, or remove {unread[0]}"
        )
    return config


def _parsed(name: str, where: str, trust_remote_code: bool) -> PreTrainedConfig:
    local = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        return AutoConfig.from_pretrained(name, **local)
    except OSError:
        _require_on_hub(name, where)
    except Exception as error:
        raise _unreadable(name, where, error) from None
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _unreadable(name, where, error) from None


def _unreadable(name: str, where: str, error: Exception) -> UserError:
    if "trust_remote_code" not in str(error):
        return UserError(f"{where}: {name!r} cannot be read: {one_line(error)}")
    return UserError(
        f"{where}: {name!r} brings code of its own, which is not run: name a copy of it in transformers' layout (often "
        "with -hf in its id), or, under model.language_model or model.encoders, set trust_remote_code: true beside it"
    )


def _require_on_hub(name: str, where: str) -> None:
    """Raise UserError if an id that is not cached is not on the hub, or the hub is unreachable."""
    from huggingface_hub import constants, model_info
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    absent = f"{where}: model {name!r} is neither a local folder nor in the Hugging Face cache"
    remedy = "give a folder in the Hugging Face layout, or download the model first (`hf download`; "
    remedy += "`--exclude '*.safetensors'` is enough to plan)"
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{absent}, and HF_HUB_OFFLINE is set; {remedy}")
    try:
        model_info(name, timeout=HUB_TIMEOUT_SECONDS)
    except HFValidationError:
        raise UserError(f"{absent}, and it is not a valid id (name or owner/name); {remedy}") from None
    except GatedRepoError:
        raise UserError(f"{absent}; it is gated on the hub: accept its terms there and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise UserError(f"{absent}, and the hub has no such model (or it is private: set HF_TOKEN)") from None
    except Exception as error:
        raise UserError(f"{absent}, and the hub cannot be reached ({one_line(error)}); {remedy}") from None


def _from_pretrained(
    loader: Any, name: str, where: str, config: PreTrainedConfig, options: Mapping[str, Any]
) -> tuple[PreTrainedModel, list[str]]:
    """Return a model, and the keys of weights that its files lack and that are random; transformers' own report of
    missing and unused weights is suppressed. Raises UserError."""
    what = f"{where}: the weights of {name!r} cannot be loaded"
    with named_if_damaged(what, name), without_bars(name), errors_alone():
        model, found = loader.from_pretrained(
            name,
            config=config,
            dtype=options.get("dtype") or "auto",
            attn_implementation=options.get("attn_implementation"),
            output_loading_info=True,
            **({"trust_remote_code": True} if options.get("trust_remote_code") else {}),
        )
    check_loaded(model, f"{where}: {name!r}")
    return model, sorted(found["missing_keys"])


def check_loaded(model: PreTrainedModel, place: str) -> None:
    """Raise UserError for damaged weights of a loaded model. They are not finite, or unlike although the config ties
    them: transformers keeps both, and ranks that read by name would keep one. place: beginning of the error."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    require_finite(weights.items(), place)
    for key, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if weights.get(key) is not weights.get(other):
            raise unlike_tie(place, key, other)


@contextmanager
def errors_alone() -> Iterator[None]:
    """Suppress transformers' warnings, such as those of ids outside a small vocabulary."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@contextmanager
def without_bars(source: str | Path) -> Iterator[None]:
    """Suppress transformers' progress bars for local reads and writes, which break the surrounding output. source: the
    source or destination of a model; downloads from the hub still show their bar on a terminal."""
    is_download = not Path(source).is_dir() and sys.stderr is not None and sys.stderr.isatty()
    if is_download or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def encoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the vision or audio config inside a composite config (CLIP, SigLIP); otherwise the config itself."""
    towers = [getattr(config, key) for key in _ENCODER_CONFIG_KEYS if getattr(config, key, None) is not None]
    return towers[0] if towers else config
