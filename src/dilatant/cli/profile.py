"""`dilatant profile`: measure the costs of a model's layers on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dilatant.cli.options import AsJson, ConfigOptions, output_file
from dilatant.config.degrees import AXES, ONE
from dilatant.config.errors import UserError, file_errors
from dilatant.report.say import open_console, plain_table, print_line, print_table, show_progress
from dilatant.report.text.wording import bytes_text, count_text, percent_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from dilatant.cost.model import CostModel
    from dilatant.planning.problem.describe_model import ModelDescription
    from dilatant.planning.problem.link_probe import MeasuredLinks
    from dilatant.planning.problem.planned_hardware import Target


def profile(
    options: ConfigOptions,
    out: Annotated[
        Path,
        typer.Option(
            help="Where to write the costs.", callback=output_file("dilatant.cost.model:CostModel.from_yaml", "")
        ),
    ] = Path("costs.yaml"),
    tokens: Annotated[
        str, typer.Option(help="Token counts to measure the language model at, as in 512,1024,2048.")
    ] = "",
    tp: Annotated[
        str,
        typer.Option(
            help="Tensor-parallel degrees, as in 1,2,4: one rank's share is measured. Default: plan.tensor_parallel."
        ),
    ] = "",
    cp: Annotated[
        str,
        typer.Option(help="Context-parallel degrees, derived from the fitted curves. Default: plan.context_parallel."),
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements per count; their median counts.")] = 7,
    links: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=output_file("dilatant.cost.hardware:read_hardware_file", ""),
            help="Measure the links between devices as well, and write them into this hardware file.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Measure for this one of cluster.groups (here are devices of its kind); --out keeps others.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Measure every layer type of a model at several token counts: forward, gradients, recomputation and memory.

    For hardware other than this machine (`cluster.hardware`), costs are modelled from FLOPs and bytes, and marked as
    such. Links are measured between two processes on this machine, or between the ranks started by torchrun or Slurm.
    """
    lengths = _counts(tokens, "--tokens", "512,1024,2048")
    degrees = {AXES[name]: _counts(text, f"--{name}", "1,2,4") for name, text in (("tp", tp), ("cp", cp))}
    resolved = options.read()

    from dilatant.config.environment import place_from
    from dilatant.cost.hardware import save_hardware
    from dilatant.cost.model import save_costs, save_group_costs
    from dilatant.data.text.tokenizer import count_ids
    from dilatant.planning.assemble import load_model_tokenizer
    from dilatant.planning.measuring.cost_cache import store_costs
    from dilatant.planning.measuring.layer_costs import layer_costs, measure_layers, measured_tokens
    from dilatant.planning.problem.describe_model import build_meta_model, describe_model
    from dilatant.planning.problem.planned_hardware import entry_name, plan_target, target_of_group, with_links
    from dilatant.planning.problem.searched_settings import planned_degrees

    console = open_console(stderr=as_json)
    cluster, train = resolved.cluster, resolved.train
    target = target_of_group(cluster, group, train) if group else plan_target(cluster, train)
    counts = lengths or measured_tokens(resolved)
    plan = resolved.plan.model_copy(
        update={"costs": None, **{name: counts for name, counts in degrees.items() if counts}}
    )
    place = place_from()
    found, choices = _measure_links(target) if links is not None else None, list[str]()
    if place is not None and place.rank > 0:
        return  # layers are measured once, where nothing else runs
    with show_progress(open_console(stderr=True), "building the model without weights") as show:
        model = describe_model(build_meta_model(resolved, count_ids(load_model_tokenizer(resolved.model))))
        if target.is_local:
            choices = _measure_attention(model, target, counts, show)
            costs = measure_layers(model, target, counts, repeats, show, planned_degrees(plan, model, target))
        else:
            costs = layer_costs(resolved.model_copy(update={"plan": plan}), model, target)
    store_costs(costs, model)
    with file_errors(f"--out {str(out)!r} cannot be written"):
        together = save_group_costs(costs, group, out) if group else None
        if together is None:
            save_costs(costs, out)
    name = entry_name(target.hardware)
    if links is not None and found is not None:
        save_hardware(with_links(target.hardware, found), name, links)
    if as_json:
        measured = {} if found is None else {"links": asdict(found)}
        print(json.dumps({**_plain(costs, counts), "attention": choices, **measured}))
        return
    _show(costs, counts, console)
    for line in choices:
        print_line(console, f"attention over {line}")
    if costs.rough:
        worst, kind = costs.rough[0]
        print_line(
            console,
            ("the times scatter: ", "yellow"),
            f"the fit of {kind} is off by {worst:.0%}, so the machine was busy, or the layers are tiny. Plans are as "
            "rough, until they are measured again",
        )
    if links is not None and found is not None:
        _show_links(found, console)
        print_line(
            console,
            f"{links}: plan with it by `cluster.hardware: {name}` and `cluster.hardware_file: {links}`",
            wrap=False,
        )
    if together is None:
        line = f"{out}: plan with it by `plan.costs: {out}`, or share it with others on {costs.hardware}"
    else:
        lacking = [one.name for one in resolved.cluster.groups or () if one.name not in together.groups]
        rest = f" (not there yet, so modelled: {', '.join(lacking)})" if lacking else ""
        line = f"{out} has {', '.join(together.groups)}: plan with it by `plan.costs: {out}`{rest}"
    print_line(console, line, wrap=False)


