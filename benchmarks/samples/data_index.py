"""The index of a data set: how fast records are found and measured, and what it costs to open it again.

    python -m benchmarks.samples.data_index [--megabytes N] [--rounds N] [--out FILE.json]

1. Scanning JSON Lines and JSON arrays with records of 150 and 1,000 bytes, in MB/s, beside what only reads the file
   and counts its line breaks (as `wc -l` does) in turn; bar: 300 MB/s. A tar of small members, in members/s, beside
   tarfile's own walk.
2. Measuring samples with a short text, in this process and on all cores (their start included), in samples/s.
3. Opening data and index once they are in the cache, in ms, for 2,000 and 20 times as many samples; bar: the larger
   takes at most 1.5 times as long.

The fastest of all rounds is taken. Everything is measured; nothing is modelled.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from dilatant.config import DataSource
from dilatant.data.cache import SETTLED_NS
from dilatant.data.index.sizes import blend_sizes
from dilatant.data.order.blend import Blend, open_blend
from dilatant.data.readers.json_records import scan_json
from dilatant.data.readers.tar_records import scan_tar
from dilatant.data.text.chat import chat_tokenizer
from dilatant.data.text.encoding import Encoding
from dilatant.data.text.tokenizer import byte_tokenizer

MEMBERS = 20_000
FEW, MANY = 2_000, 40_000
ENCODING = Encoding(chat_tokenizer(byte_tokenizer()))


def records(count: int, size: int) -> list[dict[str, str]]:
    answer = "x" * (size - 52)
    return [{"question": f"what is {number:08}?", "answer": answer} for number in range(count)]


def write_json(path: Path, count: int, size: int) -> None:
    texts = map(json.dumps, records(count, size))
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{text}\n" for text in texts))
    else:
        path.write_text("[" + ", ".join(texts) + "]")


def write_members(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number in range(MEMBERS):
            info = tarfile.TarInfo(f"{number:06}.txt")
            info.size = 100
            archive.addfile(info, io.BytesIO(bytes(100)))


def count_lines(path: Path) -> None:
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            chunk.count(b"\n")


def walk(path: Path) -> None:
    with tarfile.open(path, "r:") as archive:
        for _ in archive:
            archive.members = []  # type: ignore[attr-defined]  # as the scan does


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turn(ours: Callable[[], Any], bound: Callable[[], Any], rounds: int) -> tuple[float, float]:
    pairs = [(seconds_of(ours), seconds_of(bound)) for _ in range(rounds)]
    return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


def scanning(folder: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    print(f"{'scanning':>24} {'ours':>14} {'bound':>8}")
    for size in (150, 1000):
        for suffix in ("jsonl", "json"):
            path = folder / f"{size}.{suffix}"
            write_json(path, megabytes * 1_000_000 // size, size)
            ours, bound = in_turn(lambda path=path: scan_json(path, ""), lambda path=path: count_lines(path), rounds)
            rate = path.stat().st_size / 1e6
            result[path.name] = {"megabytes_per_second": rate / ours, "bound": rate / bound}
            print(f"{path.name:>24} {rate / ours:>9,.0f} MB/s {rate / bound:>8,.0f}")
            path.unlink()
    path = folder / "x.tar"
    write_members(path)
    ours, bound = in_turn(lambda: scan_tar(path, ""), lambda: walk(path), rounds)
    result["tar"] = {"members_per_second": MEMBERS / ours, "bound": MEMBERS / bound}
    print(f"{'members of a tar':>24} {MEMBERS / ours:>12,.0f}/s {MEMBERS / bound:>8,.0f}")
    return result


def opened(path: Path, cache: Path, workers: int | None = None) -> None:
    blend = open_blend([DataSource(path=str(path))], cache_dir=cache)
    assert isinstance(blend, Blend)
    assert len(blend_sizes(blend, ENCODING, cache_dir=cache, workers=workers)) == len(blend)


def measuring(folder: Path) -> dict[str, float]:
    path = folder / "measured.jsonl"
    write_json(path, MANY, 150)
    cores = len(os.sched_getaffinity(0))
    one = MANY / seconds_of(lambda: opened(path, folder / "one", workers=0))
    every = MANY / seconds_of(lambda: opened(path, folder / "all"))
    print(f"measuring: {one:,.0f} samples/s in one process, {every:,.0f} on {cores} cores")
    return {"one_process": one, "all_cores": every, "cores": cores}


def opening(folder: Path, rounds: int) -> dict[str, Any]:
    result = {}
    for count in (FEW, MANY):
        path, cache = folder / f"{count}.jsonl", folder / f"cache-{count}"
        write_json(path, count, 150)
        cold = seconds_of(lambda path=path, cache=cache: opened(path, cache))
        time.sleep(2 * SETTLED_NS / 1e9)
        opened(path, cache)  # the files are checked, and marked as whole
        warm = min(seconds_of(lambda path=path, cache=cache: opened(path, cache)) for _ in range(5 * rounds))
        result[count] = {"cold_seconds": cold, "warm_milliseconds": warm * 1e3}
        print(f"opening {count:>9,} samples: {cold:.2f} s first, {warm * 1e3:.2f} ms from the cache")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "machine": machine(),
            "scanning": scanning(Path(folder), options.megabytes, options.rounds),
            "measuring": measuring(Path(folder)),
            "opening": opening(Path(folder), options.rounds),
        }
    slow = [name for name, found in result["scanning"].items() if found.get("megabytes_per_second", 300) < 300]
    ratio = result["opening"][MANY]["warm_milliseconds"] / result["opening"][FEW]["warm_milliseconds"]
    print(
        f"below 300 MB/s: {', '.join(slow) or 'none'}; {MANY // FEW} times the samples open in {ratio:.2f} of the time"
    )
    if options.out:
        options.out.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
