"""Write pairs of answers about the digits of scikit-learn: the right digit is chosen, another one rejected.

    python examples/digits_to_prefer.py data/preferences

The files are `train.jsonl` and `heldout.jsonl` (every fifth scan), one record a line in the form of TRL and others:
`image`, `prompt`, `chosen`, `rejected`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

QUESTION = "Which digit is this?"
HELD_OUT_EVERY = 5


def main(folder: Path) -> None:
    digits = load_digits()
    random = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    records: dict[str, list[str]] = {"train": [], "heldout": []}
    for number, (scan, label) in enumerate(zip(digits.images, digits.target)):
        name = f"images/{number:04d}.png"
        Image.fromarray((scan * (255 / 16)).astype(np.uint8)).save(folder / name)
        other = (int(label) + int(random.integers(1, 10))) % 10
        record = {"image": name, "prompt": QUESTION, "chosen": str(label), "rejected": str(other)}
        records["heldout" if number % HELD_OUT_EVERY == 0 else "train"].append(json.dumps(record))
    for split, lines in records.items():
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{folder / split}.jsonl: {len(lines)} pairs")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data/preferences"))
