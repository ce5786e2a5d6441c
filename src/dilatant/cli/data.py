"""`dilatant data`: statistics of the data, and the samples that would fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from dilatant.cli.options import IS_PAGE, AsJson, ConfigOptions, output_file, with_options
from dilatant.report.say import open_console, say
from dilatant.report.text.wording import counted

if TYPE_CHECKING:
    from dilatant.data.index.lint import Problem

app = typer.Typer(help="What the data is like, and which samples would fail.", no_args_is_help=True)

Workers = Annotated[
    int | None, typer.Option(min=0, help="Processes that read; 0 works in this one. Default: all cores.")
]


@app.command()
@with_options
def stats(
    options: ConfigOptions,
    page: Annotated[
        Path | None,
        typer.Option(help="Also write the figures and plots to this HTML file.", callback=output_file(IS_PAGE)),
    ] = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Show the tokens of every training sample in every unit: distributions, ratios, the gain of balancing, and samples
    that training would refuse. No media are decoded, except for the few samples shown on the page."""
    resolved = options.read()
    from dilatant.data.index.lint import unused_by_source, unused_lines
    from dilatant.data.index.sizes import blend_sizes
    from dilatant.planning.assemble import assemble_samples
    from dilatant.planning.problem.describe_data import describe_data
    from dilatant.report.pages.page import write_page
    from dilatant.report.pages.page_links import link_pages
    from dilatant.report.pages.stats_page import render_stats_page, stats_parts
    from dilatant.report.printed_parts import print_parts

    console = open_console(stderr=as_json)
    samples = assemble_samples(resolved)
    with _progress(console, "measuring samples") as show:
        index = blend_sizes(
            samples.train, samples.encoding, cache_dir=resolved.data.cache_dir, workers=workers, progress=show
        )
    title = f"Training data of {options.config.name}"
    for line in unused_lines(samples.train, index, samples.encoding):
        say(console, line)
    report = describe_data(resolved, samples, index, title, examples=page is not None)
    if page is not None:
        write_page(page, render_stats_page(report))
        link_pages(Path(resolved.output_dir))
    if as_json:
        balance = [asdict(one) for one in report.balance]
        unused = unused_by_source(samples.train, index, samples.encoding)
        record = {**report.stats.to_json(), "batch_size": report.batch_size, "balance": balance, "unused": unused}
        print(json.dumps(record))
    else:
        print_parts(console, stats_parts(report))
        if page is not None:
            console.print(f"plots: {page}", highlight=False, markup=False, soft_wrap=True)


@app.command()
@with_options
def lint(
    options: ConfigOptions,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Do not decode media: faster, but misses cut-off files.")
    ] = False,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Find every training or held-out sample that would fail in training. Exits with code 1 if there is any, and with 2
    if the config or its model would fail; weights are not read."""
    resolved = options.read()
    from dilatant.data.index.lint import lint as find_problems
    from dilatant.data.index.lint import unused_by_source, unused_lines
    from dilatant.data.index.sizes import blend_sizes
    from dilatant.planning.assemble import assemble_samples
    from dilatant.training.prepare import open_model

    console = open_console(stderr=as_json)
    samples = assemble_samples(resolved)
    open_model(resolved, samples)
    problems: list[Problem] = []
    unused: dict[str, tuple[str, ...]] = {}
    checked = 0
    for blend, encoding in ((samples.train, samples.encoding), (samples.held_out, samples.held_out_encoding)):
        if blend is None:
            continue
        with _progress(console, "reading samples", len(blend)) as show:
            index = blend_sizes(blend, encoding, cache_dir=resolved.data.cache_dir, workers=workers, progress=show)
            problems += find_problems(
                blend, encoding, deep=not headers_only, index=index, workers=workers, progress=show
            )
        checked += len(blend)
        unused |= unused_by_source(blend, index, encoding)
        for line in unused_lines(blend, index, encoding):
            say(console, line)
    if as_json:
        found = [asdict(problem) for problem in problems]
        print(json.dumps({"samples": checked, "problems": found, "unused": unused}))
    else:
        for problem in problems:
            # Text without markup: names and texts of the data may contain brackets.
            console.print(Text.assemble((problem.sample, "red"), f": {problem.problem}"), soft_wrap=True)
            if problem.remedy:
                console.print(Text(f"    {problem.remedy}", "dim"), soft_wrap=True)
        verdict = counted(len(problems), "problem") if problems else "no problem"
        console.print(f"{counted(checked, 'sample')}, {verdict}", highlight=False)
    raise typer.Exit(1 if problems else 0)


@contextmanager
def _progress(console: Console, what: str, total: int | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a task on a terminal, as the yielded function of (done, total) is told."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar, count = BarColumn(bar_width=24), MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), bar, count, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done, total: progress.update(task, completed=done, total=total)
