"""Write the handwritten digits that ship inside scikit-learn as pictures to be drawn.

    python examples/digits_to_draw.py data/draw

1,797 real scans of 8×8 pixels become PNG files; `train.jsonl` asks for them in several wordings, and the assistant's
answer is the picture. `see.jsonl` shows a scan, and the assistant says which digit it is and draws it anew. The scans
that `digits.py` holds out are held out here, too: no model sees them, and `held_out.jsonl` and `see_held_out.jsonl` ask
for them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDINGS = ("draw a {}", "draw the digit {}", "please draw a {}", "a handwritten {}", "write {}", "show me a {}")
SEE = "Say it and draw it."
HELD_OUT_EVERY = 5


def main(folder: Path) -> None:
    digits = load_digits()
    (folder / "images").mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    drawn, seen, asked, shown = [], [], [], []
    for number, (scan, label) in enumerate(zip(digits.images, digits.target)):
        name = f"images/{number:04d}.png"
        Image.fromarray((scan * (255 / 16)).astype(np.uint8)).save(folder / name)
        picture = {"type": "image", "image": name}
        question = [picture, {"type": "text", "text": SEE}]
        answer = [{"type": "text", "text": WORDS[label]}, picture]
        if number % HELD_OUT_EVERY == 0:
            asked.append(_record(f"held-out-{number:04d}", f"draw a {WORDS[label]}", [picture]))
            shown.append(_record(f"unseen-{number:04d}", question, answer))
            continue
        digit = WORDS[label] if random.random() < 0.5 else str(label)
        request = WORDINGS[random.integers(len(WORDINGS))].format(digit)
        drawn.append(_record(f"draw-{number:04d}", request, [picture]))
        seen.append(_record(f"see-{number:04d}", question, answer))
    for split, records in {"train": drawn, "see": seen, "held_out": asked, "see_held_out": shown}.items():
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
        print(f"{folder / split}.jsonl: {len(records)} pictures")


def _record(name: str, question: object, answer: object) -> dict[str, object]:
    return {"id": name, "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data/draw"))
