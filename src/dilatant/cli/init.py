"""`dilatant init`: list the recipes, or write one as a YAML file to edit and train."""

from __future__ import annotations

import difflib
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from dilatant.cli.options import say_loading, show_places, write_new
from dilatant.config.errors import UserError
from dilatant.config.printable import printable
from dilatant.report.say import open_console, say


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
    text = recipes[recipe]
    if model is not None and os.path.isdir(model):
        text = _for_model(recipe, text, model)
    text = filled_in(text, file.parent, model, data, output)
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
            f"dilatant train {quoted} --set train.steps=10 --set train.schedule.warmup_steps=2": "a trial",
            f"dilatant train {quoted}": "the whole run; after a trial with --overwrite",
        },
    )
    for source in config.data.train:
        path = source.path or ""
        if path and not is_address(path) and not Path(path).exists() and not any(mark in path for mark in "*?[{"):
            say(console, f"{path} is not there yet: put your data there, or name them in data.train")


def _for_model(recipe: str, text: str, model: str) -> str:
    """Return the recipe's text for the model in a folder. Raises UserError, with another way, if they do not fit."""
    import yaml

    from dilatant.config.files.exports import encoders_of_export, is_export_of_parts
    from dilatant.config.model import LANGUAGE
    from dilatant.config.start import for_export_of_parts

    section = yaml.safe_load(text)["model"]
    is_of_parts = is_export_of_parts(model)
    if is_of_parts:
        kinds = {name: entry["kind"] for name, entry in encoders_of_export(model).items()}
    else:
        kinds = _encoders_of_whole(model)
    reads = " and ".join(dict.fromkeys(kinds.values())) or "text only"
    here = f"--model {model!r}"
    shown = shlex.quote(model)
    as_it_is = f"fine-tune it by `dilatant train --model {shown} --data FILE --lora --save-config FILE.yaml`"
    if "language_model" in section:
        if kinds:
            raise UserError(
                f"{here} reads {reads} itself, and {recipe!r} puts encoders before a language model; {as_it_is}, or "
                "give a language model" + (f", such as {Path(model) / LANGUAGE}" if is_of_parts else "")
            )
        return text
    images = [name for name, kind in kinds.items() if kind == "image"]
    if not images:
        way = as_it_is if kinds else f"`dilatant init llava-stage1 --model {shown}` gives it an encoder"
        raise UserError(f"{here} reads {reads}, and {recipe!r} shows it images; {way}")
    if not is_of_parts:
        return text
    if "fps" in section.get("processor", {}):
        raise UserError(
            f"{here} is an export of parts, which reads no clips, and {recipe!r} is about clips; give a whole model "
            f"that reads them (docs/families.md), or train on images: `dilatant init vlm-lora --model {shown}`"
        )
    return for_export_of_parts(text, images[0])


def _encoders_of_whole(model: str) -> dict[str, str]:
    """Return encoder → kind of the model of transformers in a folder; none for a language model."""
    say_loading()
    from dilatant.models.families.generic import opens_whole
    from dilatant.models.families.pretrained import PretrainedModel
    from dilatant.models.sources import load_pretrained_config

    config = load_pretrained_config(model, "--model")
    if not opens_whole(config):
        return {}
    return {name: tower.kind for name, tower in PretrainedModel.of(config, "--model").family.towers.items()}
