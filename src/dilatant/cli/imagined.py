"""The config of `dilatant plan`: a file, or a model on GPUs with equal samples that are described in numbers."""

from __future__ import annotations

import atexit
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilatant.cli.options import Overrides, Trust, read_config
from dilatant.comm.temporary import TemporaryFolder
from dilatant.config.errors import UserError

if TYPE_CHECKING:
    from dilatant.config import Config

LONGEST = 1 << 17
"""Tokens of the longest imagined sample."""
SAMPLES = 4
"""Samples of a step for each GPU."""


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
    gpus: Annotated[str, typer.Option(metavar="NxHARDWARE", help="With --model: its devices.")] = "8xH100"
    images: Annotated[int, typer.Option(min=0, help="With --model: images of a sample.")] = 0
    image_size: Annotated[str, typer.Option(metavar="WxH", help="With --model: their pixels.")] = "1024x768"
    text: Annotated[int, typer.Option(min=1, help="With --model: words of a sample.")] = 512

    @property
    def name(self) -> str:
        return self.model or (self.config.stem if self.config else "")

    def read(self) -> Config:
        """Read the config, or make that of the imagined run in a temporary folder. Raises UserError."""
        if (self.config is None) == (self.model is None):
            raise UserError("name the CONFIG of a run, or a model with --model")
        path = self.config or self._imagine()
        return read_config(path, self.overrides, self.trust or None, loads=True)

    def _imagine(self) -> Path:
        count, hardware = _pair(self.gpus, r"(\d+)x(.+)", "--gpus", "64xH100")
        size = _pair(self.image_size, r"(\d+)x(\d+)", "--image-size", "1024x768")
        nodes, rest = divmod(int(count), 8)
        if int(count) < 1 or (nodes and rest):
            raise UserError(f"--gpus {self.gpus}: nodes have eight; name up to eight, or a multiple of eight")
        place = TemporaryFolder()
        atexit.register(place.close)
        folder, samples = Path(place.path), SAMPLES * int(count)
        asked: list[dict[str, str]] = [{"type": "image", "image": "image.png"}] * self.images
        if self.images:
            from PIL import Image

            Image.new("RGB", (int(size[0]), int(size[1]))).save(folder / "image.png")
        turns = [("user", [*asked, {"type": "text", "text": "word"}]), ("assistant", " ".join(["word"] * self.text))]
        line = json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
        (folder / "samples.jsonl").write_text(f"{line}\n" * samples, encoding="utf-8")
        model = Path(self.model).resolve() if self.model and Path(self.model).is_dir() else self.model
        tree: dict[str, Any] = {
            "output_dir": str(folder / "run"),
            "model": {"id": str(model)} if self.images else {"language_model": {"id": str(model)}},
            "data": {"train": [{"path": str(folder / "samples.jsonl")}], "max_length": LONGEST},
            "train": {"global_batch_size": samples},
            "cluster": {"nodes": nodes or 1, "gpus_per_node": 8 if nodes else int(count), "hardware": hardware},
        }
        (folder / "config.yaml").write_text(json.dumps(tree), encoding="utf-8")
        return folder / "config.yaml"


def _pair(text: str, pattern: str, option: str, example: str) -> tuple[str, str]:
    """Return both groups of the pattern. Raises UserError."""
    found = re.fullmatch(pattern, text)
    if found is None:
        raise UserError(f"{option} {text}: write it like {example}")
    return found[1], found[2]