def _measure_attention(
    model: ModelDescription, target: Target, counts: tuple[int, ...], say: Callable[[str], None]
) -> list[str]:
    """Time attention backends on this device, keep the seconds in the cost cache, and return the choices as lines."""

    from dilatant.attention.kernels.measured import store_measured
    from dilatant.planning.measuring.attention_seconds import (
        choice_text,
        measure_attention,
        measured_attention,
        rows_of,
    )
    from dilatant.planning.measuring.layer_probes import LONG_ROW
    from dilatant.runtime.precision import pick_device

    device, dtype = pick_device(), target.activations
    tokens = LONG_ROW if device.type == "cuda" else max(counts)
    store_measured(measure_attention(rows_of(model), device, dtype, tokens, say), device.type, device.index)
    return [choice_text(row) for row in measured_attention(model, device, dtype)]


def _measure_links(target: Target) -> MeasuredLinks:
    """Measure links between existing ranks, or between two processes started here. Raises UserError without a pair."""
    import torch

    from dilatant.comm.launch import launch
    from dilatant.config.environment import place_from
    from dilatant.planning.problem.link_probe import measure_links

    if not target.is_local:
        raise UserError(
            f"--links: {target.requested} is not here, so its links cannot be measured; run `dilatant profile` there"
        )
    if torch.cuda.device_count() == 1 and place_from() is None:
        raise UserError("--links: one GPU has no links; start `dilatant profile` on several, by torchrun or Slurm")
    with show_progress(open_console(stderr=True), "measuring links"):
        found: MeasuredLinks = launch(measure_links, 2)[0]
    return found


def _show_links(found: MeasuredLinks, console: Console) -> None:
    for where, measured in (("inside a node", found.inside), ("between nodes", found.between)):
        if measured is None:
            print_line(console, f"links {where}: not measured, no two ranks are placed so")
            continue
        link = measured.link
        print_line(
            console,
            f"links {where}: {link.bandwidth / 1e9:.3g} GB/s, {seconds_text(link.latency)} a message "
            f"(fit off by {percent_text(measured.error)})",
        )


def _counts(text: str, option: str, example: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        counts = (0,)
    if counts and counts[0] < 1:
        raise UserError(f"{option} {text!r} must be counts such as {example}")
    return counts


def _at(kind: str, counts: tuple[int, ...]) -> int:
    """Return the token count at which a layer type is shown: the largest measured; for encoders, one image or clip."""
    _, marker, tokens = kind.rpartition("@")
    return int(tokens.split()[0]) if marker else counts[-1]


def _show(costs: CostModel, counts: tuple[int, ...], console: Console) -> None:
    print_line(console, (costs.hardware, "bold"), f", {costs.dtype}, {costs.origin}")
    if costs.origin != "measured":
        print_line(console, ("not measured: ", "yellow"), costs.note)
    elif any(degrees != ONE for own in costs.layers.values() for degrees in own):
        print_line(console, (costs.note, "dim"))
    times = {"forward": "forward", "input": "input_gradient", "weights": "weight_gradient"}
    wide = console.width >= 120
    if wide:
        times |= {"if first trained": "first_trainable", "again": "recompute"}
    sizes = ("parameters", "activations") if wide else ()
    figures = ("tokens" if wide else "at", *times, *sizes, "fit off by" if wide else "fit")
    # In a narrow terminal names are shortened, never figures.
    table = plain_table(("layer type", *figures), right=figures, whole=figures)
    for kind, own in costs.layers.items():
        at, name = _at(kind, counts), kind  # named once, and by its degrees unless they are 1
        for degrees, cost in own.items():
            seconds = [getattr(cost, attribute)(at) for attribute in times.values()]
            table.add_row(
                name if name and degrees == ONE else f"{name or ' '} {degrees.text(always=('tp',))}",
                f"{at:,}",
                *(seconds_text(one) if one else "" for one in seconds),
                *((count_text(cost.parameters), bytes_text(cost.activation_bytes(at))) if wide else ()),
                "" if cost.fit_error is None else f"{cost.fit_error:.0%}",
            )
            name = ""
    print_table(console, table)
    if not wide:
        about = "at: tokens; input, weights: their gradients; fit: its worst error. All of it is in the file"
        print_line(console, (about, "dim"))


def _plain(costs: CostModel, counts: tuple[int, ...]) -> dict[str, object]:
    """Return what `--json` prints: the content of the cost file, and the token counts of the table."""
    import yaml

    document = yaml.safe_load(costs.to_yaml())
    return {**document, "tokens": {kind: _at(kind, counts) for kind in costs.layers}}
