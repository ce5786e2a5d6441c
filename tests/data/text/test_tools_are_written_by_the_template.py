"""Tools, calls and what they gave reach the model as transformers' own templates write them; calls carry loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dilatant.data.errors import SampleError
from dilatant.data.readers.records import FileRecord, parse_record
from dilatant.data.text.chat import chat_tokenizer
from dilatant.data.text.encode import encode_prompt, encode_sample, find_problems
from dilatant.data.text.encoding import Encoding
from dilatant.data.text.tokenizer import byte_tokenizer

# The habits of Qwen's and Llama's templates, in their shortest form.
QWEN = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% elif m.tool_calls %}{{ '<|im_start|>' + m.role }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls %}{% if call.function %}{% set call = call.function %}{% endif %}"
    "{{ '\n<tool_call>\n{\"name\": \"' + call.name + '\", \"arguments\": ' + call.arguments | tojson + '}' }}"
    "{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{% if tools %}{{ 'Tools: ' + tools | tojson + '<|im_end|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + ('ipython' if m.role == 'tool' else m.role) + '\n\n' }}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}' }}"
    "{% else %}{{ m.content | trim }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
CALLS = {
    "qwen": '<tool_call>\n{"name": "weather", "arguments": {"place": "Paris", "days": 2}}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": {"place": "Paris", "days": 2}}',
}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}
ARGUMENTS = {"place": "Paris", "days": 2}


def messages(arguments: Any = ARGUMENTS) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]


OPENAI = {"tools": [{"type": "function", "function": WEATHER}], "messages": messages(json.dumps(ARGUMENTS))}
COLUMNS = {  # as a columnar file gives it: every key for every message, and tools as text
    "tools": json.dumps([WEATHER]),
    "messages": [{"tool_calls": None, "tool_call_id": None, "name": None, **one} for one in messages()],
}
SHAREGPT = {
    "tools": json.dumps([WEATHER]),
    "conversations": [
        {"from": "human", "value": "Paris?"},
        {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": ARGUMENTS})},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "It rains."},
    ],
}


def tokenizer_with(template: str | None) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def sample_of(fields: dict[str, Any]) -> Any:
    return parse_record(FileRecord("here:1", Path(), fields))


@pytest.mark.parametrize("fields", [OPENAI, COLUMNS, SHAREGPT], ids=["openai", "columns", "sharegpt"])
@pytest.mark.parametrize(("family", "template"), [("qwen", QWEN), ("llama", LLAMA)])
def test_tool_calls_match_template_text_and_carry_loss(family: str, template: str, fields: dict[str, Any]) -> None:
    tokenizer = tokenizer_with(template)
    encoded = encode_sample(sample_of(fields), Encoding(chat_tokenizer(tokenizer), ()))
    wanted = tokenizer.apply_chat_template(
        [{key: value or "" for key, value in one.items()} for one in messages()],
        tools=[{"type": "function", "function": WEATHER}],
        tokenize=False,
    )
    assert tokenizer.decode(encoded.input_ids) == wanted
    learned = np.split(encoded.input_ids, np.flatnonzero(np.diff(encoded.labels != -100)) + 1)[1::2]
    assert [tokenizer.decode(ids) for ids in learned] == [CALLS[family] + "<|im_end|>", "It rains.<|im_end|>"]


@pytest.mark.parametrize(("family", "template"), [("qwen", QWEN), ("llama", LLAMA)])
def test_a_prompt_ends_before_the_reference_tool_call(family: str, template: str) -> None:
    encoding = Encoding(chat_tokenizer(tokenizer_with(template)), ())
    asked = sample_of({**OPENAI, "messages": messages()[:2]})
    prompt, whole = encode_prompt(asked, encoding), encode_sample(asked, encoding)
    ids = prompt.sample.input_ids
    assert ids.tolist() == whole.input_ids[: len(ids)].tolist()
    assert prompt.answer == CALLS[family]


def test_plain_text_has_tools_and_calls_as_json() -> None:
    tokenizer = tokenizer_with(None)
    sample = sample_of(OPENAI)
    encoding = Encoding(chat_tokenizer(tokenizer), ())
    assert not find_problems(sample, encoding, deep=True)
    text = tokenizer.decode(encode_sample(sample, encoding).input_ids)
    assert '"name": "weather", "parameters"' in text
    assert '[{"name": "weather", "arguments": {"place": "Paris", "days": 2}}]' in text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({**OPENAI, "tools": "hammer"}, "'tools' is text, which is not valid JSON"),
        ({**OPENAI, "tools": [3]}, "'tools' is no list of functions"),
        ({**OPENAI, "tools": [{"type": "function", "function": {}}]}, "tool 1 of 'tools' has no 'name'"),
        ({"messages": messages("{")}, "'arguments' of a call of message 2 is not valid JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "the call of message 1 is text, which is not"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "a call of message 1 has no 'name'"),
        ({"conversations": [{"from": "function_call", "value": "3"}]}, "message 1 calls no function"),
    ],
)  # fmt: skip
def test_what_is_no_tool_or_call_is_one_message(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SampleError) as raised:
        sample_of(fields)
    assert said in str(raised.value)


def test_a_template_without_tool_support_is_refused() -> None:
    deaf = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    encoding = Encoding(chat_tokenizer(tokenizer_with(deaf)), ())
    for fields, key in ((OPENAI, "tools"), ({"messages": messages()}, "tool_calls")):
        with pytest.raises(SampleError, match=f"the chat template does not write '{key}'"):
            encode_sample(sample_of(fields), encoding)
