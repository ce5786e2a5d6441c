"""Parts of the user's own: put into the config by `dilatant.train`, and found there or by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedConfig, PreTrainedModel

from dilatant.config import Config, OptimizerConfig, RateSchedule, UserError, load_config
from dilatant.config.config import parse_config
from dilatant.config.environment import place_from
from dilatant.config.errors import own_code
from dilatant.config.own_parts import PART_NAMES, PartName, Parts, refuse_missing_part
from dilatant.config.signatures import (
    Declared,
    count_of_loss,
    import_declared,
    require_call,
    takes,
    takes_hidden_states,
)
from dilatant.config.train import LOSS
from dilatant.data.sample import EncodedSample
from dilatant.hf.opened_model import check_opened, write_opened
from dilatant.models.core.loss import smoothed_cross_entropy
from dilatant.models.families.generic import opens_whole
from dilatant.models.language.token_loss import TokenLoss
from dilatant.report.run_folder import RunFolder
from dilatant.report.say import open_console
from dilatant.training.callbacks import CallbackList
from dilatant.training.checkpoints.starting_point import find_start

OPENED = "opened in Python"
"""Id of a model that the user opened, until the run folder that it is written to is known."""


def config_with_parts(config: Config | Mapping[str, Any] | str | Path, parts: Parts, overwrite: bool = False) -> Config:
    """Return the config with these parts in place of its own. A model that the user opened is written into the run
    folder. Raises UserError for an unknown part, and for one that is not what its place needs."""
    of_model = ("model", "processor")
    if unknown := sorted(parts.keys() - {*PART_NAMES, *of_model}):
        raise UserError(f"dilatant.train takes no {unknown[0]!r}; there are {', '.join((*of_model, *PART_NAMES))}")
    own = {name: value for name, value in parts.items() if value is not None and name not in of_model}
    model, processor = parts.get("model"), parts.get("processor")
    if processor is not None and not isinstance(model, PreTrainedModel):
        raise UserError("processor goes with a model that transformers opened; else name it in the config's 'model'")
    if isinstance(config, Config) and not parts and not config.python:
        return config
    if "callbacks" in own:
        own["callbacks"] = CallbackList(cast(Any, own["callbacks"]))
    fill = partial(_fill, own, model)
    if isinstance(config, str | Path):
        filled = load_config(config, prepare=fill)
    else:
        tree = config.model_dump(mode="json") if isinstance(config, Config) else dict(config)
        fill(tree)
        filled = parse_config(tree, Path.cwd())
    _check(filled, own)
    if isinstance(model, PreTrainedModel):
        filled = _with_written_model(filled, model, processor, overwrite)
    return filled.with_own_parts(cast(Any, own))


def _fill(own: Mapping[str, Any], model: Any, tree: dict[str, Any]) -> None:
    """Name the parts in a config's tree. Raises UserError for a part that the run had and `own` lacks."""
    for name in tree.get("python") or ():
        if name not in own:
            refuse_missing_part(name)
    tree["python"] = sorted(own)
    tree["data"] = dict(tree.get("data") or {})
    for name, key in (("train_data", "train"), ("eval_data", "eval")):
        if name in own and tree["data"].pop(key, None):
            warnings.warn(f"{name} takes the place of data.{key}, which is not used", stacklevel=5)
    if isinstance(model, PreTrainedModel):
        model = _with_opened_model(dict(tree.get("model") or {}), model)
    elif isinstance(model, str | Path):
        model = {**(tree.get("model") or {}), "id": str(model)}
    if model is not None:
        if not isinstance(model, Mapping):
            raise UserError(
                f"model is a {type(model).__name__}; give a model of transformers, an id, a folder or a mapping as in "
                "the YAML file (a dilatant.MultimodalModel trains with dilatant.parallelize)"
            )
        tree["model"] = dict(model)


