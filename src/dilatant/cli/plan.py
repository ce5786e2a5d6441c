"""`dilatant plan`: plan the parallel layout of a run before training."""

from __future__ import annotations

import atexit
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dilatant.cli.options import IS_PAGE, AsJson, Overrides, Trust, output_file, read_config, show_places
from dilatant.comm.temporary import TemporaryFolder
from dilatant.config.errors import UserError, file_errors
from dilatant.config.files.durable import write_named
from dilatant.config.printable import printable
from dilatant.data.text.tokenizer import lacks_tokenizer
from dilatant.report.say import open_console, print_line, show_progress
from dilatant.report.text.wording import seconds_text

if TYPE_CHECKING:
    from dilatant.config import Config
    from dilatant.planning.planning import PlannedRun, PlanningProblem

LONGEST = 1 << 17
"""Most words of an imagined sample, and tokens of its rows unless one sample may have more."""
SAMPLES = 4
"""Samples of a step for each GPU."""
MOST_IMAGES = 1 << 12
"""Images of an imagined sample."""
MOST_PIXELS = 1 << 26
"""Pixels of an imagined image."""
WRITTEN = 64
"""Imagined samples in the file; a step of more takes them again."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The config of a run that may be imagined: `model` instead of `config`."""

    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="The YAML file of the run.", show_default=False)
    ] = None
    overrides: Overrides = field(default_factory=list)
    trust: Trust = False
    model: Annotated[
        str | None,
        typer.Option(help="Instead of a CONFIG: an id or a folder; answers in one line.", show_default=False),
    ] = None
    gpus: Annotated[
        str, typer.Option(metavar="NxHARDWARE", help="With --model: its devices; kinds are listed as 32xH100,32xA100.")
    ] = "8xH100"
    images: Annotated[int, typer.Option(help="With --model: images of a sample.")] = 0
    image_size: Annotated[str, typer.Option(metavar="WxH", help="With --model: their pixels.")] = "1024x768"
    text: Annotated[int, typer.Option(help="With --model: words of a sample; tokens without a tokenizer.")] = 512

    @property
    def name(self) -> str:
        return self.model or (self.config.stem if self.config else "")

    def read(self) -> Config:
        """Read the config, or make that of the imagined run in a temporary folder. Raises UserError."""
        if (self.config is None) == (self.model is None):
            raise UserError(
                f"name the CONFIG of a run, or a model with --model{', not both' * (self.model is not None)}"
            )
        of_model = [one for one in fields(self) if one.name in ("gpus", "images", "image_size", "text")]
        unused = of_model if self.config else [one for one in of_model if one.name == "image_size" and not self.images]
        written = [f"--{one.name.replace('_', '-')}" for one in unused if getattr(self, one.name) != one.default]
        if written:
            needs = "--model, and a CONFIG names its own" if self.config else "--images"
            raise UserError(f"{', '.join(written)} belongs to {needs}; leave it out, or name both")
        if self.config is not None:
            return read_config(self.config, self.overrides, self.trust or None, loads=True)
        path, tree = self._imagine()
        config = self._read_imagined(path, tree)
        from dilatant.models.families.generic import opens_whole
        from dilatant.models.sources import load_pretrained_config

        if opens_whole(load_pretrained_config(tree["model"]["id"], "--model", self.trust)):
            return config
        if self.images:
            raise UserError(f"--images {self.images}: {self.model} reads none; leave it out, or name a model that does")
        part = tree["model"]
        if lacks_tokenizer(part["id"]):
            print(printable(f"there is no tokenizer in {self.model!r}: --text counts tokens"), file=sys.stderr)
            part = {**part, "tokenizer": "bytes"}
        return self._read_imagined(path, {**tree, "model": {"language_model": part}})

    def _read_imagined(self, path: Path, tree: dict[str, Any]) -> Config:
        path.write_text(json.dumps(tree), encoding="utf-8")
        try:
            return read_config(path, self.overrides, self.trust or None, loads=True)
        except UserError as error:
            raise UserError(str(error).replace(str(path), "--set")) from None

    def _imagine(self) -> tuple[Path, dict[str, Any]]:
        """Write imagined samples. Return the place and the tree of their config."""
        for option, value, least, most, what in (
            ("--text", self.text, 1, LONGEST, "words"),
            ("--images", self.images, 0, MOST_IMAGES, "images"),
        ):
            if not least <= value <= most:
                raise UserError(f"{option} {value}: a sample has from {least} to {most:,} {what}")
        own = [entry.partition("=")[2] for entry in self.overrides if entry.startswith("cluster.hardware_file=")]
        cluster, count = _cluster(self.gpus, Path(own[-1]) if own else None)
        width, height = map(int, _pair(self.image_size, r"(\d{1,9})x(\d{1,9})", "--image-size", "1024x768"))
        if not 0 < width * height <= MOST_PIXELS:
            raise UserError(f"--image-size {self.image_size}: an image has from 1 to {MOST_PIXELS:,} pixels")
        place = TemporaryFolder()
        atexit.register(place.close)
        folder, samples = Path(place.path), SAMPLES * count
        # At most: patches of 14 pixels, or a dozen tiles of a small image; the template adds a few.
        most_tokens = 2 * self.text + self.images * (width * height // 14**2 + (1 << 13)) + (1 << 10)
        asked: list[dict[str, str]] = [{"type": "image", "image": "image.png"}] * self.images
        if self.images:
            from PIL import Image

            Image.new("RGB", (width, height)).save(folder / "image.png")
        model = os.path.abspath(self.model) if self.model and os.path.isdir(self.model) else str(self.model)
        answer = "w" * self.text if lacks_tokenizer(model) else " ".join(["word"] * self.text)
        turns = [("user", [*asked, {"type": "text", "text": "word"}]), ("assistant", answer)]
        line = json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
        # All are alike, and each that is written is measured.
        (folder / "samples.jsonl").write_text(f"{line}\n" * min(samples, WRITTEN), encoding="utf-8")
        return folder / "config.yaml", {
            "output_dir": str(folder / "run"),
            "model": {"id": model},
            "data": {"train": [{"path": str(folder / "samples.jsonl")}], "max_length": max(LONGEST, most_tokens)},
            "train": {"global_batch_size": samples},
            "cluster": cluster,
            "plan": {"measure_seconds": 0},
        }


def _cluster(gpus: str, file: Path | None = None) -> tuple[dict[str, Any], int]:
    """Return the section of a config for the devices of `--gpus`, and their number. file: hardware file that has them,
    instead of the built-in one. Raises UserError."""
    from dilatant.config.plan import MOST_DEVICES
    from dilatant.cost.hardware import load_hardware

    kinds: dict[str, dict[str, Any]] = {}
    devices = 0
    for text in gpus.split(","):
        number, name = _pair(text.strip(), r"(\d{1,9})x(.+)", "--gpus", "64xH100, or 32xH100,32xA100")
        try:
            hardware, count = load_hardware(name, file), int(number)
        except FileNotFoundError:
            raise UserError(f"cluster.hardware_file: {str(file)!r} does not exist") from None
        nodes, rest = divmod(count, hardware.node)
        if count < 1 or (nodes and rest):
            raise UserError(
                f"--gpus {text}: nodes have {hardware.node}; name from 1 to {hardware.node}, or a multiple of "
                f"{hardware.node}"
            )
        if hardware.name in kinds:
            raise UserError(f"--gpus {gpus}: name {hardware.name} once, with the number of all of them")
        per_node = hardware.node if nodes else count
        kinds[hardware.name] = {"nodes": nodes or 1, "gpus_per_node": per_node, "hardware": hardware.name}
        devices += count
    if devices > MOST_DEVICES:
        raise UserError(f"--gpus {gpus}: plans are made for at most {MOST_DEVICES:,} devices")
    if len(kinds) == 1:
        return next(iter(kinds.values())), devices
    return {"groups": [{"name": name, **kind} for name, kind in kinds.items()]}, devices


def _pair(text: str, pattern: str, option: str, example: str) -> tuple[str, str]:
    """Return both groups of the pattern. Raises UserError."""
    found = re.fullmatch(pattern, text)
    if found is None:
        raise UserError(f"{option} {text!r}: write it like {example}")
    return found[1], found[2]


Page = Annotated[
    Path | None, typer.Option(help="Where to write the page.", callback=output_file(IS_PAGE), show_default=False)
]


def plan(
    options: PlanOptions,
    costs: Annotated[
        Path | None, typer.Option(help="Layer costs from `dilatant profile`; as plan.costs.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the plan.",
            callback=output_file("dilatant.plan.plan:Plan.from_json"),
            show_default=False,
        ),
    ] = None,
    page: Page = None,
    fault_tolerance: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=3,
            help="Nodes that may be lost at once: every layer lies on one more. Says what 0 to 3 cost. Without it, "
            "resilience.fault_tolerance counts if resilience.enabled is set.",
            show_default=False,
        ),
    ] = None,
    why_not: Annotated[
        list[str] | None,
        typer.Option(
            help="A layout, like 'vision: {pp: 2}, microbatch_tokens: 8192, zero: all': why was it not chosen? May be "
            "repeated.",
            show_default=False,
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            help="Plan only layouts like 'language: {tp: 8, pp: 4}'; what is not said is chosen.", show_default=False
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="Also plan for megatron, megatron-bridge, ms-swift, torchtitan, automodel or veomni: its flags, and "
            "what it cannot express.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan for a model, its data and a cluster, and explain the choice. Nothing is trained.

    Writes plan.json, plan.html, report.json, costs.yaml and config.yaml into plan/ in the run folder.
    """
    if why_not and fault_tolerance:
        raise UserError("--why-not answers for plans without --fault-tolerance; ask for one of them")
    if like is not None and (why_not or fault_tolerance is not None):
        raise UserError("--like plans one layout; ask --why-not and --fault-tolerance of a search, without --like")
    if like is not None and framework is not None:
        raise UserError("--for searches what a framework can run; ask it without --like")

    from dilatant.plan.search.frameworks import FRAMEWORKS

    if framework is not None and framework not in FRAMEWORKS:
        raise UserError(f"--for {framework}: there are {', '.join(FRAMEWORKS)}")
    from dilatant.plan.search.why_not import parse_asked_layout

    resolved = with_cost_file(options.read(), costs)
    for text in (*(why_not or ()), *filter(None, [like])):
        parse_asked_layout(text, resolved.model.units)

    from dilatant.plan.errors import DoesNotFitError
    from dilatant.planning.fewest import fewest_devices
    from dilatant.planning.memberships import best_plan
    from dilatant.planning.other_frameworks import plan_for
    from dilatant.planning.planned_run import (
        check_plan_folder,
        fixed_plan_report,
        plan_report,
        training_plan,
        write_plan_folder,
    )
    from dilatant.planning.planning import plan_like, with_faster
    from dilatant.planning.row_length import with_long_rows
    from dilatant.report.pages.page_links import link_pages
    from dilatant.report.pages.plan_page import print_plan, write_plan_page
    from dilatant.report.text.plan_summary import short_answer

    console = open_console(stderr=as_json)
    check_plan_folder(resolved)  # fail before the search
    problem = open_problem(resolved, like, asked=why_not or ())
    units = [unit.name for unit in problem.model.spec.units]
    asked = {text: parse_asked_layout(text, units) for text in why_not or ()}
    with show_progress(open_console(stderr=True), "searching"):
        if like is not None:
            planned = with_long_rows(plan_like(problem, parse_asked_layout(like, units)))
            report = fixed_plan_report(plan_report(planned, options.name), like)
        else:
            try:
                found = best_plan(problem, fault_tolerance=fault_tolerance)
            except DoesNotFitError as error:
                calculates = options.config is None and not (fault_tolerance or problem.target.groups)
                more = fewest_devices(problem, fits=False) if calculates else None
                if more is None:
                    raise
                raise UserError(f"{error}; it fits on {more.devices} devices") from None
            planned = with_faster(found, asked)
            report = plan_report(planned, options.name, asked)
            if options.config is None and not (fault_tolerance or problem.target.groups):
                report = replace(report, fewest=fewest_devices(problem, fits=True))
            if framework is not None:
                report = replace(report, framework=plan_for(planned, framework))
    folder = write_plan_folder(planned, report)
    file = out or folder / "plan.json"
    if out is not None:
        with file_errors(f"--out {str(out)!r} cannot be written"):
            write_named(out, training_plan(planned.problem, planned.result.winner, planned.chain).to_json())
    if page is not None:
        write_plan_page(report, page)
    link_pages(folder.parent)
    if fault_tolerance is not None:
        _show_fault_tolerance(problem, {fault_tolerance: planned}, folder, console)
    if as_json:
        print(report.to_json())
    elif options.config is None:
        print_line(console, f"{options.model} on {report.hardware}: {short_answer(report)}", wrap=False)
        for one in report.why_not:
            print_line(console, f"Why not {one.asked}? {' '.join(one.answer)}", wrap=False)
    else:
        print_plan(report, console)
    if report.framework is not None and not as_json:
        print_line(console, f"\nFor {framework}:")
        other = report.framework
        for line in filter(None, [other.models, other.command, *other.sentences]):
            print_line(console, f"  {line}", wrap=False)
    if as_json or options.config is None:
        return
    console.print()
    show_places(
        console,
        {
            file: "the plan",
            page or folder / "plan.html": "the same as a page: open it in a browser",
            folder / "costs.yaml": f"what layers take ({problem.measured.origin}); share it, or edit it",
        },
    )
    names = dict.fromkeys(one.hardware.name for one in problem.target.groups or (problem.target,))
    where = "" if problem.target.is_local else f" on {' and '.join(names)}"
    print_line(console, f"\nTo train with it{where}:")
    print_line(console, f"  {train_command(options.config, file)}", wrap=False)


def _show_fault_tolerance(
    problem: PlanningProblem, known: Mapping[int, PlannedRun], folder: Path, console: Console
) -> None:
    """Show the step time by the number of nodes that may be lost, of which plans may be known; also write it to
    fault_tolerance.json."""
    from dilatant.planning.memberships import seconds_by_fault_tolerance
    from dilatant.report.run_folder import RunFolder

    with show_progress(open_console(stderr=True), "searching plans that nodes may be lost of"):
        found = seconds_by_fault_tolerance(problem, known)
    fastest = found[0]
    print_line(console, ("What it costs that nodes may be lost at once", "bold"))
    for tolerance, seconds in found.items():
        if seconds is None or fastest is None:
            text = "no plan has every layer on so many nodes and fits"
        else:
            text = f"{seconds_text(seconds)} a step, {seconds / fastest:.2f} times the fastest"
        print_line(console, f"  {tolerance}: {text}")
    document = [{"fault_tolerance": tolerance, "step_seconds": seconds} for tolerance, seconds in found.items()]
    RunFolder(folder).write_text("fault_tolerance.json", json.dumps(document, indent=1) + "\n")


def with_cost_file(config: Config, costs: Path | None) -> Config:
    """Return the config with another cost file, if one is given."""
    if costs is None:
        return config
    return config.model_copy(update={"plan": config.plan.model_copy(update={"costs": str(costs.resolve())})})


def open_problem(
    config: Config, like: str | None = None, searches: bool = True, asked: Sequence[str] = ()
) -> PlanningProblem:
    """Return the planning problem, showing progress on standard error while samples and layers are measured. `like` and
    `asked` are as in `planning_problem`. searches: warn that a plan is searched for and a layout in the config is not
    used."""
    from dilatant.planning.assemble import assemble_samples
    from dilatant.planning.planning import planning_problem

    for key in ("units", "plan"):
        if searches and getattr(config.parallel, key) is not None:
            warnings.warn(
                f"parallel.{key} is not used: a plan is searched for; `dilatant train` uses it, and "
                "`dilatant plan --like 'language: {tp: 2}'` plans a layout of your own",
                stacklevel=2,
            )
    with show_progress(open_console(stderr=True), "opening the data") as show:
        return planning_problem(config, assemble_samples(config), show, like=like, asked=asked)


def train_command(config: Path, plan_file: Path) -> str:
    """Return the command that trains with a plan as simulated: its file contains microbatches, schedule and policy."""
    # Sets the whole section, which replaces a layout in the config. Its paths are relative to the YAML file.
    path = os.path.relpath(plan_file.resolve(), config.resolve().parent)
    return f"dilatant train {shlex.quote(str(config))} --set {shlex.quote(f'parallel={{plan: {path}}}')}"
