"""Thoughts, calls and ends of turns carry loss as the template writes them; texts are those of transformers."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from dilatant.config import UserError
from dilatant.data.text import template_engine
from dilatant.data.text.chat import chat_tokenizer
from dilatant.data.text.chat_template import TemplateMessage
from dilatant.data.text.tokenizer import byte_tokenizer

TURN = "{{ '<|im_start|>' + m.role + '\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
APART = (
    "{% set thought = m.reasoning_content if m.reasoning_content is string else "
    "(m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '') %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
)
# Thoughts of the last turn alone, and an empty one where there is none.
LAST = (
    "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' %}" + APART + "{% if loop.last %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ said }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + ASKS
)
# The same, and the generation prompt opens the thought.
OPENED = LAST.replace(ASKS, ASKS.replace("assistant\n", "assistant\n<think>\n"))
# Thoughts since the last question, such as those between calls; calls behind the text.
SINCE = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index %}"
    "{% endif %}{% endfor %}{% for m in messages %}" + TURN + "{% if m.role == 'assistant' %}" + APART + ""
    "{% if loop.index > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ said }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    + ASKS
    + "{# tools #}{% if tools %}{% endif %}"
)
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = {"type": "function", "function": {"name": "w", "arguments": {"p": "Rome"}}}


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


TALK = [user("q"), said(THOUGHT + "one"), user("r"), said(THOUGHT + "two")]
CALLING = [
    *(user("q"), said("", tool_calls=[CALL], reasoning_content="ha"), {"role": "tool", "content": "sun"}),
    *(said("one", reasoning_content="ho"), user("r"), said("two", thinking="hu")),
]


def tokenizer_with(template, special=("<|im_start|>", "<|im_end|>"), plain=()):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.add_tokens(list(plain))
    tokenizer.chat_template = template
    return tokenizer


def as_messages(talk):
    extras = [{key: value for key, value in turn.items() if key not in ("role", "content")} for turn in talk]
    return [
        TemplateMessage(turn["role"], turn["content"], tuple((key, json.dumps(value)) for key, value in more.items()))
        for turn, more in zip(talk, extras)
    ]


def learned(tokenizer, talk, tools=""):
    """What carries loss, span by span; the ids are compared with transformers'."""
    tokens = chat_tokenizer(tokenizer).tokens(as_messages(talk), tools=tools)
    theirs = tokenizer.apply_chat_template(
        talk, tools=json.loads(tools) if tools else None, tokenize=True, return_dict=True
    )["input_ids"]
    assert tokens.ids.tolist() == theirs
    edges = np.flatnonzero(np.diff(np.concatenate([[0], tokens.answered.astype(int), [0]])))
    return [tokenizer.decode(tokens.ids[start:end]) for start, end in edges.reshape(-1, 2)]


@pytest.mark.parametrize(
    ("template", "talk", "expected"),
    [
        (LAST, TALK[:2], [THOUGHT + "one<|im_end|>"]),
        (LAST, TALK, ["one<|im_end|>", THOUGHT + "two<|im_end|>"]),
        (LAST, [user("q"), said("one", reasoning_content="hm")], [THOUGHT + "one<|im_end|>"]),
        (LAST, [user("q"), said("one", reasoning="hm")], [THOUGHT + "one<|im_end|>"]),
        (OPENED, TALK, ["one<|im_end|>", "hm\n</think>\n\ntwo<|im_end|>"]),
        (OPENED, [user("q"), said("one ")], ["\n</think>\n\none <|im_end|>"]),
    ],
)
def test_thoughts_carry_loss_as_the_template_writes_them(template, talk, expected):
    assert learned(tokenizer_with(template), talk) == expected


def test_thoughts_between_calls_stay_if_the_template_keeps_them():
    tools = json.dumps([{"type": "function", "function": {"name": "w"}}])
    call = '<call>{"name": "w", "arguments": {"p": "Rome"}}</call><|im_end|>'
    assert learned(tokenizer_with(SINCE), CALLING, tools) == [
        call,
        "one<|im_end|>",
        "<think>\nhu\n</think>\n\ntwo<|im_end|>",
    ]
    assert learned(tokenizer_with(SINCE), CALLING[:4], tools) == [
        "<think>\nha\n</think>\n\n" + call,
        "<think>\nho\n</think>\n\none<|im_end|>",
    ]


