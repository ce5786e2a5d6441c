"""The `model:` section of the YAML file: encoders, projectors, language model, generators, LoRA and freezing."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dilatant.config.base import IdOrPath, PathRule, Section

LANGUAGE = "language"
"""Name of the language model's unit."""
MediaMask = Literal["causal", "bidirectional", "embedded", "modality"]
PROJECTORS = ("linear", "mlp", "identity")
"""The kinds of projectors that can be newly initialized."""


class ModelSource(Section):
    """Source of a Hugging Face model: `id` (pretrained) or `config` (from scratch)."""

    id: IdOrPath | None = None
    """A model id on the hub or a local folder in the Hugging Face layout."""
    config: dict[str, Any] | None = None
    """A transformers config with its `model_type`; the model starts from random weights."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Off by default."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.id is None) == (self.config is None):
            raise ValueError("give either 'id' (a hub id or a local folder) or 'config' (from scratch)")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("'config' needs 'model_type', for example model_type: llama")
        return self


class LanguageModelConfig(ModelSource):
    tokenizer: IdOrPath | None = None
    """A tokenizer id or folder; `bytes` for the built-in byte tokenizer. Default: the model's own `id`."""
    attn_implementation: str | None = None
    """The attention implementation: `dilatant`, whose cost for a packed row is the sum of its samples' squared lengths,
    or a name that transformers knows, such as `sdpa` or `eager`, with a dense mask over the whole row. Default:
    `dilatant` if the family supports it, else transformers' default."""
    media_attention: MediaMask | dict[str, MediaMask] = "causal"
    """Attention mask of media tokens in the text. `causal`: all preceding tokens. `bidirectional`: these and their own
    whole item (Gemma 3). `embedded`: only their own item. `modality`: all items of the same encoder in the sample, and
    nothing else. One value for all encoders, or one for each, as in `{vision: bidirectional}`; default `causal`. Text
    attends to all preceding tokens. Masks other than `causal` need `dilatant`."""

    @model_validator(mode="after")
    def _media_need_block_tables(self) -> Self:
        if not self.media_see_as_text and self.attn_implementation not in (None, "dilatant"):
            raise ValueError(
                f"media_attention {self.media_attention!r} needs attn_implementation: dilatant, "
                f"not {self.attn_implementation!r}"
            )
        return self

    @property
    def needs_plans(self) -> bool:
        """Return True if packed rows require attention plans; by default plans are used if the family supports them."""
        return self.attn_implementation == "dilatant" or not self.media_see_as_text

    @property
    def media_see_as_text(self) -> bool:
        """Return True if the tokens of all media have the causal mask of text."""
        masks = self.media_attention
        return masks == "causal" or (isinstance(masks, dict) and {*masks.values()} <= {"causal"})


class EncoderConfig(ModelSource):
    kind: Literal["image", "audio"]
    """The modality that the encoder reads."""
    projector: Annotated[str, PathRule(("", *PROJECTORS))] | None = None
    """The map from the encoder's width to the language model's: `linear`, `mlp`, `identity`, or the path of an export
    or a safetensors file whose projector is loaded. Default: `mlp`. If `id` is an encoder in an export, its projector
    in that export is loaded unless another kind is named; for a new one of that kind, copy the encoder elsewhere."""
    placeholder: str = ""
    """The marker in the text that stands for one item. Default: `<image>` or `<audio>` by kind."""
    features: Literal["all", "patch"] = "all"
    """The encoder tokens to pass on: all, or all but class and register tokens."""
    merge: Literal["placeholder", "prepend"] = "placeholder"
    """Insert items at their placeholders, or put all items before the text."""
    processor: IdOrPath | dict[str, Any] | None = None
    """An image processor or feature extractor: id, folder, or its settings. Default: that of `id`, or one derived from
    `config`."""

    @field_validator("projector")
    @classmethod
    def _kind_or_path(cls, value: str | None) -> str | None:
        if value is None or value in PROJECTORS or "/" in value or value.endswith(".safetensors"):
            return value
        raise ValueError("must be 'linear', 'mlp' or 'identity', or a path such as ./NAME or NAME.safetensors")

    @property
    def goes_on(self) -> bool:
        """Return True if `projector` is a path from which weights are loaded."""
        return self.projector is not None and self.projector not in PROJECTORS

    @property
    def marker(self) -> str:
        return self.placeholder or f"<{self.kind}>"


