"""Data loaders for a training loop of your own: global batches that a model made in Python can execute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from dilatant.config.config import data_section
from dilatant.config.data import DataConfig, DataSource
from dilatant.config.errors import UserError, list_problems
from dilatant.config.own_parts import OwnPart
from dilatant.data.index.sizes import blend_sizes
from dilatant.data.order.blend import Blend, StreamBlend, open_blend, open_own_data
from dilatant.data.order.sampler import Sampler, StreamSampler
from dilatant.data.sample import EncodedSample, MediaUnit
from dilatant.data.text.chat import chat_tokenizer
from dilatant.data.text.encoding import TOKENS, Encoding
from dilatant.data.text.tokenizer import generation_ends
from dilatant.data.workers.batches import GlobalBatch
from dilatant.models.families.media_units import units_of_encoder, units_of_pretrained
from dilatant.models.multimodal import MultimodalModel
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.step.step_planner import PreparedStep
from dilatant.training.feeding.decoding import RankSource
from dilatant.training.feeding.feed import StepPrefetcher, gather_bad_samples, merge_bad_samples
from dilatant.training.feeding.inputs import DecodeRequirements
from dilatant.training.feeding.step_data import IndexedData, StreamedData, draws


def make_loader(
    model: MultimodalModel,
    sources: Sequence[str | Path | DataSource] | Any,
    global_batch_size: int,
    *,
    tokenizer: Any = None,
    processors: Mapping[str, Any] | None = None,
    seed: int = 0,
    steps: int | None = None,
    parallel: Runtime | None = None,
    **data: Any,
) -> LoadedBatches:
    """Return global batches of files or data sets, ready for `parallel.execute(batch.samples)`; endless without
    `steps`.

    sources: as `data.train` in a YAML file, or just paths; or a list of records, or any object with `__len__` and
    `__getitem__`, as `train_data` of `dilatant.train`. tokenizer: the model's own by default. processors: encoder →
    an id, a folder or settings; by default they follow from the encoder's shape or, in a pretrained multimodal model,
    from its files. data: keys of the config's `data` section, such as `max_length`, `truncation`, `on_error` and
    `workers`, without those of held-out data. parallel: if given, all of its ranks call this, and each batch holds on
    every rank the parts of samples that its stages use (of the rest only sizes); without it, everything. The order
    depends on `seed` alone, so all ranks that make this loader alike get the same batches. Close it, or use it in a
    `with`. Raises UserError.
    """
    tokenizer = tokenizer or model.tokenizer
    if tokenizer is None:
        raise UserError("the model has no tokenizer; give one: tokenizer=...")
    if model.generators:
        raise UserError("files are read for encoders only; make `EncodedSample`s for a model with generators")
    if held_out := data.keys() & {"train", "eval", "val_size"}:
        raise UserError(f"{min(held_out)}: a loader reads `sources` only; make another one for held-out data")
    keys = data_section(data, "make_loader")
    units, source = _media_units(model, processors or {}, tokenizer)
    chat = chat_tokenizer(
        tokenizer,
        keys.chat_template,
        day=keys.template_date,
        processed=bool(model.whole and units),
        ends=generation_ends(source),
    )
    truncates = keys.truncation == "right"
    encoding = Encoding(chat, units, keys.train_on, keys.max_length, truncates=truncates, system=keys.system)
    if isinstance(sources, Sequence) and all(isinstance(each, str | Path | DataSource) for each in sources):
        named = [each if isinstance(each, DataSource) else DataSource(path=str(each)) for each in sources]
        blend = open_blend(named, cache_dir=keys.cache_dir, max_samples=keys.max_samples)
    else:
        blend = open_own_data(OwnPart("sources", sources), keys.max_samples)
    return LoadedBatches(blend, encoding, blend.sampler(seed, global_batch_size), steps, keys, parallel)


def _media_units(
    model: MultimodalModel, processors: Mapping[str, Any], tokenizer: Any
) -> tuple[tuple[MediaUnit, ...], str | None]:
    """Return the media units of a model's encoders, and the source of a pretrained multimodal model."""
    if unknown := processors.keys() - model.encoders.keys():
        raise UserError(f"processors: no encoder {min(unknown)!r}; there are {', '.join(model.encoders) or 'none'}")
    if model.whole is not None:
        source = getattr(model.whole.config, "_name_or_path", None) or None
        given, *others = *processors.values(), None  # one for all its encoders
        if any(other not in (None, given) for other in others):
            raise UserError("processors: a pretrained multimodal model has one processor for all its encoders")
        return units_of_pretrained(model.whole, given, tokenizer, source), source
    units: list[MediaUnit] = []
    for name, encoder in model.encoders.items():
        units += units_of_encoder(
            model[name],
            encoder.merge,
            processor=processors.get(name),
            placeholder_id=model.placeholder_ids[name],
            marker=f"<{model[name].geometry.kind}>",
        )
    return tuple(units), None


class LoadedBatches:
    """Iterator over global batches, as `make_loader` returns it; close it."""

    def __init__(
        self,
        blend: Blend | StreamBlend,
        encoding: Encoding,
        sampler: Sampler | StreamSampler,
        steps: int | None,
        keys: DataConfig,
        parallel: Runtime | None,
    ) -> None:
        everything = frozenset({TOKENS, *(unit.name for unit in encoding.units)})
        self._comm = None if parallel is None else parallel.comm
        self._skips = keys.on_error == "skip"
        data: IndexedData | StreamedData
        if isinstance(blend, Blend):
            sizes = blend_sizes(blend, encoding, cache_dir=keys.cache_dir, workers=keys.workers)
            data = IndexedData("train", blend, sizes, sizes.refused(encoding.max_length))
            if data.refused and not self._skips:
                raise list_problems("samples that cannot be trained on:", list(data.refused.values())[:8])
        self._source = RankSource(self._comm, {"train": blend}, encoding, keys)
        if isinstance(sampler, Sampler):
            order = draws(sampler, sampler.start(), 0, steps)
        else:
            data = StreamedData("train", sampler, self._source)
            order = data.draws(sampler.start(), 0, steps)
        needs = None if parallel is None else DecodeRequirements(parallel.model, parallel.plan, parallel.comm.rank)

        def parts(step: Sequence[EncodedSample] | PreparedStep) -> dict[int, frozenset[str]]:
            if isinstance(step, PreparedStep):
                assert needs is not None
                return needs.of(step)
            return dict.fromkeys(range(len(step)), everything)

        def plan(heads: Sequence[EncodedSample], step: int) -> Sequence[EncodedSample] | PreparedStep:
            return heads if parallel is None else parallel.plan_step(heads, step_number=step)

        self._feed: StepPrefetcher[Any] = StepPrefetcher(data, order, self._source, plan, parts, skips=self._skips)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GlobalBatch:
        if self._skips:
            found = self._feed.found()
            self._feed.leave_out(
                merge_bad_samples([found]) if self._comm is None else gather_bad_samples(self._comm, found)
            )
        return next(self._feed).batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that decode."""
        self._feed.close()
        self._source.close()
