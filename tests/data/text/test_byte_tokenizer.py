"""The built-in tokenizer loses nothing and lives on in the Hugging Face layout."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from dilatant.config import UserError
from dilatant.data.text.tokenizer import byte_tokenizer, count_ids, load_tokenizer

TOKENIZER = byte_tokenizer()


@settings(max_examples=50, deadline=None, print_blob=True)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))  # a codec takes seconds to look up
def test_text_is_its_bytes_and_comes_back(text):
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if not any(token in text for token in ("<pad>", "<s>", "</s>")):
        assert ids == [*text.encode()]
    assert TOKENIZER.decode(ids) == text


def test_the_vocabulary_is_tiny():
    assert len(TOKENIZER) == 259
    assert (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (256, 257, 258)


def test_it_loads_without_this_package(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    code = (
        "import sys; from transformers import PreTrainedTokenizerFast as T; t = T.from_pretrained(sys.argv[1]);"
        "assert t('é</s>', add_special_tokens=False).input_ids == [195, 169, 258];"
        "assert t.decode([195, 169]) == 'é' and (t.pad_token_id, t.bos_token_id, t.eos_token_id) == (256, 257, 258);"
        "assert 'dilatant' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert load_tokenizer(str(tmp_path))("é", add_special_tokens=False).input_ids == [195, 169]


def test_an_unknown_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer folder '.*none' does not exist"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(UserError, match="there is no tokenizer in"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer '.*' cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_folder_of_a_model_without_its_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    with pytest.raises(UserError, match="there is no tokenizer in"):
        load_tokenizer(str(tmp_path))


def test_a_vocabulary_with_a_gap_has_more_ids_than_tokens():
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    assert count_ids(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="a")) == 8
    assert count_ids(TOKENIZER) == len(TOKENIZER)