class TargetConfig(Section):
    """The target of a generator that learns features instead of pictures."""

    encoder: IdOrPath | dict[str, Any]
    """A vision model of transformers, as id, folder or config: the net generates its features, patch by patch. The
    net's channels are the feature width, its `sample_size` the patches per side."""


class GeneratorConfig(Section):
    """A denoising net of diffusers, conditioned on the language model. Needs the extra `generators`."""

    id: IdOrPath | None = None
    """A net or a whole pipeline in diffusers' layout: a local folder or an id on the hub."""
    config: dict[str, Any] | None = None
    """A diffusers config with its `_class_name` (SD3Transformer2DModel, PixArtTransformer2DModel,
    SanaTransformer2DModel, FluxTransformer2DModel, UNet2DConditionModel); the net starts from random weights."""
    sample_size: int | None = Field(None, ge=1)
    """Height and width of the latents of a Flux net (of the pixels, without an autoencoder). Default: 128. Other nets
    have this value in their own config."""
    kind: Literal["image"] = "image"
    """The modality that is generated: images in an assistant's turns are the targets."""
    connector: Literal["linear", "mlp", "identity", "transformer"] = "mlp"
    """The map from the language model's hidden states to the net's condition. In `transformer`, the rows of a picture
    attend to each other."""
    connector_layers: int = Field(2, ge=1)
    """Blocks of a `transformer` connector."""
    tokens_per_item: int = Field(4, ge=1)
    """Tokens in the text whose hidden states are the condition of a picture."""
    token: str | None = None
    """The vocabulary token at the positions of `tokens_per_item`. Default: learned queries (`language.queries`)."""
    start: str = Field("<draw>", min_length=1)
    """The text that the assistant writes before a picture; may be a token of the tokenizer."""
    placeholder: str = ""
    """The marker in an assistant's text that stands for a picture. Default: `<image>`."""
    vae: IdOrPath | dict[str, Any] | None = None
    """The frozen autoencoder whose latents the net generates: an id or folder, or a diffusers config. Default: that of
    the pipeline; without one the net generates pixels."""
    target: TargetConfig | None = None
    """Features of a frozen vision model, to be generated instead of pictures. Turning them into pictures needs a
    decoder, which is not part of the model."""
    cache_latents: bool = False
    """Cache the autoencoder's output for each picture (mean and log-variance) next to the data index, so that no
    picture is decoded or encoded again, in this or another run. Needs an autoencoder with pretrained weights."""
    objective: Literal["flow", "epsilon", "velocity"] | None = None
    """The prediction target of the net: the direction from picture to noise (rectified flow), the noise, or the
    velocity. Default: that of the pipeline's scheduler, else flow."""
    drop: float = Field(0.1, ge=0, le=1)
    """Probability of training a picture without its condition, as needed for classifier-free guidance."""
    loss_weight: float = Field(1.0, ge=0)
    """Weight of the generator's loss, the mean over all pictures of a step, relative to the language model's loss."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.id is None) == (self.config is None):
            raise ValueError("give either 'id' (a hub id or a local folder) or 'config' (from scratch)")
        for key, settings in (("config", self.config), ("vae", self.vae)):
            if isinstance(settings, dict) and "_class_name" not in settings:
                example = "AutoencoderKL" if key == "vae" else "SD3Transformer2DModel"
                raise ValueError(f"{key!r} needs '_class_name', for example _class_name: {example}")
        # A config saved by a run has the default written out.
        default = type(self).model_fields["connector_layers"].default
        if self.connector_layers != default and self.connector != "transformer":
            raise ValueError("'connector_layers' are those of `connector: transformer`; leave them out or set it")
        if self.target is not None and (self.vae is not None or self.cache_latents):
            raise ValueError("'vae' and 'cache_latents' are for pictures; with 'target' the net draws features")
        if self.cache_latents and (isinstance(self.vae, dict) or (self.vae is None and self.id is None)):
            raise ValueError("'cache_latents' needs an autoencoder with weights of its own; name one as 'vae'")
        return self

    @property
    def marker(self) -> str:
        return self.placeholder or f"<{self.kind}>"


class LoraConfig(Section):
    """LoRA: only low-rank matrices, added to linear layers, are trained; names as in peft."""

    r: int = Field(16, gt=0, le=1 << 16)
    """Rank of the matrices."""
    lora_alpha: float = Field(32, gt=0)
    """Scale the LoRA update by `lora_alpha / r`."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the input of the LoRA matrices."""
    use_rslora: bool = False
    """Scale the LoRA update by `lora_alpha / sqrt(r)` instead."""
    use_dora: bool = False
    """Also train the norm of each row of a weight, separately from its direction (DoRA)."""
    load_in_4bit: bool = False
    """Store the frozen linear layers in the blocks of `units` in four bits (NF4, QLoRA). Needs the extra `bnb`. Exports
    contain adapters and the source's unquantized weights."""
    target_modules: Literal["all-linear"] | str | tuple[str, ...] = "all-linear"
    """The linear layers to adapt: `all-linear`, a list of last names (`[q_proj, v_proj]`), or a regular expression for
    full names."""
    target_parameters: tuple[str, ...] = ()
    """Weights of experts to adapt, one adapter for each expert: `[experts.gate_up_proj, experts.down_proj]`."""
    units: tuple[str, ...] = Field((LANGUAGE,), min_length=1)
    """Units to adapt (`language`, `vision`), or parts (`vision.encoder`; of a whole model `vision.projector`)."""
    train: tuple[str, ...] = ()
    """Parts to train fully in addition, named as in `freeze`: `[vision.projector]`. Everything else is frozen."""
    adapter: IdOrPath | None = None
    """Start from an adapter that peft or a run has saved."""
    merge: bool = True
    """Export the merged model, with the adapter in its folder `adapter` (for parts: one per unit). `false`, only for a
    whole model: export the adapter alone."""


