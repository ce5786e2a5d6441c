"""`val_size` holds samples out, `truncation` cuts them: by keys, whole items, and never a sample on both sides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dilatant.config.data import DataSource
from dilatant.config.errors import UserError
from dilatant.data.order.blend import Blend, open_blend
from dilatant.data.readers import parquet_records
from dilatant.data.readers.reader import HeldOutSplit


@pytest.mark.parametrize("total", [2, 3, 10, 101])
@pytest.mark.parametrize("size", [1, 0.001, 0.3, 0.49])
def test_each_sample_is_on_one_side(total: int, size: float) -> None:
    sides = [HeldOutSplit(size, 7, held_out).numbers(total) for held_out in (False, True)]
    assert sorted(np.concatenate(sides).tolist()) == list(range(total))
    assert len(sides[1]) == max(1, round(total * size) if size < 1 else size)
    assert all((np.diff(side) > 0).all() for side in sides)
    if total > 10 and len(sides[1]) > 1:
        assert HeldOutSplit(size, 8, True).numbers(total).tolist() != sides[1].tolist()


def test_nothing_is_left_is_said() -> None:
    with pytest.raises(UserError, match="would hold out all of a data set of 5 samples"):
        HeldOutSplit(5, 0, True).count(5)


def test_a_source_read_in_blocks_is_split_within_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is still read once a pass: the sides' blocks are the source's, without the other side's samples."""
    monkeypatch.setattr(parquet_records, "CACHE_BYTES", 1)
    rows = [{"question": f"q{number}", "answer": f"a{number}"} for number in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet", row_group_size=7)
    source = DataSource(path=str(tmp_path / "data.parquet"), limit=37)
    whole = open_blend([source], cache_dir=tmp_path / "cache")
    assert isinstance(whole, Blend)
    sides = whole.split(0.3, 3)
    texts = [[side[index].turns[0].content[0] for index in range(len(side))] for side in sides]
    assert sorted(texts[0] + texts[1]) == sorted(f"q{number}" for number in range(37))
    for side, of_side in zip(sides, texts, strict=True):
        blocks = side.readers[0].blocks
        assert blocks is not None
        assert sum(blocks.lengths) == len(side)
        at = 0
        for length in blocks.lengths:
            groups = {int(str(text)[1:]) // 7 for text in of_side[at : at + length]}
            assert len(groups) == 1
            at += length
    assert sides[0].readers[0].fingerprint == sides[1].readers[0].fingerprint
    assert open_blend([source], cache_dir=tmp_path / "cache", max_samples=5).lengths == (5,)  # type: ignore[union-attr]
