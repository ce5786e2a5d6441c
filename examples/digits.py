"""Write the handwritten digits that ship inside scikit-learn as a small image-and-text data set.

    python examples/digits.py data/digits

1,797 real scans of 8×8 pixels become PNG files, and two JSONL files ask about them: `train.jsonl` and
`heldout.jsonl` (every fifth scan). The layout is the one your own data may have: one JSON object a line, messages
with typed content, image paths relative to the file.
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
    (folder / "images").mkdir(parents=True, exist_ok=True)
    records: dict[str, list[str]] = {"train": [], "heldout": []}
    for number, (scan, label) in enumerate(zip(digits.images, digits.target)):
        name = f"images/{number:04d}.png"
        Image.fromarray((scan * (255 / 16)).astype(np.uint8)).save(folder / name)
        record = {
            "id": f"digit-{number:04d}",
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": name}, {"type": "text", "text": QUESTION}]},
                {"role": "assistant", "content": [{"type": "text", "text": str(label)}]},
            ],
        }
        split = "heldout" if number % HELD_OUT_EVERY == 0 else "train"
        records[split].append(json.dumps(record))
    for split, lines in records.items():
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{folder / split}.jsonl: {len(lines)} scans")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data/digits"))
