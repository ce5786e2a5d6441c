"""Transport: rows of samples along directed edges between ranks of different stages.

Every directed edge has its own communicator, on a GPU with its own stream. Both ends know every message, its order and
its shape, so nothing but rows travels. Sends return at once. Receives are posted in the sender's order, at most
`look_ahead` messages beyond the furthest one that was needed so far, so buffers are bounded by the schedule. What was
sent is let go when a message comes back from an action that took it, or from a later one of the same rank: Gloo does
not tell when a send is over, but then it must be.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.comm.group import Group, Pending
from dilatant.runtime.routes import Link, Routes
from dilatant.schedule.dependencies import Message
from dilatant.schedule.schedule import Action

_TAGS = 1 << 18
_HEADER_TAG = 1 << 19

Shape = Callable[[Message], tuple[int, int, torch.dtype]]
"""Rows, width and dtype of a message; the same at both ends."""


class TransportError(RuntimeError):
    """A message is not the one that the schedule says comes next on its edge."""


class Transport:
    """The edges of one rank. `begin`, then `receive` and `send`, then `finish`, each step.

    ranks_of_stage: by stage number. check: a header before every message proves that both ends mean the same one
    (slower; for debugging).
    """

    def __init__(
        self, comm: Comm, ranks_of_stage: Sequence[tuple[int, ...]], look_ahead: int = 2, check: bool = False
    ) -> None:
        self._comm = comm
        self._ranks_of_stage = ranks_of_stage
        self._look_ahead = look_ahead
        self._check = check
        self._edges: dict[Link, Group] = {}
        self._inboxes: dict[Link, _Inbox] = {}
        self._place: dict[Message, int] = {}
        self._source: dict[Message, Link] = {}
        self._targets: dict[Message, list[Link]] = {}
        self._sending: dict[tuple[int, ...], list[tuple[int, Pending]]] = defaultdict(list)
        self._turn: Mapping[Action, int] = {}
        self._shape: Shape | None = None

    def has_open(self, routes: Routes) -> bool:
        """Whether all edges of a step are open already."""
        return self._edges.keys() >= {*routes.incoming, *routes.outgoing}

    def begin(self, routes: Routes, shape: Shape) -> None:
        """Open the edges of a step, which waits for the ranks at their other ends, and post the first receives."""
        self._shape = shape
        self._turn = routes.turn
        # Every rank opens its edges in the same order of all edges, so nobody waits in a circle.
        for link in sorted({*routes.incoming, *routes.outgoing} - self._edges.keys()):
            made, taken, source, target = link
            self._edges[link] = self._comm.edge(f"edge/{made}-{taken}/{source}-{target}", source, target)
        self._place = {
            message: index
            for messages in (*routes.incoming.values(), *routes.outgoing.values())
            for index, message in enumerate(messages)
        }
        self._source = {message: link for link, messages in routes.incoming.items() for message in messages}
        self._targets = defaultdict(list)
        for link, messages in routes.outgoing.items():
            for message in messages:
                self._targets[message].append(link)
        self._inboxes = {
            link: _Inbox(self, self._edges[link], link[2], messages, self._look_ahead)
            for link, messages in routes.incoming.items()
        }

    def receive(self, message: Message) -> tuple[Tensor, int]:
        """The rows of `message`, [rows, width], when they are here, and the rank that they come from. Each message is
        received once."""
        link = self._source[message]
        rows = self._inboxes[link].take(self._place[message])
        self._let_go(self._ranks_of_stage[message.producer.stage], self._turn[message.producer])
        return rows, link[2]

    def send(self, message: Message, rows: Tensor) -> None:
        """Send [rows, width] to the ranks that take the message from this one, and return at once; `rows` must not
        change any more."""
        assert self._shape is not None
        count, width, dtype = self._shape(message)
        if tuple(rows.shape) != (count, width) or rows.dtype != dtype:
            raise TransportError(
                f"{describe(message)}: {list(rows.shape)} of {rows.dtype} were made, but the sizes of the samples "
                f"say {[count, width]} of {dtype}; the sizes index does not fit the model"
            )
        links = self._targets.get(message, ())
        if not count or not links:
            return
        place, turn, what = self._place[message], self._turn[message.consumer], describe(message)
        sending = self._sending[self._ranks_of_stage[message.consumer.stage]]
        rows = rows.contiguous()
        for link in links:
            edge, target = self._edges[link], link[3]
            if self._check:
                header = self.header(message, place).to(self._comm.device)
                sending.append((turn, edge.send(header, target, _HEADER_TAG + place % _TAGS, what)))
            sending.append((turn, edge.send(rows, target, place % _TAGS, what)))

    def finish(self) -> None:
        """Return when everything is sent. Raises TransportError if a message was never received."""
        for sending in self._sending.values():
            for _, pending in sending:
                pending.wait()
        self._sending.clear()
        left = [message for inbox in self._inboxes.values() for message in inbox.left()]
        self._inboxes.clear()
        if left:
            raise TransportError(f"{len(left)} messages were not used; the first is {describe(left[0])}")

    def header(self, message: Message, place: int) -> Tensor:
        """What both ends of a checked edge must agree on: int64 [5]."""
        assert self._shape is not None
        rows, width, _ = self._shape(message)
        samples = hashlib.sha256(repr(message).encode()).digest()
        return torch.tensor(
            [self._comm.generation, place, rows, width, int.from_bytes(samples[:7], "little")]
        )

    def _let_go(self, ranks: tuple[int, ...], turn: int) -> None:
        """Forget what was sent to actions of `ranks`, which run the same ones, up to `turn`: they are done."""
        sending = self._sending[ranks]
        for wanted, pending in sending:
            if wanted <= turn:
                pending.wait()
        self._sending[ranks] = [entry for entry in sending if entry[0] > turn]


@dataclass(slots=True)
class _Posted:
    buffer: Tensor
    header: Tensor | None
    pending: Pending | None


class _Inbox:
    """Receives of one directed edge, in the sender's order."""

    def __init__(
        self, transport: Transport, edge: Group, source: int, messages: tuple[Message, ...], look_ahead: int
    ) -> None:
        self._transport = transport
        self._edge = edge
        self._source = source
        self._messages = messages
        self._look_ahead = look_ahead
        self._posted: dict[int, _Posted] = {}
        self._next = 0
        self._post_through(look_ahead - 1)

    def take(self, place: int) -> Tensor:
        self._post_through(place + self._look_ahead)
        posted = self._posted.pop(place)
        if posted.pending is not None:
            posted.pending.wait()
        if posted.header is not None:
            posted = self._after_header(place, posted)
        return posted.buffer

    def left(self) -> list[Message]:
        return [
            message
            for place, message in enumerate(self._messages)
            if place in self._posted or place >= self._next
        ]

    def _post_through(self, last: int) -> None:
        transport = self._transport
        assert transport._shape is not None
        while self._next <= min(last, len(self._messages) - 1):
            place, message = self._next, self._messages[self._next]
            rows, width, dtype = transport._shape(message)
            buffer = torch.empty(rows, width, dtype=dtype, device=transport._comm.device)
            header = pending = None
            if rows and transport._check:
                header = torch.zeros(5, dtype=torch.int64, device=transport._comm.device)
                pending = self._receive(header, place, _HEADER_TAG)
            elif rows:
                pending = self._receive(buffer, place, 0)
            self._posted[place] = _Posted(buffer, header, pending)
            self._next += 1

    def _after_header(self, place: int, posted: _Posted) -> _Posted:
        """Compare before the rows are received: Gloo ends the process when a message outgrows its buffer."""
        assert posted.header is not None
        message = self._messages[place]
        wanted = self._transport.header(message, place)
        if not torch.equal(posted.header.cpu(), wanted):
            raise TransportError(
                f"{describe(message)} was awaited as message {place} of its edge, but something else came: "
                f"generation, place, rows, width and samples are {posted.header.tolist()} instead of {wanted.tolist()}"
            )
        self._receive(posted.buffer, place, 0).wait()
        return posted

    def _receive(self, tensor: Tensor, place: int, tag: int) -> Pending:
        message = self._messages[place]
        return self._edge.receive(tensor, self._source, tag + place % _TAGS, describe(message))


def describe(message: Message) -> str:
    """A message in words, for people who look for the reason of an error."""
    producer, consumer = message.producer, message.consumer
    more = "..." if len(message.samples) > 8 else ""
    return (
        f"{'rows' if producer.kind == 'F' else 'gradients'} of samples {list(message.samples[:8])}{more} from "
        f"{producer.kind} of stage {producer.stage} microbatch {producer.microbatch} to {consumer.kind} of stage "
        f"{consumer.stage} microbatch {consumer.microbatch}"
    )
