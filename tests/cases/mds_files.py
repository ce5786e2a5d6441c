"""MDS shards and Energon folders written by hand, from the facts of the formats."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from cases.data_builders import write_tar

PACK = {
    "": bytes,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zstd": lambda data: pa.compress(data, "zstd", asbytes=True),
    "br": lambda data: pa.compress(data, "brotli", asbytes=True),
}
"""Suffix of a compressed shard → what compresses it."""


def mds_sample(values: Sequence[bytes], sizes: Sequence[int | None]) -> bytes:
    lengths = [len(value) for value, size in zip(values, sizes) if size is None]
    return struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(values)


def mds_shard(columns: Mapping[str, tuple[str, int | None]], rows: Sequence[Sequence[bytes]]) -> bytes:
    """The bytes of a shard. columns: name → encoding and bytes of each value, in the order of the values."""
    sizes = [size for _, size in columns.values()]
    about = json.dumps(
        {
            "column_encodings": [encoding for encoding, _ in columns.values()],
            "column_names": [*columns],
            "column_sizes": sizes,
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": 1 << 26,
            "version": 2,
        },
        sort_keys=True,
    ).encode()
    samples = [mds_sample(row, sizes) for row in rows]
    ends = [4 + 4 * (len(samples) + 1) + len(about)]
    for sample in samples:
        ends.append(ends[-1] + len(sample))
    return struct.pack(f"<{len(ends) + 1}I", len(samples), *ends) + about + b"".join(samples)


def mds_entry(name: str, raw: bytes, samples: int, packed: bytes | None = None, suffix: str = "") -> dict[str, Any]:
    """What an index says of a shard."""

    def file(base: str, data: bytes) -> dict[str, Any]:
        return {"basename": base, "bytes": len(data), "hashes": {"sha1": hashlib.sha1(data).hexdigest()}}

    return {
        "format": "mds",
        "version": 2,
        "samples": samples,
        "compression": suffix or None,
        "hashes": ["sha1"],
        "size_limit": 1 << 26,
        "raw_data": file(name, raw),
        "zip_data": None if packed is None else file(f"{name}.{suffix}", packed),
    }


def write_mds(folder: Path, shards: Sequence[tuple[Mapping[str, Any], Sequence[Any]]], suffix: str = "") -> Path:
    """Write a data set with its index; suffix: how shards are compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, (columns, rows) in enumerate(shards):
        name, raw = f"shard.{number:05}.mds", mds_shard(columns, rows)
        packed = PACK[suffix](raw) if suffix else None
        (folder / (f"{name}.{suffix}" if suffix else name)).write_bytes(raw if packed is None else packed)
        entries.append(mds_entry(name, raw, len(rows), packed, suffix))
    (folder / "index.json").write_text(json.dumps({"shards": entries, "version": 2}, sort_keys=True))
    return folder


TEXTS = {"answer": ("str", None), "question": ("str", None)}


def texts(*numbers: int) -> list[list[bytes]]:
    return [[f"a{number}".encode(), f"q{number}".encode()] for number in numbers]


def write_energon(
    folder: Path,
    shards: Mapping[str, Mapping[str, bytes]],
    splits: Mapping[str, Sequence[str]],
    dataset: str,
    exclude: Sequence[str] = (),
) -> Path:
    """Write a prepared data set. shards: name → members; dataset: the text of dataset.yaml."""
    counts = {}
    for name, members in shards.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_tar(folder / name, dict(members))
        counts[name] = len({member.partition(".")[0] for member in members})
    meta = folder / ".nv-meta"
    meta.mkdir()
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    (meta / "split.yaml").write_text(json.dumps({"exclude": [*exclude], "split_parts": {**splits}}))  # JSON is YAML
    (meta / "dataset.yaml").write_text(dataset)
    return folder
