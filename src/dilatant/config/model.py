"""`model:` in the YAML file: encoders, projectors, one language model, and what is frozen."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dilatant.config.base import Section

LANGUAGE = "language"
"""What the language model's unit is called."""
MediaMask = Literal["causal", "bidirectional", "embedded", "modality"]
PROJECTORS = ("linear", "mlp", "identity")
"""The kinds of projectors that can begin anew."""


class Source(Section):
    """Where a Hugging Face model comes from: `id` (pretrained) or `config` (from scratch)."""

    id: str | None = None
    """A model id on the hub or a local folder in the Hugging Face layout."""
    config: dict[str, Any] | None = None
    """A transformers config with its `model_type`; the model starts from random weights."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Off unless you write it."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.id is None) == (self.config is None):
            raise ValueError("give either 'id' (a hub id or a local folder) or 'config' (from scratch)")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("'config' needs 'model_type', for example model_type: llama")
        return self


class LanguageModelConfig(Source):
    tokenizer: str | None = None
    """A tokenizer id or folder; `bytes` for the built-in byte tokenizer. Default: the model's own `id`."""
    attn_implementation: str | None = None
    """What computes attention: `dilatant`, where a packed row costs the sum of its samples' squares, or a name that
    transformers knows, such as `sdpa` or `eager`, under a mask of tokens by tokens. Default: `dilatant` where the
    family allows it, else transformers' choice."""
    media_attention: MediaMask | dict[str, MediaMask] = "causal"
    """Whom the tokens of an image or clip see inside the text: what is before them; also the whole of their own item
    (`bidirectional`, as in Gemma 3); their own item alone (`embedded`); or all items of their encoder in the sample
    and nothing else (`modality`). One word for all encoders or a word for each, as in `{vision: bidirectional}`; those
    without one are `causal`. Text sees everything before it. Other masks than `causal` need `dilatant`."""

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
        """Whether packed rows must attend over plans; unless a name is set, they do so where the family allows it."""
        return self.attn_implementation == "dilatant" or not self.media_see_as_text

    @property
    def media_see_as_text(self) -> bool:
        """Return True where the tokens of all media see what text in their place would."""
        said = self.media_attention
        return said == "causal" or (isinstance(said, dict) and {*said.values()} <= {"causal"})


class EncoderConfig(Source):
    kind: Literal["image", "audio"]
    """What the encoder reads."""
    projector: str | None = None
    """What maps the encoder's width to the language model's: `linear`, `mlp`, `identity`, or the path of an export or a
    safetensors file whose projector goes on. Default: `mlp`. Where `id` is an encoder in an export, the projector
    beside it goes on, unless another kind is named; for a new one of its kind, copy the encoder's folder elsewhere."""
    placeholder: str = ""
    """The marker in the text that stands for one item. Default: `<image>` or `<audio>` by kind."""
    features: Literal["all", "patch"] = "all"
    """Which encoder tokens go on: all, or without class and register tokens."""
    merge: Literal["placeholder", "prepend"] = "placeholder"
    """Merge at the placeholders, or put all items before the text."""
    processor: str | dict[str, Any] | None = None
    """An image processor or feature extractor: id, folder, or its settings. Default: that of `id`, or one
    fitted to `config`."""

    @field_validator("projector")
    @classmethod
    def _kind_or_path(cls, value: str | None) -> str | None:
        if value is None or value in PROJECTORS or "/" in value or value.endswith(".safetensors"):
            return value
        raise ValueError(
            "must be 'linear', 'mlp' or 'identity', or a path such as ./NAME or NAME.safetensors"
        )

    @property
    def goes_on(self) -> bool:
        """True where `projector` is a path, whose weights are to be taken."""
        return self.projector is not None and self.projector not in PROJECTORS

    @property
    def marker(self) -> str:
        return self.placeholder or f"<{self.kind}>"


class TargetConfig(Section):
    """What a generator learns to draw, if not pictures."""

    encoder: str | dict[str, Any]
    """A vision model of transformers, as id, folder or config: the net draws its features, patch by patch. Its channels
    are their width, its `sample_size` the patches of a side."""


