"""The multimodal model in one process: encoders with projectors around one language model."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache

from dilatant.attention.hook import PLAN_KEYWORD
from dilatant.attention.linear_rows import cache_keyword, linear_layers
from dilatant.attention.masks.mask import visible
from dilatant.config.errors import UserError, as_user_error, list_problems
from dilatant.config.files.exports import is_export_of_parts
from dilatant.config.model import LANGUAGE
from dilatant.config.signatures import require_call
from dilatant.config.train import PreferencesConfig
from dilatant.data.sample import EncodedSample
from dilatant.data.text.tokenizer import load_tokenizer
from dilatant.models.core.dtype import dtype_of_config
from dilatant.models.core.freeze import freeze
from dilatant.models.core.materialize import allocate, materialize
from dilatant.models.core.stage import Loss
from dilatant.models.core.unit import ModelGraph, Unit
from dilatant.models.core.weights import Weight
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.encoders.encoder_spec import Encoder, build_encoder
from dilatant.models.families.generic import opens_whole
from dilatant.models.families.pretrained import PretrainedModel, composite_of, load_pretrained_weights
from dilatant.models.families.pretrained_answers import PretrainedGeneration, inputs_of_sample
from dilatant.models.families.training_proof import prove
from dilatant.models.generators.generator import Generator, GeneratorUnit, check_specs
from dilatant.models.language.language import LanguageUnit
from dilatant.models.language.language_stage import BeforeLanguageModel, MultimodalOutput
from dilatant.models.language.media_attention import MediaMasks, in_words, read_media_attention
from dilatant.models.language.merge import prepend_placeholders
from dilatant.models.language.pair_loss import MarkedLoss, PairLoss, count_one
from dilatant.models.language.token_loss import TokenLoss
from dilatant.models.language.whole_unit import WholeUnit
from dilatant.models.saving import load_model, read_connectors, save_model
from dilatant.models.sources import load_language_model, load_pretrained_config


class MultimodalModel(nn.Module):
    """Encoders, a language model and generators, each a unit: `mllm.units`, `mllm["vision"]`, `mllm["language"]`.
    `mllm.graph` says which unit feeds which.

    language_model: a transformers causal language model, a config (random weights), or an id or folder; or a
    `PretrainedModel`, which includes its encoders. tokenizer: saved with the model. before_language_model: see
    `LanguageStage`. seed: determines random weights, independently per layer; without it torch's global generator
    draws them. device "meta": units from configs stay on the meta device until `materialize` initialises some of
    their layers. media_attention: the mask among the tokens of an image or clip (see `media_attention.MediaMasks`),
    by default "causal", or that of the `PretrainedModel`; other masks take effect once attention is chosen, in
    `parallelize` or by `row_attention.use_row_attention`. generators: see `Generator`; they run in training steps,
    not in `forward`. Raises UserError for inconsistent parts.
    """

    units: dict[str, Unit]
    """In order: encoders, the language model, generators. (A torch ModuleDict.)"""

    def __init__(
        self,
        encoders: Mapping[str, Encoder],
        language_model: Any,
        tokenizer: Any = None,
        before_language_model: BeforeLanguageModel | None = None,
        seed: int | None = None,
        device: Literal["cpu", "meta"] = "cpu",
        media_attention: MediaMasks | None = None,
        generators: Mapping[str, Generator] | None = None,
    ) -> None:
        super().__init__()
        self.whole = language_model if isinstance(language_model, PretrainedModel) else None
        if self.whole is None:
            self.media_attention = read_media_attention(media_attention, encoders)
        elif media_attention is None:
            self.media_attention = self.whole.media_attention
        else:
            raise UserError("media_attention is for a model of parts; a whole model's family says it")
        generators = generators or {}
        if before_language_model is not None:
            require_call("before_language_model", before_language_model, "rows", "inputs")
        llm = load_language_model(language_model) if self.whole is None else self.whole.language_model()
        embedding = cast(nn.Embedding, llm.get_input_embeddings())
        self.encoders = dict(encoders) if self.whole is None else self.whole.encoders()
        self.tokenizer = tokenizer
        self.placeholder_ids: dict[str, int] = {
            name: embedding.num_embeddings + position if encoder.placeholder_id is None else encoder.placeholder_id
            for position, (name, encoder) in enumerate(self.encoders.items())
        }
        self.generators = {
            name: replace(generator, token_id=embedding.num_embeddings + len(self.encoders) + position)
            if generator.token_id is None
            else generator
            for position, (name, generator) in enumerate(generators.items())
        }
        queries = {name: given.tokens_per_item for name, given in generators.items() if given.token_id is None}
        check_specs(self.encoders, self.generators, [*queries], self.placeholder_ids, embedding.num_embeddings)
        units: dict[str, Unit] = {
            name: build_encoder(
                name, replace(encoder, placeholder_id=self.placeholder_ids[name]), embedding.embedding_dim
            )
            if self.whole is None
            else self.whole.encoder(name)
            for name, encoder in self.encoders.items()
        }
        if self.whole is not None and self.whole.family.one_unit is not None:
            read = partial(inputs_of_sample, self.whole)
            units[LANGUAGE] = WholeUnit(LANGUAGE, llm, read, [*self.whole.family.towers])
        else:
            units[LANGUAGE] = LanguageUnit(
                LANGUAGE,
                llm,
                self.placeholder_ids,
                before_language_model,
                self.output_ids,
                queries,
                **({} if self.whole is None else self.whole.of_language),
            )
        for name, generator in self.generators.items():
            units[name] = GeneratorUnit(name, generator, LANGUAGE, embedding.embedding_dim)
        self.graph = ModelGraph.of(units.values(), anchor=LANGUAGE)
        if device == "cpu":
            for unit in units.values():
                materialize(unit, 0, len(unit.layers), seed)
        self.units = cast(Any, nn.ModuleDict(units))
        self._packs_under_mask: str | None = None  # "" if it does, else the reason; None: not tested yet

    def __getitem__(self, name: str) -> Any:
        """Return the unit called `name`. Raises KeyError that names the existing units."""
        if name not in self.units:
            raise KeyError(f"no unit {name!r}; there are {', '.join(self.units)}")
        return self.units[name]

    def use_loss(self, loss: TokenLoss) -> None:
        """Train the language model by this loss; call it before the model is cut into stages."""
        self.language.token_loss = loss
        self._count_loss(loss.count)

    def use_preferences(self, how: PreferencesConfig) -> None:
        """Train the language model on pairs of answers; call it before the model is cut into stages, and once its
        attention is chosen. Samples need a `branch` and, for a method that compares, a `reference`. Raises UserError
        for a model that cannot run such samples."""
        language, media, why = self.language, self.media_attention, None
        needs_all = callable(media) or media == "prefix" or linear_layers(language.model)
        if not language.packs_rows or language.crossing is not None:
            why = "cannot run two answers in one row, which preferences need; take another model"
        elif how.share_prompt and (needs_all or language.row_attention is None):
            why = "cannot run one prompt for two answers; set train.preferences.share_prompt: false"
        if why is not None:
            raise UserError(f"{language.family} {why}")
        self._count_loss(count_one)
        language.pair_loss = loss = MarkedLoss(how) if how.method == "kto" else PairLoss(how)
        measures = {name: Loss(count, weight=0.0) for name, count in loss.measures.items()}
        self.graph = replace(self.graph, losses={**self.graph.losses, **measures})

    def _count_loss(self, count: Callable[[EncodedSample], float]) -> None:
        language = self.language
        language.losses = {**language.losses, language.unit: Loss(count)}
        self.graph = replace(self.graph, losses={**self.graph.losses, language.unit: Loss(count)})

    @property
    def output_ids(self) -> dict[str, int]:
        """Generator → the id at whose positions it takes rows of the language model."""
        return {name: given.token_id for name, given in self.generators.items() if given.token_id is not None}

    @property
    def language(self) -> LanguageUnit:
        """The language model's unit."""
        return self[self.graph.anchor]

    def weights_of_whole(self) -> Iterator[tuple[Unit, Weight]]:
        """Yield the weights of a pretrained multimodal model with their units, without generators and queries."""
        for name, unit in self.units.items():
            if name not in self.generators:
                yield from ((unit, weight) for weight in unit.weights if weight.part != "queries")

    def sizes_of(self, input_ids: Sequence[int], media: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        """Compute `EncodedSample.sizes` for a custom sample: unit → number of tokens that the unit processes.

        media: encoder → keyword → array [encoder rows, ...]. Raises UserError for units that are no encoders or whose
        items differ in size, because rows do not determine their tokens.
        """
        sizes = {LANGUAGE: len(input_ids)}
        for name, inputs in media.items():
            count = self.encoders[name].tokens_of if name in self.encoders else None
            if count is not None:
                sizes[name] = int(count(inputs))
                continue
            if name not in self.encoders or self[name].packs:
                raise UserError(f"{name}: the number of its rows does not tell its tokens; say sizes yourself")
            sizes[name] = len(next(iter(inputs.values()))) * self[name].geometry.encoder_tokens
        return sizes

    def freeze(self, patterns: Iterable[str]) -> None:
        """Freeze weights, as `model.freeze` of the YAML does: units ("vision"), their parts ("vision.encoder"), layers,
        or patterns over parameter names ("language.layers.0.*").

        Weights that are frozen already stay so. Raises UserError that lists the patterns without a match.
        """
        if isinstance(patterns, str):
            raise UserError(f"give a list of patterns: freeze([{patterns!r}])")
        freeze(self.units, patterns)

    def encode(self, encoder_inputs: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return projected encoder tokens: unit → [encoder tokens, hidden]. Units without rows do not run.

        Raises UserError for inputs of an encoder that does not exist.
        """
        rows = {}
        for name, inputs in encoder_inputs.items():
            if name not in self.encoders:
                raise UserError(
                    f"inputs are given for encoder {name!r}; the encoders are {', '.join(self.encoders) or 'none'}"
                )
            if inputs and all(tensor.shape[0] for tensor in inputs.values()):
                rows[name] = self.units[name](inputs).flatten(0, -2)
        return rows

    def forward(
        self,
        input_ids: Tensor,
        *,
        encoder_inputs: Mapping[str, Mapping[str, Tensor]] | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_denominator: float | Tensor | None = None,
        return_logits: bool = True,
        sample_ids: Sequence[str] | None = None,
        lengths: Sequence[int] | None = None,
        attention_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> MultimodalOutput:
        """Compute loss and logits of a packed row or of a padded batch, through the encoders and the language model.

        input_ids: [1, tokens] with `position_ids` that restart at every sample, which keeps the samples apart; or
        [batch, tokens] with `attention_mask`. encoder_inputs: unit → keyword → tensor [encoder rows, ...], rows in the
        order of their placeholders. labels: [batch, tokens], -100 for no loss, not shifted. The loss is the fp32 sum
        over targets divided by `loss_denominator` (default: the number of targets). Without `return_logits` the head
        runs only at targets. sample_ids and lengths name samples in errors. attention_kwargs: keywords for the
        attention function; for attention plans, those of a packed row (from `language.attention_of`) are computed here
        if absent.

        If an encoder has merge "prepend" and the batch has no placeholders, an equal number of placeholders is inserted
        before every text, and logits include them. others: num_items_in_batch, `loss_denominator` under the name in
        transformers' Trainer. Raises UserError if rows and placeholders do not match, and for unknown keywords.
        """
        if (items := others.pop("num_items_in_batch", None)) is not None and loss_denominator is None:
            loss_denominator = items
        self._refuse_keywords(others)
        if self.language.crossing is not None and encoder_inputs:
            raise UserError(
                f"{self.language.crossing.unit}: its rows go to blocks of the language model, sample by sample, which "
                "only steps do (`parallelize`, `dilatant train`); export the model, and transformers runs it"
            )
        self._check_media_attention()
        rows = self.encode(encoder_inputs or {})
        input_ids, attention_mask, labels = self._prepend(
            rows, input_ids, attention_mask, labels, is_packed=position_ids is not None
        )
        if not attention_kwargs:
            attention_kwargs = dict(self._attention_of(input_ids, position_ids, attention_mask))
        return self.language(
            input_ids,
            rows,
            position_ids=position_ids,
            attention_mask=attention_mask,
            labels=labels,
            loss_denominator=loss_denominator,
            return_logits=return_logits,
            lengths=lengths,
            sample_ids=sample_ids,
            **(attention_kwargs or {}),
        )

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        *,
        encoder_inputs: Mapping[str, Mapping[str, Tensor]] | None = None,
        attention_mask: Tensor | None = None,
        **generation: Any,
    ) -> Tensor:
        """Generate token ids [batch, new tokens] by transformers' `generate`; pad prompts on the left.

        input_ids: [batch, tokens]; attention_mask: 0 at padding (default: none); generation: max_new_tokens and so on.
        A pretrained multimodal model generates through transformers' own class, with these weights. Raises UserError if
        rows and placeholders do not match.
        """
        if self.whole is not None and not self.generators:
            answers = PretrainedGeneration(composite_of(self.weights_of_whole(), self.whole), self.whole)
            return answers.generate(
                input_ids, encoder_inputs=encoder_inputs, attention_mask=attention_mask, **generation
            )
        self._check_media_attention()
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        was_training = self.training
        self.eval()
        try:
            rows = self.encode(encoder_inputs or {})
            input_ids, attention_mask, _ = self._prepend(rows, input_ids, attention_mask, None, is_packed=False)
            embeddings = self.language.embed(input_ids, rows)
            assert attention_mask is not None
            if self.media_attention != "causal":
                keyword = cache_keyword(self.language.model.forward)
                generation[keyword] = self._read_prompts(input_ids, embeddings, attention_mask)
            with self.language.decoding():
                return cast(Any, self.language.model).generate(
                    inputs_embeds=embeddings, attention_mask=attention_mask, **generation
                )
        finally:
            self.train(was_training)

    def _read_prompts(self, input_ids: Tensor, embeddings: Tensor, attention_mask: Tensor) -> DynamicCache:
        """Prefill: compute keys and values of all prompt tokens but the last, under the training mask among media;
        later tokens are text, which attends to everything before it."""
        before = input_ids.shape[1] - 1
        samples, padding = [], []
        for ids, is_token in zip(input_ids.cpu().numpy(), attention_mask.cpu().numpy(), strict=True):
            samples.append(ids[:before][is_token[:before] != 0])
            padding.append(before - samples[-1].size)
            if callable(self.media_attention):
                self._require_text_sees_all(ids[is_token != 0], len(padding) - 1)
        cache = DynamicCache(config=self.language.model.config)
        if before:
            base = self.language.model.base_model
            base(
                inputs_embeds=embeddings[:, :before],
                position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0)[:, :before],
                use_cache=True,
                **{cache_keyword(base.forward): cache},
                **self.language.attention_of(samples, padding),
            )
        return cache

    def _require_text_sees_all(self, ids: NDArray[np.int64], number: int) -> None:
        """Raise UserError if generated tokens would attend to more than a user's own mask lets them in training."""
        mask = self.language.attention_of([ids])[PLAN_KEYWORD].mask
        last = mask.fields[-1], mask.positions[-1]
        if not all(visible(last[0], field, last[1], at) for field, at in zip(mask.fields, mask.positions)):
            raise UserError(
                f"media_attention {in_words(self.media_attention)}: the last token of prompt {number} does not see all "
                "before it, as tokens that are generated do; only training and `forward` know such a mask"
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write every unit in the Hugging Face layout, and the manifest (see `saving`)."""
        units = {name: (encoder, cast(EncoderUnit, self[name])) for name, encoder in self.encoders.items()}
        save_model(Path(folder), self.language, units, self.drawing, self.tokenizer, self.media_attention)

    @property
    def drawing(self) -> dict[str, tuple[Generator, GeneratorUnit]]:
        """Each generator's specification and unit."""
        return {name: (given, cast(GeneratorUnit, self[name])) for name, given in self.generators.items()}

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, before_language_model: BeforeLanguageModel | None = None, **options: Any
    ) -> Self:
        """Read a model, with all weights trainable. It is an export of `save_pretrained`, or a pretrained
        vision-language or language model of transformers, as a folder or an id on the hub.

        options: dtype, attn_implementation and, for an export of `save_pretrained`, code and a user's own mask as
        media_attention (see `saving.load_model`). Raises UserError.
        """
        is_plain = (Path(folder) / "config.json").is_file() or not Path(folder).is_dir()
        if is_plain and not is_export_of_parts(folder):
            return cls._of_transformers(str(folder), **options)
        saved = load_model(Path(folder), before_language_model=before_language_model, **options)
        model = cls(
            saved.encoders,
            saved.language_model,
            tokenizer=saved.tokenizer,
            before_language_model=before_language_model,
            seed=0,
            media_attention=saved.media_attention,
            generators=saved.generators,
        )
        read_connectors(Path(folder), model.language, {name: model[name] for name in saved.generators})
        for name, state in saved.projectors.items():
            with as_user_error(
                f"{str(folder)!r}: {name}: the file does not hold the projector's weights", RuntimeError
            ):
                model[name].projector.load_state_dict(state, assign=True)
        return model

    @classmethod
    @torch.no_grad()
    def _of_transformers(
        cls, source: str, dtype: torch.dtype | None = None, attn_implementation: str | None = None
    ) -> Self:
        """Read a pretrained multimodal model, or a language model, of transformers. Raises UserError."""
        files = ("tokenizer_config.json", "tokenizer.json")
        has_words = not Path(source).is_dir() or any((Path(source) / name).is_file() for name in files)
        tokenizer = load_tokenizer(source) if has_words else None
        config = load_pretrained_config(source, "from_pretrained")
        if not opens_whole(config):
            text = load_language_model(source, dtype=dtype, attn_implementation=attn_implementation)
            return cls({}, text, tokenizer=tokenizer, seed=0)
        kind = dtype or dtype_of_config(config)
        whole = PretrainedModel.of(config, source, dtype=kind, attn_implementation=attn_implementation)
        model = cls({}, whole, tokenizer=tokenizer, seed=0, device="meta")
        loaded, weights = load_pretrained_weights(whole, source), allocate(model.units)
        for unit, weight in model.weights_of_whole():
            weights[weight.canonical].copy_(loaded[whole.key_of(unit, weight)])
        return model

    def attention_of_batch(self, input_ids: Tensor) -> Mapping[str, Any]:
        """Return the attention keywords for texts without padding: [batch, tokens]."""
        return self._attention_of(input_ids, None, torch.ones_like(input_ids))

    def _attention_of(
        self, input_ids: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None
    ) -> Mapping[str, Any]:
        """Compute a batch's attention keywords. This waits for the device; callers with the batch on the host pass
        keywords."""
        make = self.language.row_attention
        if make is None:
            if position_ids is not None and attention_mask is None and input_ids.shape[0] == 1:
                self._require_apart(position_ids)
            return {}
        if position_ids is None or attention_mask is not None:
            mask = None if attention_mask is None else attention_mask.cpu().numpy()
            return make.padded(input_ids.cpu().numpy(), mask)
        begins = (position_ids[0] == 0).nonzero()[1:, 0].cpu()
        return make([part.numpy() for part in input_ids[0].cpu().tensor_split(begins)])

    def _require_apart(self, position_ids: Tensor) -> None:
        """Raise UserError if samples of this row would influence each other under transformers' own mask."""
        if self._packs_under_mask is None:
            self._packs_under_mask = prove(self.language, self.whole, f"mask {self.media_attention}").packed or ""
        if self._packs_under_mask and int((position_ids.flatten(0, -2)[0] == position_ids.min()).sum()) > 1:
            raise UserError(
                f"{self.language.family}: in this packed row, samples would reach each other under transformers' own "
                f"mask (on a small copy, {self._packs_under_mask}); call "
                "dilatant.models.row_attention.use_row_attention(model) first, or give one sample at a time"
            )

    def _refuse_keywords(self, keywords: Mapping[str, Any]) -> None:
        problems = []
        known = [*signature(self.forward).parameters][:-1]  # without **others
        for keyword in keywords:
            takers = [n for n in self.encoders if self[n].geometry.input_name == keyword]
            if takers:
                right = " or ".join(f"encoder_inputs={{{name!r}: {{{keyword!r}: ...}}}}" for name in takers)
                problems.append(f"{keyword!r} is an encoder's input; give {right}")
                continue
            near = difflib.get_close_matches(keyword, known, n=1, cutoff=0.5)
            meant = f"did you mean {near[0]!r}?" if near else f"they are {', '.join(known)}"
            problems.append(f"{keyword!r} is not one of them; {meant}")
        if problems:
            raise list_problems("the model is called with unknown keywords:", problems)

    def _check_media_attention(self) -> None:
        if self.media_attention != "causal" and self.language.row_attention is None:
            raise UserError(
                f"media_attention is {in_words(self.media_attention)}, which needs block tables: call "
                "dilatant.models.row_attention.use_row_attention(model) first"
            )

    def _prepend(
        self,
        rows: Mapping[str, Tensor],
        input_ids: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        is_packed: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Prepend placeholders to every text, for encoders with merge "prepend" without placeholders in the text."""
        tokens = {}
        batch = input_ids.shape[0]
        for name, encoded in rows.items():
            placeholder = self.placeholder_ids[name]
            if self.encoders[name].merge == "prepend" and not bool((input_ids == placeholder).any()):
                if is_packed or encoded.shape[0] % batch:
                    raise UserError(
                        f"{name}: {encoded.shape[0]} encoder tokens cannot be shared out in front of "
                        + (f"{batch} texts" if not is_packed else "the samples of a packed row")
                        + f"; put placeholder id {placeholder} where they belong"
                    )
                tokens[placeholder] = encoded.shape[0] // batch
        if not tokens:
            return input_ids, attention_mask, labels
        return prepend_placeholders(input_ids, attention_mask, labels, tokens)
