"""Edges say when what comes is not what their ends agreed on, and when messages of a step were not used."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilatant.plan.plan import Stage
from dilatant.runtime.step.row_owners import MessageSlice
from dilatant.runtime.transport import Transport, TransportError
from dilatant.schedule.dependencies import Message
from dilatant.schedule.schedule import Action

LINK = (0, 1, 0, 1)
"""From stage 0 to stage 1, from rank 0 to rank 1."""
MESSAGES = tuple(Message(Action("F", 0, n), Action("F", 1, n), (n,)) for n in range(4))
PARCEL = MessageSlice(2, 3, torch.float32)


class Wire:
    """An edge within one process: what is sent lies there by tag, in order."""

    def __init__(self) -> None:
        self._sent: dict[int, deque[torch.Tensor]] = {}

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0, what: str = "") -> Any:
        self._sent.setdefault(tag, deque()).append(tensor.clone())
        return SimpleNamespace(wait=lambda: None)

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0, what: str = "") -> Any:
        return SimpleNamespace(wait=lambda: tensor.copy_(self._sent[tag].popleft()))


def end(
    wire: Wire,
    rank: int,
    messages: tuple[Message, ...] = MESSAGES,
    generation: int = 1,
    parcel: MessageSlice = PARCEL,
    look_ahead: int = 1,
    check: bool = True,
) -> Transport:
    """The transport of one end, whose step has begun."""
    comm: Any = SimpleNamespace(rank=rank, generation=generation, device=torch.device("cpu"), edge=lambda *_: wire)
    transport = Transport(comm, (Stage(0, 1, (0,)), Stage(1, 2, (1,))), look_ahead, check)
    along = {LINK: messages}
    routes: Any = SimpleNamespace(
        incoming=along if rank else {},
        outgoing={} if rank else along,
        turn={action: n for n, each in enumerate(messages) for action in (each.producer, each.consumer)},
        after=dict.fromkeys(messages, 0),
    )
    owners: Any = SimpleNamespace(
        parcel=lambda message, link: parcel,
        shares=lambda message, rank: None,
        boundary=lambda message: SimpleNamespace(width=parcel.width, dtype=parcel.dtype),
    )
    transport.begin(routes, owners, lambda: None)
    return transport


@pytest.mark.parametrize("check", [False, True])
def test_rows_arrive_in_whichever_order_they_are_asked_for(check: bool) -> None:
    wire = Wire()
    sender, receiver = end(wire, 0, check=check), end(wire, 1, check=check)
    for number, message in enumerate(MESSAGES):
        sender.send(message, torch.full((2, 3), float(number)))
    for number in (2, 0, 3, 1):
        rows, came_from = receiver.receive(MESSAGES[number])
        assert came_from == 0
        assert torch.equal(rows, torch.full((2, 3), float(number)))
    sender.finish()
    receiver.finish()


@pytest.mark.parametrize(
    "otherwise",
    [
        {"generation": 2},
        {"parcel": MessageSlice(1, 6, torch.float32)},
        {"messages": tuple(Message(m.producer, m.consumer, (9,)) for m in MESSAGES)},
        {"messages": MESSAGES[::-1]},
    ],
    ids=["generation", "shape", "samples", "order"],
)
def test_a_checked_edge_refuses_what_its_ends_do_not_mean_alike(otherwise: dict[str, Any]) -> None:
    wire = Wire()
    sender, receiver = end(wire, 0), end(wire, 1, **otherwise)
    sender.send(MESSAGES[0], torch.zeros(2, 3))
    first = otherwise.get("messages", MESSAGES)[0]
    with pytest.raises(TransportError, match="something else came"):
        receiver.receive(first)


@pytest.mark.parametrize("used", range(5))
@pytest.mark.parametrize("look_ahead", [1, 2, 9])
def test_all_messages_that_were_not_used_are_told_posted_or_not(look_ahead: int, used: int) -> None:
    wire = Wire()
    sender, receiver = end(wire, 0), end(wire, 1, look_ahead=look_ahead)
    for message in MESSAGES:
        sender.send(message, torch.zeros(2, 3))
    for message in MESSAGES[:used]:
        receiver.receive(message)
    if used == len(MESSAGES):
        receiver.finish()
        return
    with pytest.raises(TransportError, match=rf"^{len(MESSAGES) - used} messages were not used"):
        receiver.finish()