def _with_opened_model(section: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Return the config's `model` with the opened model as a whole model or as the language model; its folder is not
    known yet."""
    place = section
    if section.get("language_model") or not opens_whole(model.config):
        section |= {"id": None, "config": None, "language_model": dict(section.get("language_model") or {})}
        place = section["language_model"]
    place |= {"id": OPENED, "config": None}
    return section


def _with_written_model(config: Config, model: PreTrainedModel, processor: Any, overwrite: bool) -> Config:
    """Write a model into the run folder, and return the config with its folder as the id. Raises UserError, also for a
    folder in which the run would not begin."""
    check_opened(model)
    if (place := place_from()) is not None:
        raise UserError(
            f"{place.launcher} started {place.size} processes, each with a model of its own; save one "
            "(save_pretrained) and pass its folder as model"
        )
    run = RunFolder(config.output_dir)
    folder = run.path / "model"
    try:
        run.lock()
        find_start(config, run, overwrite, open_console(quiet=True))
        write_opened(model, processor, config.model.text.tokenizer, folder, config.train.resume != "never")
    finally:
        run.close()
    source: dict[str, Any] = {"id": str(folder)}
    if config.model.language_model is not None:
        source = {"language_model": config.model.language_model.model_copy(update=source)}
    return config.model_copy(update={"model": config.model.model_copy(update=source)})


def _check(config: Config, own: Mapping[str, Any]) -> None:
    """Raise UserError for parts of the wrong kind, and for keys that a part would make useless."""
    functions = {name: own[name] for name in ("loss", "optimizer", "schedule") if name in own}
    metrics = own.get("metrics", ())
    functions |= {f"metric {number}": metric for number, metric in enumerate(metrics, 1)}
    for name, function in functions.items():
        if not callable(function):
            raise UserError(f"{name} is a {type(function).__name__}; give a function")
    names = [getattr(metric, "__name__", "") for metric in metrics]
    if twice := [
        name for name in names if not name or names.count(name) > 1 or name in (LOSS, *config.evaluation.metrics)
    ]:
        raise UserError(f"metrics: a function needs a name of its own, and {twice[0] or 'one'!r} has none")
    if metrics and not config.holds_out:
        raise UserError("metrics: there is nothing to evaluate on; pass eval_data, or name data.eval or data.val_size")
    if config.train.preferences is not None and (useless := {"loss", "metrics"} & own.keys()):
        raise UserError(f"{min(useless)} is not used with train.preferences; leave one of them out")
    plain = OptimizerConfig(ema=config.train.optimizer.ema)
    for name, key, is_plain in (
        ("optimizer", "train.optimizer", config.train.optimizer == plain),
        ("schedule", "train.schedule", config.train.schedule == RateSchedule()),
    ):
        if name in own and not is_plain:
            raise UserError(f"{key} is not used with {name}=... in Python; leave it out, or give its values there")


def _target_tokens(sample: EncodedSample) -> float:
    return sample.target_tokens


def _one(sample: EncodedSample) -> float:
    return 1.0


def _counted(where: str, count: Callable[[EncodedSample], float], sample: EncodedSample) -> float:
    with own_code(f"{where}: its count failed"):
        return float(count(sample))


COUNTS: Mapping[str, Callable[[EncodedSample], float]] = {"tokens": _target_tokens, "samples": _one}
"""Parts of a sample in the divisors that a loss may name."""


def find_loss(config: Config) -> TokenLoss | None:
    """Return the user's loss, as passed or as `train.loss` names it, or that of `train.label_smoothing`; None for the
    cross entropy. Raises UserError."""
    part, name = config.part("loss"), config.train.loss
    if part is not None and name is not None:
        raise UserError("the loss was passed in Python, and train.loss names another one; leave one of them out")
    smoothing = config.train.label_smoothing
    if smoothing and (part is not None or name is not None):
        raise UserError(
            "train.label_smoothing is for the cross entropy, and the run has a loss of your own; leave one out"
        )
    if smoothing:
        smoothed = partial(smoothed_cross_entropy, smoothing)
        return TokenLoss(smoothed, "train.label_smoothing", _target_tokens)
    if part is None and name is None:
        return None
    function = part.value if part is not None else import_declared("train.loss", str(name), "loss")
    where = "the loss" if name is None else f"train.loss: {name!r}"
    if not callable(function):
        raise UserError(f"{where} is a {type(function).__name__}; give a function of (logits, targets)")
    arguments = next((number for number in (4, 3) if takes(function, number)), 2)
    of_hidden = takes_hidden_states(function)
    given = "hidden_states" if of_hidden else "logits"
    require_call(where, function, *(given, "targets", "sample_targets", "places")[:arguments])
    count = count_of_loss(function) or "tokens"
    by = COUNTS[count] if isinstance(count, str) else partial(_counted, where, count)
    return TokenLoss(function, where, by, arguments, is_of_hidden=of_hidden)


def find_optimizer(config: Config) -> Callable[..., Any] | None:
    """Return the factory of the user's optimizer, as passed or as `train.optimizer` names it; None for AdamW. Raises
    UserError."""
    name = config.train.optimizer.own
    return _own_function(config, "optimizer", "train.optimizer", name, "optimizer", "weights", "names")


def find_schedule(config: Config) -> Callable[..., float] | RateSchedule:
    """Return the user's schedule, as passed or as `train.schedule` names it, or else that section. Raises UserError."""
    schedule = config.train.schedule
    own = _own_function(config, "schedule", "train.schedule", schedule.own, "rate_schedule", "step", "total_steps")
    return own or schedule


def _own_function(
    config: Config, part: PartName, key: str, name: str | None, decorator: Declared, *arguments: str
) -> Callable[..., Any] | None:
    """Return the function of one or all of these `arguments` that was passed as `part` or that `key` names."""
    passed = config.part(part)
    if passed is None and name is None:
        return None
    found: Callable[..., Any] = passed.value if passed is not None else import_declared(key, str(name), decorator)
    where = f"the {part}" if name is None else f"{key}: {name!r}"
    require_call(where, found, *arguments[: len(arguments) if takes(found, len(arguments)) else 1])
    return found


def checked_loss(loss: TokenLoss, language: PreTrainedConfig) -> TokenLoss:
    """Return the loss with what trying it told. language: of the model. Raises UserError, see `TokenLoss.check`."""
    per_position = loss.check(language.hidden_size if loss.is_of_hidden else language.vocab_size)
    return replace(loss, is_per_token=per_position and loss.count is COUNTS["tokens"])
