"""Config: the whole YAML file as a value, read with overrides; errors for unknown keys suggest the nearest name."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import shlex
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, PrivateAttr, ValidationError, model_validator

from dilatant.config.base import PathRule, Section, annotation_of, path_rule, with_absolute_paths
from dilatant.config.data import DataConfig
from dilatant.config.errors import UserError, list_problems
from dilatant.config.files.credentials import restore_credentials
from dilatant.config.files.exports import with_parts
from dilatant.config.files.own_files import read_text, require_plain
from dilatant.config.files.trust import require_trust, run_folder_of
from dilatant.config.files.yaml_text import MOST_BYTES, dump_yaml, explain, read_yaml
from dilatant.config.model import ModelConfig
from dilatant.config.others_keys import CALLED_HERE
from dilatant.config.own_parts import PART_NAMES, OwnPart, PartName, refuse_missing_part
from dilatant.config.parallel import WORDS, ParallelConfig
from dilatant.config.plan import ClusterConfig, PlanConfig
from dilatant.config.resilience import ResilienceConfig
from dilatant.config.train import LOSS, EvaluationConfig, TrainConfig


class DebugConfig(Section):
    """The `debug:` section: knobs that no run needs, for experiments and for tests that must end early. They may change
    in any version."""

    planned_samples: int = Field(4096, gt=0)
    """Samples to plan with, in training order."""
    planned_steps: int = Field(4, gt=0)
    """Global batches on which every finalist is simulated."""
    finalists: int = Field(24, gt=0)
    """Maximum number of candidates that a search simulates, the most promising first."""


class Config(Section):
    """The complete configuration of a run. Paths are relative to the YAML file."""

    output_dir: Annotated[str, PathRule((), moves=True)] = "runs/default"
    """The run folder."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of random weights, of the order of samples and of dropout."""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    parallel: ParallelConfig = ParallelConfig()
    """The assignment of layers to processes. Default: planned if there are several GPUs or a launcher started several
    processes, else one process."""
    cluster: ClusterConfig = ClusterConfig()
    plan: PlanConfig = PlanConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    launcher: Literal["ray"] | None = None
    """`ray` (or `--on ray`): train on nodes of a Ray cluster, with `resilience.enabled`
    ([resilience.md](resilience.md#several-machines))."""
    debug: DebugConfig = DebugConfig()
    python: tuple[PartName, ...] = ()
    """Parts that the run received in Python ([python.md](python.md)). The run writes this key, so that no command goes
    on without them."""

    _parts: dict[PartName, OwnPart] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _has_data(self) -> Self:
        if self.data.train or "train_data" in self.python:
            return self
        raise ValueError("'data.train' is missing; name files or a data set, or pass train_data to dilatant.train")

    @model_validator(mode="after")
    def _layouts_are_of_units(self) -> Self:
        problems = [] if self.model.is_whole else unit_problems(self.parallel, self.model.units)
        if problems:
            raise ValueError("\n  - ".join(problems))
        return self

    @model_validator(mode="after")
    def _evaluation_has_data(self) -> Self:
        if self.holds_out:
            return self
        wanted = [key for key in ("steps", "keep_best", "patience") if getattr(self.evaluation, key) is not None]
        if wanted:
            raise ValueError(
                f"evaluation.{wanted[0]}: there is nothing to evaluate on; name held-out data in data.eval, or take "
                "some of data.train with data.val_size"
            )
        return self

    @model_validator(mode="after")
    def _learns_pairs_whole(self) -> Self:
        if self.train.preferences is None:
            return self
        evaluation, drawing = self.evaluation, next(iter(self.model.generators), None)
        for is_wrong, problem in (
            (
                self.train.preferences.method == "kto" and self.resilience.keeps_gradients,
                "resilience.salvage: all samples decide the loss of kto, so steps are repeated whole; set it to false",
            ),
            (self.train.loss, "train.loss: 'train.preferences' is a loss already; leave one of them out"),
            (self.train.label_smoothing, "train.label_smoothing: pairs have 'train.preferences.label_smoothing'"),
            (self.train.neftune_noise_alpha, "train.neftune_noise_alpha: pairs are compared without noise"),
            (self.data.train_on != "assistant", "data.train_on: preferences are about answers; leave it out"),
            (self.data.truncation != "error", "data.truncation: pairs are not cut; leave it out"),
            (drawing, f"model.generators.{drawing}: pictures have no log-probabilities to prefer by"),
            (
                evaluation.metrics != EvaluationConfig().metrics,
                "evaluation.metrics: pairs are judged without writing answers, by loss and rewards; leave it out",
            ),
            (evaluation.keep_best not in (None, LOSS), "evaluation.keep_best: of pairs, only 'loss' is known"),
        ):
            if is_wrong:
                raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _recovers_equal_devices(self) -> Self:
        if self.resilience.enabled and self.cluster.groups:
            raise ValueError(
                "resilience.enabled and cluster.groups: recovery makes pipelines for equal devices; leave one out"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _ray_enables_resilience(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and tree.get("launcher") and isinstance(given := tree.get("resilience") or {}, dict):
            return {**tree, "resilience": {"enabled": True, **given}}
        return tree

    @model_validator(mode="after")
    def _ray_runs_agents(self) -> Self:
        if self.launcher is None:
            return self
        if not self.resilience.enabled:
            raise ValueError("launcher: on Ray the agents of resilience train; leave out 'resilience.enabled: false'")
        for key in ("listen", "standby"):
            if getattr(self.resilience, key) is not None:
                raise ValueError(f"resilience.{key} and launcher: on Ray `dilatant train` leads the run; leave one out")
        return self

    @model_validator(mode="after")
    def _microbatches_within_rows(self) -> Self:
        most = max(self.plan.microbatch_tokens or (0,))
        if most > self.row_tokens:
            raise ValueError(
                f"plan.microbatch_tokens: {most} are more than the {self.row_tokens} that 'train.row_tokens' (default: "
                "'data.max_length') lets a microbatch have; raise that, or try less"
            )
        return self

    @property
    def holds_out(self) -> bool:
        """Return True if there is held-out data."""
        return bool(self.data.eval) or self.data.val_size is not None or "eval_data" in self.python

    def part(self, name: PartName) -> OwnPart | None:
        """Return a part that the user passed to `dilatant.train`, or None if the config's applies. Raises UserError for
        a part that the run had and this process has not."""
        if name not in self.python:
            return None
        return self._parts[name] if name in self._parts else refuse_missing_part(name)

    def with_own_parts(self, parts: Mapping[PartName, Any]) -> Config:
        """Return the config with these parts, which travel with it to other processes."""
        names = tuple(name for name in PART_NAMES if name in parts)
        config = self.model_copy(update={"python": names})
        config._parts = {name: OwnPart(name, parts[name]) for name in names}
        return config

    @property
    def row_tokens(self) -> int:
        """Maximum number of the language model's tokens in one microbatch, hence in one sample."""
        return self.train.row_tokens or self.data.max_length

    def to_yaml(self) -> str:
        """Return the config as YAML with every default written out; `load_config` reads an equal value from it."""
        return dump_yaml(self.model_dump(mode="json"))


def unit_problems(parallel: ParallelConfig, units: tuple[str, ...]) -> list[str]:
    """List the mistakes in the layouts of `parallel` for a model with these units."""
    if parallel.units is None:
        return []
    problems = []
    for key, names in {
        "parallel.units": parallel.units,
        "parallel.colocated": [*parallel.colocated, *parallel.colocated.values()],
    }.items():
        for name in names:
            if name not in units:
                near = difflib.get_close_matches(name, units, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(units)}"
                problems.append(f"{key}: {name!r} is no unit of this model; {hint}")
    for name in units:
        if name not in parallel.units and name not in parallel.colocated:
            host = units[-1]
            shared = "" if name == host else f", or parallel.colocated: {{{name}: {host}}}"
            problems.append(f"parallel.units: {name!r} has no layout; add it, as in {name}: {{pp: 1}}{shared}")
    return problems


def _instead_of(folder: Path) -> str:
    """Say what to name instead of a folder."""
    if (folder / "config.json").is_file():
        return f"plan for the model in it by `dilatant plan --model {shlex.quote(str(folder))}`, or name a YAML file"
    if found := sorted(folder.glob("*.y*ml")):
        return f"name a file in it, such as {str(found[0])!r}"
    return "name a YAML file (`dilatant init` writes one), or for plans a model's id or folder by `--model`"


def load_config(
    path: str | Path,
    overrides: Iterable[str] = (),
    trust_remote_code: bool | None = None,
    *,
    from_shell: bool = False,
    prepare: Callable[[dict[str, Any]], None] = lambda tree: None,
) -> Config:
    """Read a YAML file and apply `a.b=c` overrides (values are YAML).

    Relative paths in the file and in overrides become absolute, so that a run's saved config means the same anywhere.
    trust_remote_code: allow code that the file names (`trust_remote_code`, the user's own metrics) to run. Default:
    True, unless a run wrote the file, which may then come from another person (see `config/files/trust.py`). A config
    written by a run gets the folder that contains it as `output_dir`, in which no entry may be a link. from_shell:
    paths in overrides are relative to the working folder, not to the file. prepare: called with the tree of plain
    values, to change it before it is checked.
    Raises UserError that lists every problem with its key.
    """
    path, overrides = Path(path), tuple(overrides)
    run = run_folder_of(path)
    if run is not None:
        require_plain(run, is_run=True)
    try:
        tree = read_yaml(read_text(path, MOST_BYTES))
    except FileNotFoundError:
        raise UserError(f"config {str(path)!r} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"config {str(path)!r} is a folder; {_instead_of(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config {str(path)!r} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"config {str(path)!r} is not valid YAML: {explain(error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"config {str(path)!r} must be a mapping with 'model' and 'data'")
    if run is not None:
        restore_credentials(tree, path.parent)
    for override in overrides:
        apply_override(tree, override, path.resolve().parent if from_shell else None)
    prepare(tree)
    if run is not None and not any(override.startswith("output_dir=") for override in overrides):
        tree["output_dir"] = str(run)
    config = parse_config(tree, base=path.resolve().parent, name=str(path))
    if not trust_remote_code and (run is not None or trust_remote_code is False):
        require_trust(path, config.model_dump(mode="json"), overrides)
    return config


def parse_config(tree: Mapping[str, Any], base: Path, name: str = "config") -> Config:
    """Build a config from a tree of plain values; relative paths start from `base`. Raises UserError."""
    with _listed_problems(name):
        config = Config.model_validate(tree)
    config = with_absolute_paths(config, base)
    return config.model_copy(update={"model": with_parts(config.model)})


def data_section(keys: Mapping[str, Any], name: str) -> DataConfig:
    """Build the section `data` of keys that `name` got as keywords; relative paths start from the working folder.
    Raises UserError."""
    plain = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in keys.items()}
    with _listed_problems(name, ("data",)):
        return with_absolute_paths(DataConfig.model_validate(plain), Path.cwd())


@contextmanager
def _listed_problems(name: str, section: tuple[str, ...] = ()) -> Iterator[None]:
    """Turn an error of pydantic about `name` into a UserError that lists every problem; `section`: what it read."""
    try:
        yield
    except ValidationError as error:
        problems: list[Any] = [{**problem, "loc": (*section, *problem["loc"])} for problem in error.errors()]
        places = [problem["loc"] for problem in problems]
        # pydantic also reports a list as too short if one of its items is wrong.
        telling = [
            problem
            for problem in problems
            if problem["type"] != "too_short"
            or not any(place[: len(problem["loc"])] == problem["loc"] != place for place in places)
        ]
        telling = [problem for problem in telling if not _is_of_another_form(problem)]
        what = "a mistake" if len(telling) == 1 else f"{len(telling)} mistakes"
        raise list_problems(f"{name} has {what}:", [_explain(problem) for problem in telling]) from None


def apply_override(tree: dict[str, Any], override: str, base: Path | None = None) -> None:
    """Change one key of a config's tree, as `--set` does. base: the YAML file's folder; if given, paths in the value
    are relative to the working folder (see `PathRule.from_working_folder`). Raises UserError."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"--set {override!r} must look like train.steps=100")
    *parents, last = key.split(".")
    if parents == ["parallel"] and tree.get("parallel", "") in (None, *WORDS):
        tree["parallel"] = {} if tree["parallel"] is None else {"auto": WORDS[tree["parallel"]]}
    node: Any = tree
    for depth, part in enumerate(parents):
        node = node.setdefault(part, {}) if isinstance(node, dict) else _item(node, part, parents[:depth])
    try:
        value = read_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(
            f"--set {override!r}: the value is not valid YAML: {explain(error)}; put a text with characters such as "
            "? : # [ { in quotes of its own, as in '{prompt: \"What is it?\"}'"
        ) from None
    if base is not None:
        value = _from_working_folder(value, base, functools.reduce(_below, key.split("."), Config))
    if isinstance(node, dict):
        node[last] = value
    elif isinstance(node, list):
        _item(node, last, parents)
        node[int(last)] = value
    else:
        raise UserError(f"--set {override!r}: {'.'.join(parents)!r} is {node!r} and not a section")


def _from_working_folder(value: Any, base: Path, annotation: Any) -> Any:
    """Return the value of a key with this annotation, with its paths as `PathRule.from_working_folder` reads them."""
    if isinstance(value, dict):
        return {name: _from_working_folder(each, base, _below(annotation, name)) for name, each in value.items()}
    if isinstance(value, list):
        return [_from_working_folder(each, base, _below(annotation, "")) for each in value]
    rule = path_rule(annotation) if isinstance(value, str) else None
    return value if rule is None else rule.from_working_folder(value, base)


def _item(node: Any, part: str, parents: list[str]) -> Any:
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    raise UserError(f"--set: {'.'.join([*parents, part])!r} does not exist")


def _is_branch(part: Any) -> bool:
    """Return True if this part of a location is pydantic's name of a union's branch, and no key."""
    return isinstance(part, str) and part.startswith(("literal[", "dict["))


def _is_of_another_form(problem: Any) -> bool:
    """Return True for the error of the union branch that the user did not choose (text or mapping)."""
    is_mapping = isinstance(problem["input"], dict)
    return any(map(_is_branch, problem["loc"][-1:])) and is_mapping == (problem["type"] != "dict_type")


_WRONG_TYPES = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    "string_type": "must be text",
}
"""What a value must be, by pydantic's name of an error."""


def _explain(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"] if not _is_branch(part))
    if problem["type"] == "extra_forbidden":
        *parents, key = problem["loc"]
        return f"unknown key {place!r}; {_hint(list(map(str, parents)), str(key))}"
    if problem["type"] == "missing":
        return f"{place!r} is missing"
    if problem["type"] in ("tuple_type", "list_type"):
        return f"{place} must be a list, as in {_as_list(problem)}"
    if problem["type"] == "model_type" and isinstance(problem["input"], str) and "path" in _keys_at(problem["loc"]):
        return f"{place} must be a section, as in {{path: {problem['input']}}}"
    if problem["type"] == "model_type":
        return f"{place} must be a section with keys such as {', '.join(_keys_at(problem['loc'])[:3])}"
    message = _WRONG_TYPES.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    value = problem.get("input")
    shown = f" (given: {value!r})" if isinstance(value, str | int | float | bool) else ""
    return f"{place}: {message}{shown}" if place else message


def _as_list(problem: Any) -> str:
    """Return the user's value, written as the list that is expected."""
    value = problem["input"]
    if value is None:
        return "[] for none"
    shown = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).partition("\n")[0]
    is_source = isinstance(value, str) and "path" in _keys_at(problem["loc"])
    return f"[{{path: {shown}}}]" if is_source else f"[{shown}]"


def _hint(parents: list[str], key: str) -> str:
    """Suggest a place for an unknown key: the nearest name in its section, else the same name elsewhere."""
    if key in CALLED_HERE:
        return CALLED_HERE[key]
    here = _keys_at(parents)
    elsewhere = [place for place in _places(Config) if place.rpartition(".")[2] == key]
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.8 if elsewhere else 0.5)
    if near:
        return f"did you mean {'.'.join([*parents, near[0]])!r}?"
    if elsewhere:
        below = [place for place in elsewhere if place.startswith(".".join([*parents, ""]))]
        return f"did you mean {' or '.join(map(repr, below or elsewhere))}?"
    return f"valid keys here: {', '.join(sorted(here))}"


def _places(section: Any, parents: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield every section and key that can be written without the name of an encoder or group, or a list position."""
    for name, field in section.model_fields.items():
        yield ".".join((*parents, name))
        if _is_section(field.annotation):
            yield from _places(field.annotation, (*parents, name))


def _keys_at(parents: Iterable[Any]) -> list[str]:
    """Return the valid keys of the section at `parents`; keys of mappings and list positions are skipped."""
    annotation = functools.reduce(_below, map(str, parents), Config)
    section = annotation if _is_section(annotation) else _section_in(annotation)
    return list(section.model_fields) if section else []


def _below(annotation: Any, part: Any) -> Any:
    """Return the annotation of a key of a section, or of the sections in a mapping or list."""
    if typing.get_origin(annotation) not in (dict, tuple):
        for branch in (annotation, *typing.get_args(annotation)):
            if _is_section(branch):
                return annotation_of(branch, str(part))
    return _section_in(annotation)


def place_of(key: str) -> str | None:
    """Return the place of the one key of this name that is no section; None if there is none, or several."""
    every = [*_places(Config)]
    found = [place for place in every if place.rpartition(".")[2] == key]
    is_section = any(place.startswith(f"{found[0]}.") for place in every) if found else True
    return None if is_section or len(found) > 1 else found[0]


def _is_section(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)


def _section_in(annotation: Any) -> Any:
    """Return the section among the type arguments of a mapping, a tuple or an optional; None if there is none."""
    for argument in typing.get_args(annotation):
        found = argument if _is_section(argument) else _section_in(argument)
        if found:
            return found
    return None
