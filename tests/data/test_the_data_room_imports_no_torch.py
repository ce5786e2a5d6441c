"""Worker processes start often and in numbers: what they import must stay light."""

from __future__ import annotations

import subprocess
import sys


def test_reading_encoding_and_loading_import_neither_torch_nor_transformers():
    code = (
        "import sys, dilatant.data; from dilatant.data import Loader, open_blend, encode_sample;"
        "import dilatant.data.sizes, dilatant.data.stats, dilatant.data.lint, dilatant.data.workers;"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'pandas', 'numba'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_encoding_with_a_chat_template_imports_no_torch():
    code = (
        "import sys; from dilatant.data import Encoding, Sample, Turn, byte_tokenizer, chat_tokenizer, encode_sample;"
        "sample = Sample('s', (Turn('user', ('q',)), Turn('assistant', ('a',))));"
        "encode_sample(sample, Encoding(chat_tokenizer(byte_tokenizer())));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
