"""Parts of the user's own: put into the config by `dilatant.train`, and found there or by name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from dilatant.config import Config, UserError, load_config
from dilatant.config.config import parse_config
from dilatant.config.own_parts import PART_NAMES, Parts, refuse_missing_part
from dilatant.training.callbacks import CallbackList


def config_with_parts(config: Config | Mapping[str, Any] | str | Path, parts: Parts) -> Config:
    """Return the config with these parts in place of its own. Raises UserError for an unknown part, and for one that is
    not what its place needs."""
    if unknown := sorted(parts.keys() - {*PART_NAMES, "model"}):
        raise UserError(f"dilatant.train takes no {unknown[0]!r}; there are model, {', '.join(PART_NAMES)}")
    own = {name: value for name, value in parts.items() if value is not None and name != "model"}
    if isinstance(config, Config) and not parts and not config.python:
        return config
    if "callbacks" in own:
        own["callbacks"] = CallbackList(cast(Any, own["callbacks"]))
    fill = partial(_fill, own, parts.get("model"))
    if isinstance(config, str | Path):
        filled = load_config(config, prepare=fill)
    else:
        tree = config.model_dump(mode="json") if isinstance(config, Config) else dict(config)
        fill(tree)
        filled = parse_config(tree, Path.cwd())
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
    if isinstance(model, str | Path):
        model = {**(tree.get("model") or {}), "id": str(model)}
    if model is not None:
        if not isinstance(model, Mapping):
            raise UserError(
                f"model is a {type(model).__name__}; give an id, a folder or a mapping as in the YAML file: every rank "
                "builds its own layers (a model made in Python trains with dilatant.parallelize)"
            )
        tree["model"] = dict(model)