class GeneratorConfig(Section):
    """A net of diffusers that draws what the language model asks for. Needs the extra `generators`."""

    id: str | None = None
    """A net or a whole pipeline in diffusers' layout: a local folder or an id on the hub."""
    config: dict[str, Any] | None = None
    """A diffusers config with its `_class_name` (SD3Transformer2DModel, PixArtTransformer2DModel,
    SanaTransformer2DModel, FluxTransformer2DModel, UNet2DConditionModel); the net starts from random weights."""
    sample_size: int | None = Field(None, ge=1)
    """Height and width of the latents that a Flux draws (or of pixels, without an autoencoder), by default 128. Other
    nets have it in their own config."""
    kind: Literal["image"] = "image"
    """What it draws: images in an assistant's turns are its targets."""
    connector: Literal["linear", "mlp", "identity", "transformer"] = "mlp"
    """What maps the language model's hidden states to the net's condition. In a transformer, the rows of a picture see
    each other."""
    connector_layers: int = Field(2, ge=1)
    """Blocks of a transformer as connector."""
    tokens_per_item: int = Field(4, ge=1)
    """Tokens in the text by which the language model says what a picture is to show."""
    token: str | None = None
    """The token of the vocabulary that these are. Default: learned queries (`language.queries`)."""
    start: str = Field("<draw>", min_length=1)
    """What the assistant writes before a picture; a token of yours where the tokenizer has one."""
    placeholder: str = ""
    """The marker in an assistant's text that stands for a picture beside it. Default: `<image>`."""
    vae: str | dict[str, Any] | None = None
    """The frozen autoencoder whose latents the net draws: an id or folder, or a diffusers config. Default: that of the
    pipeline; without any the net draws pixels."""
    target: TargetConfig | None = None
    """What the net draws instead of pictures: features of a frozen vision model. Making pictures of them takes a
    decoder, which is not part of the model."""
    cache_latents: bool = False
    """Keep what the autoencoder says of each picture (mean and log-variance) beside the index of the data, and decode
    no picture again, in this run or another. It needs an autoencoder with weights of its own."""
    objective: Literal["flow", "epsilon", "velocity"] | None = None
    """What the net learns to say: the direction from picture to noise (rectified flow), the noise, or the velocity.
    Default: what the pipeline's scheduler says, else flow."""
    drop: float = Field(0.1, ge=0, le=1)
    """How often a picture is learned without its condition, which is what guidance needs."""
    loss_weight: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Of its loss, the mean over all pictures of a step, beside the language model's."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.id is None) == (self.config is None):
            raise ValueError("give either 'id' (a hub id or a local folder) or 'config' (from scratch)")
        for key, settings in (("config", self.config), ("vae", self.vae)):
            if isinstance(settings, dict) and "_class_name" not in settings:
                example = "AutoencoderKL" if key == "vae" else "SD3Transformer2DModel"
                raise ValueError(f"{key!r} needs '_class_name', for example _class_name: {example}")
        # The config that a run saves has the default written out.
        default = type(self).model_fields["connector_layers"].default
        if self.connector_layers != default and self.connector != "transformer":
            raise ValueError(
                "'connector_layers' are those of `connector: transformer`; leave them out or set it"
            )
        if self.target is not None and (self.vae is not None or self.cache_latents):
            raise ValueError(
                "'vae' and 'cache_latents' are for pictures; with 'target' the net draws features"
            )
        if self.cache_latents and (isinstance(self.vae, dict) or (self.vae is None and self.id is None)):
            raise ValueError(
                "'cache_latents' needs an autoencoder with weights of its own; name one as 'vae'"
            )
        return self

    @property
    def marker(self) -> str:
        return self.placeholder or f"<{self.kind}>"


