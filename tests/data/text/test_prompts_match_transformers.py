"""What stands around an image in the text is what the family's own processor writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import AutoProcessor, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor

from cases.tiny_wholes import WHOLES
from dilatant.config import UserError
from dilatant.data.sample import Media, Sample, Turn
from dilatant.data.text.chat import chat_tokenizer
from dilatant.data.text.chat_template import TemplateMessage
from dilatant.data.text.encode import encode_prompt
from dilatant.data.text.encoding import Encoding
from dilatant.data.text.tokenizer import generation_ends, load_tokenizer
from dilatant.models.families.media_units import units_of_pretrained
from dilatant.models.families.pretrained import PretrainedModel

TEMPLATE = (
    "{%% for message in messages %%}<{{ message['role'] }}>{%% if message['content'] is string %%}"
    "{{ message['content'] }}{%% else %%}{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}"
    "{%% endif %%}</s>{%% endfor %%}{%% if add_generation_prompt %%}<assistant>{%% endif %%}"
)
SIZE = {"height": 8, "width": 8}


def llava(tokenizer: Any) -> Any:
    images = LlavaImageProcessorPil(size={"shortest_edge": 8}, crop_size=SIZE)
    return LlavaProcessor(
        images, tokenizer, patch_size=2, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def gemma3(tokenizer: Any) -> Any:
    return Gemma3Processor(Gemma3ImageProcessorPil(size=SIZE), tokenizer, image_seq_length=16)


def idefics3(tokenizer: Any) -> Any:
    edges = {"size": {"longest_edge": 8}, "max_image_size": {"longest_edge": 8}}
    images = Idefics3ImageProcessorPil(do_image_splitting=False, **edges)
    return Idefics3Processor(images, tokenizer, image_seq_len=4)


CASES = {
    "llava": (llava, "<image>", {"image_token": "<image>"}),
    "gemma3": (
        gemma3,
        "<start_of_image>",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "idefics3": (
        idefics3,
        "<image>",
        {
            "image_token": "<image>",
            "fake": "<fake_token_around_image>",
            "global": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    ),
}


@pytest.mark.parametrize("family", CASES)
def test_prompts_are_those_of_the_familys_processor(family: str) -> None:
    make, written, tokens = CASES[family]
    tokenizer = load_tokenizer("bytes")
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens.values(), "<user>", "<assistant>"]})
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    tokenizer.chat_template = TEMPLATE % written
    processor = make(tokenizer)
    processor.chat_template = tokenizer.chat_template
    settings = {key: value for key, value in WHOLES[family].items() if key != "model_type"}
    settings["text_config"] = {**settings["text_config"], "vocab_size": 300}
    settings["image_token_id"] = tokenizer.convert_tokens_to_ids(tokens["image_token"])
    for key, name in (("boi_token_id", "boi_token"), ("eoi_token_id", "eoi_token")):
        if name in tokens:
            settings[key] = tokenizer.convert_tokens_to_ids(tokens[name])
    whole = PretrainedModel.of(CONFIG_MAPPING[family](**settings), "model")

    image = Image.fromarray(np.full((8, 8, 3), 7, np.uint8))
    content = [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "text", "text": " here?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    theirs = processor(text=[text], images=[[image]], add_special_tokens=False, return_tensors="np")

    units = units_of_pretrained(whole, None, tokenizer)
    media = Media("image", _png(image), "image")
    sample = Sample("one", (Turn("user", ("See ", media, " here?")),))
    ours = encode_prompt(sample, Encoding(chat_tokenizer(tokenizer), units))
    assert ours.sample.input_ids.tolist() == theirs["input_ids"][0].tolist()


def _png(image: Image.Image) -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


def test_a_text_begins_as_the_processor_lets_it_begin() -> None:
    """LLaVA-1.5's template writes no opening token, and its tokenizer puts one before texts."""
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    tokenizer = load_tokenizer("bytes")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
    opening = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = opening
    for own in (template, "{{ bos_token }}" + template):
        tokenizer.chat_template = own
        processor = llava(tokenizer)
        processor.chat_template = own
        talk = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        theirs = processor.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"][0]
        chat = chat_tokenizer(tokenizer, processed=True)
        ours = chat.tokens([TemplateMessage("user", "hi")])
        assert ours.ids.tolist() == list(theirs)
        assert ours.ids.tolist().count(tokenizer.bos_token_id) == 1
        assert not ours.answered.any()


@pytest.mark.parametrize("own", [None, "tokenizer's {{ messages }}"])
def test_the_template_is_the_processors(tmp_path: Path, own: str | None) -> None:
    tokenizer = load_tokenizer("bytes")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
    llava(tokenizer).save_pretrained(tmp_path)
    tokenizer.chat_template = own
    tokenizer.save_pretrained(str(tmp_path))
    for file, template in (
        ("chat_template.json", "older {{ messages }}"),
        ("processor_config.json", "p {{ messages }}"),
    ):
        path = tmp_path / file
        settings = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**settings, "chat_template": template}))
        theirs = AutoProcessor.from_pretrained(tmp_path).chat_template
        assert load_tokenizer(str(tmp_path)).chat_template == theirs == template


def test_the_ends_of_a_generation_config_are_read(tmp_path: Path) -> None:
    assert generation_ends(str(tmp_path)) == ()
    GenerationConfig(eos_token_id=[260, 258]).save_pretrained(tmp_path)
    assert generation_ends(str(tmp_path)) == (260, 258)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read"):
        generation_ends(str(tmp_path))
