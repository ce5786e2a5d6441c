"""`dilatant check-model`: prove on a small copy how a model can be trained, without its weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from dilatant.cli.options import AsJson, say_loading
from dilatant.config.errors import UserError
from dilatant.report.say import open_console, print_facts

RUNGS = {
    3: "encoders cut between blocks, packed rows",
    2: "packed rows, an encoder is one stage",
    1: "every sample is a row of its own",
    0: "the family's own forward as one unit, every sample is a row of its own",
}


def check_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="ID|FOLDER", help="A model of Hugging Face; its config.json is enough.", show_default=False
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Prove on a small copy how a model can be trained (packed, cut, LoRA, export). Exits with 2 if it cannot."""
    say_loading()
    from dilatant.hf.check_model import check_config
    from dilatant.models.sources import load_pretrained_config

    check = check_config(load_pretrained_config(model, "check-model"), model)
    if as_json:
        print(json.dumps(asdict(check), indent=2))
    export = check.proven.get("export", "yes")
    if check.rung is None or export != "yes":
        why = f"its export is wrong ({export})"
        why = next(iter(check.refusals.values()), why) if check.rung is None else why
        raise UserError(f"{model!r} ({check.family}) cannot be trained: {why}")
    if as_json:
        return
    lines = {"family": check.family, **check.found, "rung": f"{check.rung}: {RUNGS[check.rung]}"}
    lines |= {f"not rung {rung}": why for rung, why in check.refusals.items()} | dict(check.proven)
    print_facts(open_console(), model, lines)