class LoraConfig(Section):
    """Small matrices beside linear layers, which alone train (LoRA); names as in peft."""

    r: int = Field(16, gt=0, le=1 << 16)
    """Rank of the matrices."""
    lora_alpha: float = Field(32, gt=0, allow_inf_nan=False)
    """What they add is multiplied with `lora_alpha / r`."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Of what goes into them."""
    use_rslora: bool = False
    """Multiply with `lora_alpha / sqrt(r)` instead."""
    use_dora: bool = False
    """Let the length of each row of a weight train beside its direction (DoRA)."""
    load_in_4bit: bool = False
    """Hold the frozen linear layers in the blocks of `units` in four bits (NF4, QLoRA). Needs the extra
    `bnb`. What is exported are adapters and plain weights of the source."""
    target_modules: Literal["all-linear"] | str | tuple[str, ...] = "all-linear"
    """The linear layers: `all-linear`, a list of last names (`[q_proj, v_proj]`), or a pattern of whole names (a
    regular expression)."""
    units: tuple[str, ...] = Field((LANGUAGE,), min_length=1)
    """Where: units (`language`, `vision`) or parts of them (`vision.encoder`; of a whole model `vision.projector`)."""
    train: tuple[str, ...] = ()
    """What trains whole besides, as named in `freeze`: `[vision.projector]`. All else is frozen."""
    adapter: str | None = None
    """Begin with an adapter that peft or a run has saved."""
    merge: bool = True
    """Whether the export is the merged model, with the adapter in its folder `adapter` (of parts: one for each unit);
    else the adapter alone, of a whole model."""


class ModelConfig(Section):
    """A whole vision-language model (`id` or `config`), or its parts (`language_model` and `encoders`)."""

    id: str | None = None
    """A whole vision-language model: an id on the hub or a folder, as of Qwen2.5-VL, InternVL3 or LLaVA. Its encoders
    become units of their own (`vision`), its text model is `language`. An export of a model of parts stands for these:
    its encoders, projectors and language model go on."""
    config: dict[str, Any] | None = None
    """A transformers config of a whole model with its `model_type`, which starts from random weights."""
    tokenizer: str | None = None
    """Of a whole model: a tokenizer id or folder, or `bytes`. Default: that of `id`."""
    processor: str | dict[str, Any] | None = None
    """Of a whole model: its image processor, as id, folder or settings; with `id` also just what differs, such as
    `{min_pixels: 3136, max_pixels: 602112}`, and of clips `fps`, `min_frames`, `max_frames`, `video_min_pixels`,
    `video_max_pixels`, `video_total_pixels`, or `num_frames` and `video_max_soft_tokens` where frames are images
    each. Default: that of `id`, or one fitted to `config`."""
    attn_implementation: str | None = None
    """Of a whole model: what computes attention in its text model, as `language_model.attn_implementation`."""
    language_model: LanguageModelConfig | None = None
    encoders: dict[str, EncoderConfig] = Field(default_factory=dict)
    generators: dict[str, GeneratorConfig] = Field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    """What does not train: a unit (`vision`), its encoder or projector (`vision.encoder`, `vision.projector`), a
    generator's connector or net (`image.connector`, `image.generator`), beside learned queries the language model alone
    (`language.model`), or a pattern over parameter names (`language.layers.0.*`)."""

    lora: LoraConfig | None = None
    """LoRA. Of a model of parts, projectors train besides."""

    @property
    def is_whole(self) -> bool:
        """Whether one id or config says all."""
        return self.language_model is None

    @property
    def text(self) -> LanguageModelConfig:
        """The language model, or all of a whole one, which has it."""
        return self.language_model or LanguageModelConfig(
            id=self.id,
            config=self.config,
            tokenizer=self.tokenizer,
            attn_implementation=self.attn_implementation,
        )

    @property
    def units(self) -> tuple[str, ...]:
        """What the units are called, in the order of computation; of a whole model its config must be read first."""
        return () if self.is_whole else (*self.encoders, LANGUAGE, *self.generators)

    @model_validator(mode="after")
    def _whole_or_parts(self) -> Self:
        given = [key for key in ("id", "config", "language_model") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                "give one of 'id' (a whole vision-language model), 'config' (one from scratch), or 'language_model' "
                f"with 'encoders' (its parts); given: {', '.join(given) or 'none'}"
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
            raise ValueError(
                "'lora.merge: false' is for whole models; parts are exported merged, adapters beside them"
            )
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
