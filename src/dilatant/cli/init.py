"""`dilatant init`: list the recipes, or write one as a YAML file to edit and train."""

from __future__ import annotations

import difflib
import shlex
from pathlib import Path
from typing import Annotated

import typer

from dilatant.cli.options import show_places, write_new
from dilatant.config.errors import UserError
from dilatant.config.printable import printable


def init(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="The recipe to write; without one, list all.", show_default=False),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="The file to write, RECIPE.yaml by default; - prints it.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Your model, an id or a folder; where a recipe's model has parts, its language model.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        list[str], typer.Option(help="What to train on: a file, a folder or an id; may be given several times.")
    ] = [],  # noqa: B006  # typer takes the default from here; nothing changes it
    output: Annotated[str | None, typer.Option(help="The run folder.", show_default=False)] = None,
) -> None:
    """List the recipes, or write one as a YAML file to edit and train."""
    from dilatant.config.config import parse_config
    from dilatant.config.files.remote_files import is_address
    from dilatant.config.files.yaml_text import read_yaml
    from dilatant.config.start import filled_in, recipe_texts
    from dilatant.report.say import open_console, say

    recipes = recipe_texts()
    if recipe is None:
        if any((to, model, data, output)):
            raise UserError("name the recipe to write, too; `dilatant init` lists them")
        for name, each in recipes.items():
            print(f"{name:<20} {each.splitlines()[0].removeprefix('# ')}")
        return
    if recipe not in recipes:
        near = difflib.get_close_matches(recipe, recipes, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(recipes)}"
        raise UserError(f"there is no recipe {recipe!r}; {hint}")
    if "" in (model, output, *data):
        raise UserError("--model, --data and --output must not be empty")
    file = to or Path(f"{recipe}.yaml")
    text = filled_in(recipes[recipe], file.parent, model, data, output)
    config = parse_config(read_yaml(text), file.resolve().parent, str(file))
    if str(file) == "-":
        print(text, end="")
        return
    quoted = printable(shlex.quote(str(file))).replace("\n", r"\n")
    write_new(file, text.replace(f"{recipe}.yaml", quoted), "--to")

    console = open_console()
    say(console, f"{file} is written. What to do with it:")
    show_places(
        console,
        {
            f"dilatant data lint {quoted}": "every sample that would fail",
            f"dilatant plan {quoted}": "the best layout for your devices, and whether they hold it",
            f"dilatant train {quoted}": "--set train.steps=10 --set train.schedule.warmup_steps=2 tries it",
        },
    )
    for source in config.data.train:
        path = source.path or ""
        if path and not is_address(path) and not Path(path).exists() and not any(mark in path for mark in "*?[{"):
            say(console, f"{path} is not there yet: put your data there, or name them in data.train")
