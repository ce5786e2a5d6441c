"""Liveness checks: each rank has an inbox in the store, read by its own thread even while the main thread waits.

A message either asks what the rank is doing, or says that communication was aborted and why.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from uuid import uuid4

from dilatant.comm.store.store import Store

ANSWER_SECONDS = 2.0
"""Time limit for the answer to a liveness check. An idle machine needs a millisecond, a loaded one more."""


def send_abort(store: Store, inbox: str, reason: str) -> None:
    """Notify the rank that reads `inbox` that communication was aborted."""
    store.push(inbox, json.dumps({"abort": reason}))


def read_inbox(store: Store, inbox: str) -> tuple[str, str]:
    """Wait for the next message: ("abort", reason) or ("answer", queue for the answer). Raises StoreGone."""
    ((kind, text),) = json.loads(store.pop(inbox)).items()
    return kind, text


def answer_check(store: Store, where: str, rank: int, activity: str) -> None:
    """Answer a liveness check with this rank's activity."""
    store.push(where, json.dumps([rank, activity]))


def check_liveness(store: Store, inboxes: Mapping[int, str]) -> dict[int, str]:
    """Ask ranks what they are doing; return the activity of each rank that answers in time. inboxes: by rank."""
    where = f"answers/{uuid4().hex}"
    for inbox in inboxes.values():
        store.push(inbox, json.dumps({"answer": where}))
    answers: dict[int, str] = {}
    deadline = time.monotonic() + ANSWER_SECONDS
    while len(answers) < len(inboxes):
        left = deadline - time.monotonic()
        try:
            rank, activity = json.loads(store.pop(where, timedelta(seconds=max(0.0, left))))
        except TimeoutError:
            break
        answers[rank] = activity
    return answers
