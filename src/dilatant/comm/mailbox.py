"""News: short texts from rank to rank through the store, which arrive also where a rank's main thread is blocked.

Every rank has a box of numbered places: several may write to it at once, and nothing is lost or overwritten.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

WAIT_SECONDS = 3600.0
ANSWER_SECONDS = 2.0
"""What a rank's watchdog has to answer a roll call. It needs a millisecond; more on a machine under load."""


def post(store: Any, rank: int, text: str) -> None:
    """Put `text` into the box of `rank`."""
    place = store.add(f"box/{rank}", 1)
    store.set(f"box/{rank}/{place}", text)


def read(store: Any, rank: int, place: int) -> str:
    """The text in a place (1, 2, ...) of the box of `rank`, when it is there. Blocks the whole `store` object.

    Raises RuntimeError when the store is gone.
    """
    key = f"box/{rank}/{place}"
    while True:
        began = time.monotonic()
        try:
            store.wait([key], timedelta(seconds=WAIT_SECONDS))
        except RuntimeError:
            if time.monotonic() - began < WAIT_SECONDS - 1:
                raise
            continue
        return store.get(key).decode()


def call_roll(store: Any, ranks: Sequence[int], question: str) -> dict[int, str]:
    """What `ranks` answer to `question` and the name of a key, put into their boxes; those who do not are left out.

    They answer in `store` under that key followed by "/" and their rank.
    """
    key = f"roll/{store.add('rolls', 1)}"
    for rank in ranks:
        post(store, rank, question + key)
    answers: dict[int, str] = {}
    deadline = time.monotonic() + ANSWER_SECONDS
    while len(answers) < len(ranks) and time.monotonic() < deadline:
        for rank in ranks:
            if rank not in answers and store.check([f"{key}/{rank}"]):
                answers[rank] = store.get(f"{key}/{rank}").decode()
        time.sleep(0.02)
    return answers
