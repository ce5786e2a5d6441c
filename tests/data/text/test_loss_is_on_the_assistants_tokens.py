"""For any chat template, labels are exactly the tokens that the assistant writes, and a prompt is a prefix."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cases.data_builders import shared
from dilatant.config import UserError
from dilatant.data.text.chat import MEDIA, chat_tokenizer
from dilatant.data.text.chat_template import PLAIN_TEMPLATE, TemplateMessage
from dilatant.data.text.tokenizer import byte_tokenizer, load_tokenizer

# The habits of real templates, each written down in its shortest form.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{% if role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
NO_END = "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content + '\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ '### assistant: ' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TYPED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Earlier thoughts are hidden, the last answer gets an empty one that the generation prompt does not hold.
THINKING = (
    "{% for m in messages %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ENDS = {
    "chatml": (CHATML, "<|im_end|>"),
    "inst": (INST, " </s>"),
    "turns": (TURNS, "<end_of_turn>"),
    "no_end": (NO_END, "</s>"),
    "tagged": (TAGGED, "<|im_end|>"),
    "typed": (TYPED, "<|im_end|>"),
    "plain": (PLAIN_TEMPLATE, "</s>"),
}
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
]


def tokenizer_with(template):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer


WORDS = st.text(st.characters(exclude_categories=["Cs", "Co", "Cn", "Cc"]), min_size=1, max_size=12)
TEXTS = WORDS.map(str.strip).filter(bool)


def conversation(questions, answers):
    return [
        message
        for question, answer in zip(questions, answers)
        for message in (TemplateMessage("user", question), TemplateMessage("assistant", answer))
    ]


@settings(max_examples=25, deadline=None, print_blob=True)
@given(turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), kind=st.sampled_from(sorted(ENDS)))
def test_answers_and_their_end_carry_loss_and_nothing_else(turns, kind):
    template, end = ENDS[kind]
    tokenizer = tokenizer_with(template)
    chat = chat_tokenizer(tokenizer)
    messages = conversation(*zip(*turns))
    tokens = chat.tokens(messages)
    spans = np.flatnonzero(np.diff(np.concatenate([[False], tokens.answered, [False]])))
    written = [tokenizer.decode(tokens.ids[start:stop]) for start, stop in spans.reshape(-1, 2)]
    # A leading space belongs to the answer where the prompt does not end with it.
    lead = " " if kind == "inst" else ""
    expected = [lead + answer + end for _, answer in turns]
    if kind == "no_end":
        expected = [
            answer + (end if answer_at == len(turns) - 1 else "") for answer_at, (_, answer) in enumerate(turns)
        ]
    assert written == expected


@settings(max_examples=25, deadline=None, print_blob=True)
@given(turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), kind=st.sampled_from(sorted(ENDS)))
def test_generation_prompt_is_a_prefix_of_the_training_sample(turns, kind):
    chat = chat_tokenizer(tokenizer_with(ENDS[kind][0]))
    messages = conversation(*zip(*turns))
    whole = chat.tokens(messages)
    prompt = chat.tokens(messages[:-1], for_generation=True).ids
    assert whole.ids[: len(prompt)].tolist() == prompt.tolist()
    assert whole.answered[len(prompt)]
    assert len(prompt) < len(whole.ids)


@pytest.mark.parametrize("kind", sorted(set(ENDS) - {"no_end"}))
def test_ids_are_those_of_the_tokenizers_own_template(kind):
    tokenizer = tokenizer_with(ENDS[kind][0])
    messages = conversation(["What is this?", "And that?"], ["A café.", "Tea: 茶"])
    chat = chat_tokenizer(tokenizer)
    content = [{"type": "text", "text": ""}] if chat.template.typed else ""
    dicts = [
        {"role": m.role, "content": [{**content[0], "text": m.text}] if chat.template.typed else m.text}
        for m in messages
    ]
    expected = tokenizer.apply_chat_template(dicts, tokenize=True, return_dict=True)["input_ids"]
    assert chat.tokens(messages).ids.tolist() == expected


def test_a_template_may_hide_thoughts_and_add_empty_ones():
    tokenizer = tokenizer_with(THINKING)
    messages = conversation(["a", "b"], ["<think>\nlong\n</think>\n\none", "two"])
    tokens = chat_tokenizer(tokenizer).tokens(messages)
    # The model is asked to write all that follows the generation prompt, the empty thought included.
    assert tokenizer.decode(tokens.ids[tokens.answered]) == "one<|im_end|><think>\n\n</think>\n\ntwo<|im_end|>"


def test_a_template_for_typed_content_wraps_media_as_it_would():
    chat = chat_tokenizer(tokenizer_with(TYPED))
    assert chat.template.typed
    assert chat.template.around_media("image", "<|image_pad|>") == ("<|vision_start|>", "<|vision_end|>")
    assert chat.template.around_media("image", "<image>") == ("", "")
    assert chat_tokenizer(tokenizer_with(CHATML)).template.around_media("image", "<|image_pad|>") == ("", "")


def test_a_media_place_is_one_token_without_loss():
    chat = chat_tokenizer(byte_tokenizer())
    tokens = chat.tokens([TemplateMessage("user", f"a{MEDIA}{MEDIA}b"), TemplateMessage("assistant", f"c{MEDIA}")])
    text = [256 + 1, ord("a"), -1, -1, ord("b"), ord("\n"), ord("c"), -1, 256 + 2]
    assert tokens.ids.tolist() == text
    assert tokens.answered.tolist() == [False] * 6 + [True, False, True]


def test_a_template_that_refuses_says_so():
    chat = chat_tokenizer(tokenizer_with(TURNS))
    with pytest.raises(UserError, match="System role not supported"):
        chat.tokens([TemplateMessage("system", "x"), TemplateMessage("user", "a"), TemplateMessage("assistant", "b")])
    with pytest.raises(UserError, match="does not write the text of a user's turn"):
        chat_tokenizer(tokenizer_with("{{ 'constant' }}"))
    twice = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(UserError, match="does not write an assistant's turn once"):
        chat_tokenizer(tokenizer_with(twice)).tokens([TemplateMessage("user", "a"), TemplateMessage("assistant", "b")])


def test_a_template_may_come_from_a_file(tmp_path):
    (tmp_path / "chat.jinja").write_text(CHATML)
    tokenizer = tokenizer_with(INST)
    chat = chat_tokenizer(tokenizer, str(tmp_path / "chat.jinja"))
    assert tokenizer.decode(chat.tokens([TemplateMessage("user", "a")], for_generation=True).ids) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat_tokenizer(tokenizer, "plain").template.text == PLAIN_TEMPLATE
    with pytest.raises(UserError, match="cannot be read"):
        chat_tokenizer(tokenizer, str(tmp_path / "none.jinja"))


def test_the_users_tokenizer_is_left_as_it_is():
    tokenizer = byte_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    chat_tokenizer(tokenizer).tokens([TemplateMessage("user", MEDIA), TemplateMessage("assistant", "b")])
    assert tokenizer.backend_tokenizer.to_str() == before


@pytest.fixture(scope="module")
def qwen():
    path = os.environ.get("DILATANT_QWEN_TOKENIZER")
    file = Path(path) if path else shared("models/qwen_tokenizer/tokenizer.json", "ChatML on the Qwen vocabulary")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="module")
def qwen_chat(qwen):
    return chat_tokenizer(qwen)


@pytest.mark.parametrize("answer", ["seven", " seven", "\n7", "…7️⃣", "def f():\n\treturn 7\n", "茶"])
def test_a_real_vocabulary_is_cut_between_prompt_and_answer(qwen, qwen_chat, answer):
    chat = qwen_chat
    messages = [TemplateMessage("user", "What’s  this? "), TemplateMessage("assistant", answer)]
    tokens = chat.tokens(messages)
    assert qwen.decode(tokens.ids[tokens.answered]) == answer + "<|im_end|>"
    prompt = chat.tokens(messages[:1], for_generation=True).ids
    assert tokens.ids[: len(prompt)].tolist() == prompt.tolist()
    assert tokens.answered.tolist() == [False] * len(prompt) + [True] * int(tokens.answered.sum()) + [False]
    if not answer.startswith("\n"):  # the whole text as one would join the line breaks of prompt and answer
        rendered = qwen.apply_chat_template([{"role": m.role, "content": m.text} for m in messages], tokenize=False)
        assert tokens.ids.tolist() == qwen(rendered, add_special_tokens=False).input_ids


def test_a_sentencepiece_vocabulary_keeps_its_word_starts():
    tokenizer = load_tokenizer(str(shared("models/stories260k", "a SentencePiece-like vocabulary")))
    chat = chat_tokenizer(tokenizer)
    tokens = chat.tokens([TemplateMessage("user", f"Once {MEDIA} upon"), TemplateMessage("assistant", "a time")])
    assert tokenizer.decode(tokens.ids[tokens.answered], skip_special_tokens=True).strip() == "a time"
    assert tokens.ids[0] == tokenizer.bos_token_id
    assert tokens.ids[-1] == tokenizer.eos_token_id
    assert tokens.answered[-1]
    assert (tokens.ids == -1).sum() == 1
    assert tokenizer.unk_token_id not in tokens.ids


LINES = (
    "{% for m in messages %}{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
SPACED = "{% for m in messages %}{{ '[INST] ' * (m.role == 'user') + ' ' + m.content + '</s>' }}{% endfor %}"
LLAVA = (  # the tag begins behind the blank that the generation prompt lacks
    "{% for m in messages %}{{ m.role.upper() }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def tokenizer_of_words(blanks):
    """A small vocabulary with words that begin with a blank, which some tokenizers also put before texts."""
    blank, line = ("Ġ", "Ċ") if blanks == "byte" else ("▁", "\n")
    merges = [("r", "e"), ("re", "d"), ("c", "a"), ("ca", "r"), (blank, "red"), (blank, "car")]
    tokens = ["<unk>", "<s>", "</s>", blank, line, *map(chr, range(33, 127)), *map("".join, merges)]
    backend = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges, unk_token="<unk>"))
    backend.decoder = decoders.ByteLevel() if blanks == "byte" else decoders.Metaspace()
    if blanks == "byte":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif blanks == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=blanks, split=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("template", [LINES, SPACED, LLAVA])
@pytest.mark.parametrize("blanks", ["byte", "first", "always", "normalizer"])
def test_ids_are_those_of_a_tokenizer_that_adds_blanks(blanks, template):
    tokenizer = tokenizer_of_words(blanks)
    tokenizer.chat_template = template
    chat = chat_tokenizer(tokenizer)
    messages = conversation(["is it red?", "blue?"], ["red car", "red"])
    tokens = chat.tokens(messages)
    dicts = [{"role": m.role, "content": m.text} for m in messages]
    expected = tokenizer(tokenizer.apply_chat_template(dicts, tokenize=False), add_special_tokens=False).input_ids
    assert tokens.ids.tolist() == expected
    prompt = chat.tokens(messages[:-1], for_generation=True).ids
    assert tokens.ids[: len(prompt)].tolist() == prompt.tolist()
    answers = np.split(tokens.ids[tokens.answered], np.flatnonzero(np.diff(np.flatnonzero(tokens.answered)) > 1) + 1)
    assert [tokenizer.decode(answer).strip() for answer in answers] == ["red car</s>", "red</s>"]


def test_templates_of_which_none_is_the_default_are_refused():
    tokenizer = tokenizer_with({"rag": CHATML, "tool_use": INST})
    with pytest.raises(UserError, match="chat templates called 'rag', 'tool_use', and none called 'default'"):
        chat_tokenizer(tokenizer)