def test_tool_results_in_an_assistant_turn_carry_no_loss():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}"
        "{% elif m.role == 'assistant' %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ '<call>' + call.function.name + '</call>' }}{% endfor %}"
        "{% if not loop.last and loop.nextitem.role == 'tool' %}"
        "{% if m.tool_calls %}{{ '<heard>' + loop.nextitem.content + '</heard>' }}{% endif %}"
        "{% else %}{{ '<|im_end|>' }}{% endif %}{% endif %}{% endfor %}"
    )
    talk = [user("q"), said("", tool_calls=[CALL]), {"role": "tool", "content": "sun"}, said("one")]
    assert learned(tokenizer_with(template), talk) == ["<call>w</call>", "one<|im_end|>"]


CHATML = "{% for m in messages %}" + TURN + "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + ASKS


@pytest.mark.parametrize(
    ("template", "plain", "end"),
    [
        (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        (CHATML.replace("<|im_end|>", "</answer><|im_end|>"), ("<|im_end|>",), "</answer><|im_end|>"),
        (CHATML.replace("<|im_end|>", "<|end|><|im_end|>"), ("<|end|>", "<|im_end|>"), "<|end|><|im_end|>"),
    ],
)
def test_ends_of_turns_need_no_flag(template, plain, end):
    tokenizer = tokenizer_with(template, special=(), plain=plain)
    talk = [user("q"), said("one"), user("r"), said("two")]
    assert learned(tokenizer, talk) == [f"one{end}", f"two{end}"]
    chat = chat_tokenizer(tokenizer, ends=(7,))
    assert set(chat.stop_ids) == {7, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_a_token_that_starts_and_ends_texts_ends_turns():
    tokenizer = tokenizer_with("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    tokenizer.bos_token = tokenizer.eos_token
    assert learned(tokenizer, [user("q"), said("one")]) == ["one</s>"]


def test_names_of_messages_reach_the_template():
    tokenizer = tokenizer_with(CHATML.replace("m.role", "(m.name or m.role)"))
    assert learned(tokenizer, [{**user("q"), "name": "Ada"}, said("one")]) == ["one<|im_end|>"]
    chat = chat_tokenizer(tokenizer)
    assert chat.template.reads("name")
    assert not chat.template.reads("im")
    assert not chat.template.reads("reasoning_content")
    assert chat_tokenizer(tokenizer_with(LAST)).template.reads("thinking")


def test_the_day_that_a_template_writes_is_fixed():
    tokenizer = tokenizer_with("{{ strftime_now('%d %b %Y %H:%M') }}" + CHATML)
    chats = [chat_tokenizer(tokenizer, day=day) for day in ("2020-02-29", "2020-03-01")]
    texts = [tokenizer.decode(chat.tokens([TemplateMessage("user", "q")]).ids) for chat in chats]
    assert texts[0].startswith("29 Feb 2020 00:00<|im_start|>")
    assert texts[1].startswith("01 Mar 2020 00:00<|im_start|>")
    assert chats[0].fingerprint != chats[1].fingerprint
    plain = [chat_tokenizer(tokenizer_with(CHATML), day=day) for day in ("2020-02-29", "2020-03-01")]
    assert plain[0].fingerprint == plain[1].fingerprint


LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("more", "limit"),
    [
        (LOOPS, "takes more than"),
        ("{% for a in range(90) %}{{ 'a' * 900000 }}{% endfor %}", "makes more than"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "takes more"),
        ("{{ 'a' * (messages | length) ** 30 }}", "computes a value of more than"),
        ("{% for a in range(90000) %}{% set x = range(99999) | list | length %}{% endfor %}", "computes for more"),
    ],
)
def test_an_endless_template_is_refused_at_its_conversation(monkeypatch, more, limit):
    if limit == "computes for more":
        monkeypatch.setattr(template_engine, "SECONDS", 0.2)
    chat = chat_tokenizer(tokenizer_with(CHATML + "{% if messages | length > 2 %}" + more + "{% endif %}"))
    talk = [TemplateMessage("user", "q"), TemplateMessage("assistant", "a")]
    chat.tokens(talk)
    caught = []

    def render():
        with pytest.raises(UserError, match=limit) as error:
            chat.tokens([*talk, *talk])
        caught.append(str(error.value))

    thread = threading.Thread(target=render)  # signals reach the main thread alone
    thread.start()
    thread.join()
    assert "4 messages" in caught[0]


def test_a_long_conversation_is_within_the_limits():
    talk = [TemplateMessage("user", "q"), TemplateMessage("assistant", "a")] * 100
    nested = "{% for m in messages %}{% for n in messages %}{% endfor %}{% endfor %}"
    text, _ = chat_tokenizer(tokenizer_with(nested + CHATML)).template.render(talk, False)
    assert text.count("<|im_end|>") == 200