class ModelConfig(Section):
    """A whole vision-language model (`id` or `config`), or its parts (`language_model` and `encoders`)."""

    id: IdOrPath | None = None
    """A whole vision-language model: an id on the hub or a folder, such as Qwen2.5-VL, InternVL3 or LLaVA. Its encoders
    become units (`vision`), its text model the unit `language`. The weights may be a checkpoint of torch (DCP) beside
    `config.json`. The export of a model of parts is also accepted; its encoders, projectors and language model are
    loaded."""
    config: dict[str, Any] | None = None
    """A transformers config of a whole model with its `model_type`; the model starts from random weights."""
    tokenizer: IdOrPath | None = None
    """Tokenizer of a whole model: an id or folder, or `bytes`. Default: that of `id`."""
    processor: IdOrPath | dict[str, Any] | None = None
    """Image processor of a whole model: id, folder or settings. With `id`, also just the settings to change, such as
    `{min_pixels: 3136, max_pixels: 602112}`; for clips `fps`, `min_frames`, `max_frames`, `video_min_pixels`,
    `video_max_pixels`, `video_total_pixels`, or `num_frames` and `video_max_soft_tokens` for models that treat frames
    as images. Default: that of `id`, or one derived from `config`."""
    attn_implementation: str | None = None
    """Attention implementation of a whole model's text model; see `language_model.attn_implementation`."""
    language_model: LanguageModelConfig | None = None
    encoders: dict[str, EncoderConfig] = Field(default_factory=dict)
    generators: dict[str, GeneratorConfig] = Field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    """Parts that do not train: a unit (`vision`), its encoder or projector (`vision.encoder`, `vision.projector`), a
    generator's connector or net (`image.connector`, `image.generator`), the language model without its learned queries
    (`language.model`), or a pattern for parameter names (`language.layers.0.*`)."""

    lora: LoraConfig | None = None
    """Settings of LoRA. In a model of parts, projectors are also trained."""

    @property
    def is_whole(self) -> bool:
        """Return True for a whole model, given by one id or config."""
        return self.language_model is None

    @property
    def text(self) -> LanguageModelConfig:
        """Return the language model's section; for a whole model, a section made from its keys."""
        return self.language_model or LanguageModelConfig(
            id=self.id, config=self.config, tokenizer=self.tokenizer, attn_implementation=self.attn_implementation
        )

    @property
    def units(self) -> tuple[str, ...]:
        """Return the names of the units in order of computation; empty for a whole model, whose own config has them."""
        return () if self.is_whole else (*self.encoders, LANGUAGE, *self.generators)

    @model_validator(mode="after")
    def _whole_or_parts(self) -> Self:
        sources = [key for key in ("id", "config", "language_model") if getattr(self, key) is not None]
        if len(sources) != 1:
            raise ValueError(
                "give one of 'id' (a whole vision-language model), 'config' (one from scratch), or 'language_model' "
                f"with 'encoders' (its parts); given: {', '.join(sources) or 'none'}"
            )
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("'config' needs 'model_type', for example model_type: llava")
        if self.is_whole and self.encoders:
            raise ValueError("'encoders' belong to 'language_model'; a whole model brings its own")
        alone = [k for k in ("tokenizer", "processor", "attn_implementation") if getattr(self, k) is not None]
        if not self.is_whole and alone:
            raise ValueError(
                f"{alone[0]!r} here is for a whole model; write it under 'language_model'"
                + (" or an encoder" if alone[0] == "processor" else "")
            )
        return self

    @model_validator(mode="after")
    def _adapters_of_parts(self) -> Self:
        if self.lora is not None and self.generators:
            raise ValueError("'lora' beside 'generators' is not there yet; leave one of them out")
        if self.lora is None or self.is_whole:
            return self
        if not self.lora.merge:
            raise ValueError("'lora.merge: false' is for whole models; parts are exported merged, adapters beside them")
        places = [LANGUAGE, *self.encoders, *(f"{name}.encoder" for name in self.encoders)]
        for place in self.lora.units:
            if place not in places:
                raise ValueError(f"'lora.units' has {place!r}; there are {', '.join(places)}")
        return self

    @model_validator(mode="after")
    def _masks_of_encoders(self) -> Self:
        masks = self.language_model.media_attention if self.language_model is not None else "causal"
        if isinstance(masks, dict) and (strange := [name for name in masks if name not in self.encoders]):
            raise ValueError(
                f"'language_model.media_attention' names {strange[0]!r}; the encoders are "
                f"{', '.join(self.encoders) or 'none'}"
            )
        return self

    @model_validator(mode="after")
    def _names(self) -> Self:
        for what, names in (("an encoder", self.encoders), ("a generator", self.generators)):
            if LANGUAGE in names:
                raise ValueError(f"{what} cannot be called {LANGUAGE!r}; that is the language model's unit")
            if "tokens" in names:
                raise ValueError(f"{what} cannot be called 'tokens'; that is what texts become")
            for name in names:
                if not name.isidentifier():
                    raise ValueError(
                        f"{what.partition(' ')[2]} name {name!r} must be a plain word, as in 'vision' or 'audio_2'"
                    )
        for name in self.generators:
            if name in self.encoders:
                raise ValueError(f"{name!r} is an encoder and a generator; give one of them another name")
        if len(self.generators) > 1:
            markers = [entry.marker for entry in self.generators.values()]
            if len(set(markers)) < len(markers):
                raise ValueError("generators share a marker; give each a 'placeholder' of its own")
        owners: dict[str, str] = {}
        for name, encoder in self.encoders.items():
            if owners.setdefault(encoder.marker, name) != name:
                raise ValueError(
                    f"encoders {owners[encoder.marker]!r} and {name!r} share the marker {encoder.marker!r}, so nothing "
                    f"would ever come to {name!r}; give one of them a 'placeholder' of its own"
                )
        return self
