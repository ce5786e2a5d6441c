"""Data workers start often and in large numbers, so they must import little."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

from dilatant.data.text.chat import chat_tokenizer
from dilatant.data.text.encoding import Encoding
from dilatant.data.text.tokenizer import byte_tokenizer


def test_data_modules_import_neither_torch_nor_transformers():
    code = (
        "import sys, dilatant.data.order.blend, dilatant.data.text.encode, dilatant.data.workers.batches;"
        "import dilatant.data.index.sizes, dilatant.data.index.stats, dilatant.data.index.lint;"
        "import dilatant.data.workers.ordered_map;"
        "import dilatant.data.workers.pool_owner, dilatant.data.workers.pool_source;"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'pandas', 'numba'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_encoding_texts_images_and_sounds_imports_no_torch(tmp_path: Path) -> None:
    """A worker receives the encoding ready-made; making a tokenizer may import torch (transformers 5.17)."""
    encoding = tmp_path / "encoding"
    encoding.write_bytes(pickle.dumps(Encoding(chat_tokenizer(byte_tokenizer()))))
    code = (
        "import pickle, sys, numpy as np; from dilatant.data.sample import Sample, Turn;"
        "from dilatant.data.text.encode import encode_sample;"
        "encoding = pickle.load(open(sys.argv[1], 'rb'));"
        "sample = Sample('s', (Turn('user', ('q',)), Turn('assistant', ('a',))));"
        "encode_sample(sample, encoding);"
        "assert 'torch' not in sys.modules, 'a chat template';"
        "from dilatant.data.media_units.audio_unit import LogMelProcessor;"
        "from dilatant.data.media_units.image_unit import PixelProcessor;"
        "from dilatant.data.media.sound_file import resample;"
        "PixelProcessor(8, 8)(np.zeros((9, 9, 3), np.uint8));"
        "assert 'torch' not in sys.modules, 'an image';"
        "wave = resample(np.zeros(44100, np.float32), 44100, 16000);"
        "LogMelProcessor(window_frames=100)(wave[None]);"
        "assert 'torch' not in sys.modules, 'a sound'"
    )
    subprocess.run([sys.executable, "-c", code, str(encoding)], check=True)
