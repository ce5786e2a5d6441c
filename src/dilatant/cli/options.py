"""Arguments shared by several verbs, and the reading of configs."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer
from rich.console import Console

from dilatant.config.environment import hide_gpus, place_from
from dilatant.config.errors import UserError, file_errors
from dilatant.report.say import print_line

if TYPE_CHECKING:
    from dilatant.config import Config

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of the run.", show_default=False)]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="A.B=C", help="Change one key; may be given several times.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, written by `dilatant train`.", show_default=False)
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code that the config names, although a run folder of somebody holds it."
    ),
]


@dataclass(frozen=True, slots=True)
class ConfigOptions:
    """The config of a run, as a file with changes."""

    config: ConfigPath
    overrides: Overrides = field(default_factory=list)
    trust: Trust = False

    def read(self) -> Config:
        """Read the config, and announce that torch is loaded next. Raises UserError."""
        return read_config(self.config, self.overrides, self.trust or None, loads=True)


def with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb as typer takes it: a parameter whose type is a dataclass becomes options, one for each field."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        parameter = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter)
            continue
        groups[parameter.name] = parameter.annotation
        hints = get_type_hints(parameter.annotation, include_extras=True)
        for one in fields(parameter.annotation):
            default = one.default if one.default_factory is MISSING else one.default_factory()
            default = inspect.Parameter.empty if default is MISSING else default
            parameters.append(parameter.replace(name=one.name, annotation=hints[one.name], default=default))

    @functools.wraps(verb)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{one.name: values.pop(one.name) for one in fields(group)})
        verb(**values)

    cast(Any, call).__signature__ = inspect.Signature(parameters)
    return call


IS_PAGE = "dilatant.report.pages.page_links:is_page"
"""For `output_file`: the check of a page that Dilatant wrote."""


def output_file(reader: str, *more: str) -> Callable[[typer.CallbackParam, Path | None], Path | None]:
    """Return a callback that checks an option's output file before the work begins. The file must be writable, and an
    existing file must be empty or of the same kind, so that a typing mistake cannot overwrite a config or data.

    reader: MODULE:NAME of a function, imported when it is needed. It takes a text and `more`, and returns False or
    raises ValueError (UserError) for a text of another kind.
    """

    def check(option: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is None:
            return None
        shown = f"{option.opts[0]} {str(path)!r}"
        if path.is_dir():
            raise UserError(f"{shown} is a folder; name a file in it")
        if not path.parent.is_dir():
            raise UserError(f"{shown}: folder {str(path.parent)!r} does not exist")
        if path.is_file() and not _replaceable(path, lambda text: resolve_name(reader)(text, *more) is not False):
            raise UserError(f"{shown} is there already and was not written by this option; name another file")
        _check_writable(path, shown)
        return path

    return check


def _check_writable(path: Path, shown: str) -> None:
    """Raise UserError if the file cannot be written. An existing file stays unchanged."""
    there = path.exists()
    if there and not path.is_file():  # a pipe or a terminal
        return
    with file_errors(f"{shown} cannot be written"):
        path.open("ab").close()
        if not there:
            path.unlink()


def write_new(path: Path, text: str, option: str) -> None:
    """Write a file that does not exist yet. option: the option that names it, for errors. Raises UserError."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{option} {str(path)!r} is there already; name another file") from None
    except OSError as error:
        raise UserError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from None


def _replaceable(path: Path, is_same: Callable[[str], bool]) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
        return not text.strip() or is_same(text)
    except (OSError, ValueError):  # not readable, no text, or (UserError) another kind of file
        return False


def say_loading() -> None:
    """Announce on standard error that torch and transformers are being loaded, which takes many seconds. A command
    calls this after all checks that do not need them. Prints nothing if they are loaded, or on any rank but the
    first."""
    place = place_from()
    if "torch" not in sys.modules and (place is None or place.rank == 0):
        print("loading torch and transformers", file=sys.stderr, flush=True)


def read_config(
    path: Path,
    overrides: Iterable[str] = (),
    trust: bool | None = None,
    prepare: Callable[[dict[str, Any]], None] = lambda tree: None,
    loads: bool = False,
    run: Path | None = None,
    needs_data: bool = True,
) -> Config:
    """Call `load_config`, importing its libraries only now, so that `--help` starts immediately.

    Paths in `overrides` are relative to the working directory. Files that moved together with the run or plan that
    wrote the config are found, and reported. `trust` is False if the user named a folder in which the config was found,
    None if the user named the config. `prepare` modifies the file's tree first. `loads` calls `say_loading`. `run` is
    the run's folder, by default derived from the files beside the config. `needs_data`: see `follow_run`.
    """
    from dilatant.config import load_config
    from dilatant.config.files.paths import follow_run
    from dilatant.config.files.trust import names_code, run_folder_of
    from dilatant.config.printable import printable

    folder = run or run_folder_of(path)

    def follow(tree: dict[str, Any]) -> None:
        for line in follow_run(tree, folder, needs_data) if folder is not None else ():
            print(printable(line), file=sys.stderr)
        prepare(tree)

    config = load_config(path, [*overrides], trust, from_shell=True, prepare=follow)
    if trust and not names_code(config.model_dump(mode="json")):
        warnings.warn(
            f"--trust-remote-code is unused: {str(path)!r} names no code; beside a model's id the key is "
            "trust_remote_code: true",
            stacklevel=1,
        )
    if config.train.device == "cpu":
        # Before torch is imported, so that this process and its children see no GPU.
        hide_gpus()
    if loads:
        say_loading()
    return config


def read_run(
    folder: Path, overrides: Iterable[str] = (), resume: bool = False, trust: bool = False, needs_data: bool = True
) -> Config:
    """Return the config that a run was started with. Files that moved with the run are found. With `resume`, the config
    continues from the run's newest checkpoint. Raises UserError."""
    saved = folder / "config.yaml"
    if not saved.is_file():
        raise UserError(f"{str(folder)!r} is not a run folder: it has no config.yaml")

    def go_on(tree: dict[str, Any]) -> None:
        if resume:
            tree["output_dir"] = str(folder.resolve())
            tree.setdefault("train", {})["resume"] = "auto"

    return read_config(saved, overrides, trust, go_on, run=folder, needs_data=needs_data)


def read_config_text(text: str) -> Config:
    """Return the config of a YAML text, with paths relative to the working directory. Raises UserError."""
    from dilatant.config.config import parse_config
    from dilatant.config.files.yaml_text import read_yaml

    config = parse_config(read_yaml(text), base=Path.cwd())
    if config.train.device == "cpu":
        hide_gpus()
    return config


def seen_from_here(path: Path) -> Path:
    """Return the path relative to the working folder if it is inside."""
    whole = path.resolve()
    return whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else whole


def show_places(console: Console, places: Mapping[Path, str] | Mapping[str, str]) -> None:
    """List files that were written, or commands to run, with a description of each."""
    for place, what in places.items():
        shown = place if isinstance(place, str) else seen_from_here(place)
        print_line(console, f"  {shown}  ", (what, "dim"), wrap=False)
