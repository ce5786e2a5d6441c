"""Who is alive: every rank has an inbox in the store that a thread of its own reads, also while its main thread waits.

A message asks for an answer ("what are you doing?") or says that communication is over, and why.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from uuid import uuid4

from dilatant.comm.store.store import Store

ANSWER_SECONDS = 2.0
"""What a rank has to answer a liveness check. It needs a millisecond; more on a machine under load."""


def send_abort(store: Store, inbox: str, reason: str) -> None:
    """Say to the rank that reads `inbox` that communication is over."""
    store.push(inbox, json.dumps({"abort": reason}))


def read_inbox(store: Store, inbox: str) -> tuple[str, str]:
    """The next message, when there is one: ("abort", reason) or ("answer", where). Raises StoreGone."""
    ((kind, text),) = json.loads(store.pop(inbox)).items()
    return kind, text


def answer_check(store: Store, where: str, rank: int, activity: str) -> None:
    """Answer a liveness check with what this rank is doing."""
    store.push(where, json.dumps([rank, activity]))


def check_liveness(store: Store, inboxes: Mapping[int, str]) -> dict[int, str]:
    """What the ranks that answer in time are doing. inboxes: by rank, of those to ask."""
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
