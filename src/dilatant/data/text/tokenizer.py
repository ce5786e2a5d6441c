"""Tokenizers: fast Hugging Face tokenizers by name, and a built-in byte tokenizer that needs no download."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilatant.config.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BYTES = "bytes"


def load_tokenizer(name: str, trust_remote_code: bool = False, key: str = "model.tokenizer") -> PreTrainedTokenizerFast:
    """Load the tokenizer of a hub id or a local folder, or the built-in one for `bytes`. key: the key of a config that
    names it, for errors. Raises UserError."""
    if name == BYTES:
        return byte_tokenizer()
    if os.path.isfile(name):
        raise UserError(f"tokenizer {name!r} is a file; name the folder that it is in")
    if name.startswith((".", "/", "~")) and not os.path.isdir(name):
        raise UserError(f"tokenizer folder {name!r} does not exist")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        if lacks_tokenizer(name):
            raise _no_tokenizer(name, key) from None
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"tokenizer {name!r} cannot be loaded: {first} "
            "(give a local folder, an id that this machine can reach, or 'bytes' for the built-in one)"
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"tokenizer {name!r} has no fast version (tokenizer.json), which is needed to place media")
    if not tokenizer("A word.", add_special_tokens=False).input_ids:
        # transformers makes an empty tokenizer of a folder with a config but no tokenizer files.
        raise _no_tokenizer(name, key)
    # A transformers processor prefers the template in these files over its tokenizer's.
    for file in ("processor_config.json", "chat_template.json"):
        template = _settings(name, file).get("chat_template")
        if isinstance(template, str | dict):
            tokenizer.chat_template = template
            break
    return tokenizer


def lacks_tokenizer(name: str) -> bool:
    """Return True for a local folder without any file of a tokenizer; False also for one that cannot be read."""
    try:
        return not any(re.search(r"token|vocab|\.model$", file.name) for file in Path(name).iterdir())
    except (OSError, ValueError):
        return False


def _no_tokenizer(name: str, key: str) -> UserError:
    return UserError(
        f"there is no tokenizer in {name!r}: text becomes no tokens; put tokenizer.json and tokenizer_config.json "
        f"there, or name another folder by `--set {key}=FOLDER`"
    )


def count_ids(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the highest id plus one, which is more than the number of tokens if the vocabulary has gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def generation_ends(source: str | None) -> tuple[int, ...]:
    """Return the eos ids in the `generation_config.json` of a hub id or a local folder. Raises UserError."""
    found = _settings(source, "generation_config.json").get("eos_token_id") if source is not None else None
    ids = found if isinstance(found, list) else [found]
    return tuple(token for token in ids if isinstance(token, int))


def _settings(source: str, file: str) -> dict[str, Any]:
    """Return the content of a JSON file of a hub id or a local folder; empty if it is absent. Raises UserError."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(
            source, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        content = {} if path is None else json.loads(Path(str(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{source!r}: {file} cannot be read: {str(error).partition(chr(10))[0]}") from None
    return content if isinstance(content, dict) else {}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer whose ids 0 to 255 are the bytes of UTF-8, followed by `<pad>`, `<s>` and `</s>`.

    It saves to, and loads from, the Hugging Face layout without this package.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {char: byte for byte, char in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in names.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, padding_side="left", **names
    )
