"""Data for a loop of your own: global batches that a model made in Python can execute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dilatant.config.data import DataSource
from dilatant.config.errors import UserError
from dilatant.data.blend import open_blend
from dilatant.data.chat import chat_tokenizer
from dilatant.data.encode import Encoding
from dilatant.data.loader import Loader
from dilatant.models.multimodal import MultimodalModel
from dilatant.profiling.media_units import media_unit
from dilatant.runtime.runtime import Runtime
from dilatant.training.layout import units_decoded_on


def make_loader(
    model: MultimodalModel,
    sources: Sequence[str | Path | DataSource],
    global_batch_size: int,
    *,
    tokenizer: Any = None,
    processors: Mapping[str, Any] | None = None,
    max_length: int = 2048,
    train_on: Literal["assistant", "all"] = "assistant",
    chat_template: str = "auto",
    seed: int = 0,
    steps: int | None = None,
    workers: int = 1,
    on_error: Literal["error", "skip"] = "error",
    parallel: Runtime | None = None,
) -> Loader:
    """Global batches of files or data sets, ready for `parallel.execute(batch.samples)`; endless without `steps`.

    sources: as `data.train` in a YAML file, or just paths. tokenizer: the model's own if not given. processors: encoder
    → an id, a folder or settings; the encoder's shape decides otherwise. parallel: where given, media are decoded only
    on ranks whose stages read them. The order hangs on `seed` alone, so all ranks that make this loader alike get the
    same batches. Close it, or use it in a `with`. Raises UserError.
    """
    tokenizer = tokenizer or model.tokenizer
    if tokenizer is None:
        raise UserError("the model has no tokenizer; give one: tokenizer=...")
    units = []
    for name, encoder in model.encoders.items():
        geometry = model[name].geometry
        units.append(
            media_unit(
                name,
                geometry,
                processor=(processors or {}).get(name),
                placeholder_id=model.placeholder_ids[name],
                marker=f"<{geometry.kind}>",
                merge=encoder.merge,
            )
        )
    decode = None
    if parallel is not None and on_error == "error":  # to skip alike, all ranks must decode alike
        decode = units_decoded_on(model, parallel.plan, parallel.comm.rank)
    encoding = Encoding(chat_tokenizer(tokenizer, chat_template), tuple(units), train_on, max_length, decode)
    blend = open_blend(
        [source if isinstance(source, DataSource) else DataSource(path=str(source)) for source in sources]
    )
    return Loader(
        blend,
        encoding,
        blend.sampler(seed, global_batch_size),
        steps=steps,
        workers=workers,
        on_error=on_error,
    )
