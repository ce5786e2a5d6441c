"""Model card of an export: what the model began from, its data, its plan, the versions and the licence."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

from dilatant.config import Config, UserError
from dilatant.config.files.own_files import read_text
from dilatant.config.printable import printable
from dilatant.planning.layout import TrainingPlan
from dilatant.report.text.search_reasons import layout_text


def model_card(config: Config, run: Path, step: int, licence: str | None = None) -> str:
    """Return the card of a run's export, with metadata for the hub. Local data and models appear by the last part of
    their paths. licence: an identifier of the hub."""
    from huggingface_hub import ModelCardData

    model, train = config.model, config.train
    sources = dict.fromkeys([model.text.id, *(entry.id for entry in model.encoders.values())])
    names = [source for source in sources if source is not None]
    ids = [name for name in names if not Path(name).exists()]
    data = {entry.id or Path(str(entry.path)).name: entry.weight for entry in config.data.train}
    trained = f"all weights but {', '.join(model.freeze)}" if model.freeze else "all weights"
    if model.lora is not None:
        trained = f"LoRA of rank {model.lora.r} on {', '.join(model.lora.units)}"
    try:
        plan = layout_text(TrainingPlan.from_json(read_text(run / "plan.json")).plan)
    except (OSError, ValueError, UserError):
        plan = "not stored"
    versions = (f"{name} {_version(name)}" for name in ("dilatant", "torch", "transformers"))
    rows = {
        "from": ", ".join(name if name in ids else Path(name).name for name in names) or "random weights",
        "data": ", ".join(f"{name} (weight {weight:g})" for name, weight in data.items()) or "given in Python",
        "steps": f"{step:,} of {train.global_batch_size:,} samples each",
        "trained": trained,
        "learning rate": f"{train.optimizer.learning_rate:g} at its peak, {train.schedule.kind}",
        "plan": plan,
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "licence": licence or "not stated; that of the model it comes from holds for its weights",
    }
    card = ModelCardData(
        base_model=ids or None,
        datasets=[entry.id for entry in config.data.train if entry.id is not None] or None,
        library_name="transformers" if model.is_whole else None,
        license=licence,
        tags=["dilatant"],
    )
    cells = {name: " ".join(printable(text).replace("|", "/").split()) for name, text in rows.items()}
    lines = ["---", card.to_yaml(), "---", "", f"# {printable(run.resolve().name)}", "", "| | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {text} |" for name, text in cells.items()), ""])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"  # a source tree on PYTHONPATH
