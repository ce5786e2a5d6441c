"""Transport: point-to-point communication of samples' rows between the ranks of different stages.

Every directed edge has its own communicator, on a GPU with its own stream. Both ends derive every message, its order
and its shape, so only rows are sent; rows for the same rank are not sent at all. Sends return at once. Receives are
posted in the sender's order, at most `look_ahead` messages beyond the furthest one needed, so the schedule bounds
the buffers; and not before all that they depend on here is launched (`Routes.after`), and few at once, because on a GPU
a posted receive occupies multiprocessors, and no wait for the whole device ends before it is complete. Tensor-parallel
ranks that need the same rows each receive a slice and all-gather within the stage. A sent buffer is freed when a
message arrives from an action that used it, or from a later action of that rank: Gloo does not report when a send
completes, but by then the send is complete.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dilatant.attention.kernels.attention_plan import upload
from dilatant.comm.comm import Comm
from dilatant.comm.group import Group, Pending
from dilatant.plan.plan import Stage
from dilatant.runtime.routes import RouteLink, Routes
from dilatant.runtime.state.shared_groups import group_in
from dilatant.runtime.step.row_owners import MessageSlice, RowOwners, Rows
from dilatant.schedule.dependencies import Message
from dilatant.schedule.schedule import Action

_TAGS = 1 << 18
_HEADER_TAG = 1 << 19
MOST_POSTED = 8
"""Maximum receives that a rank posts before it needs them: each occupies up to 4 of a GPU's multiprocessors, of which
an H100 has 132."""


class TransportError(RuntimeError):
    """A message differs from the one that the schedule expects next on its edge."""


class Transport:
    """The edges of one rank. In each step call `begin`, then, for each action, `reached`, `receive` and `send`, then
    `finish`.

    stages: all stages of the plan, by number. All ranks construct it together, since this opens tensor-parallel groups.
    check: send a header before every message to verify that both ends expect the same one (slower; for debugging).
    """

    def __init__(self, comm: Comm, stages: Sequence[Stage], look_ahead: int = 2, check: bool = False) -> None:
        self._comm = comm
        self._ranks_of_stage = [stage.ranks for stage in stages]
        self._groups = {
            number: group_in(comm, "tensor", stage, stage.tp)
            for number, stage in enumerate(stages)
            if stage.tp > 1 and comm.rank in stage.ranks
        }
        self._look_ahead = look_ahead
        self._check = check
        self._edges: dict[RouteLink, Group] = {}
        self._inboxes: dict[RouteLink, _Inbox] = {}
        self._own: dict[Message, Tensor] = {}
        self._place: dict[tuple[Message, RouteLink], int] = {}
        self._sources: dict[Message, list[RouteLink]] = {}
        self._targets: dict[Message, list[RouteLink]] = {}
        self._sending: dict[tuple[int, ...], list[tuple[int, Pending]]] = defaultdict(list)
        self._turn: Mapping[Action, int] = {}
        self._after: Mapping[Message, int] = {}
        self._launched = self._num_posted = 0
        self._owners: RowOwners
        self._before: Callable[[], None]

    def has_open(self, routes: Routes) -> bool:
        """Return True if all edges of a step are open already."""
        return self._edges.keys() >= set(_edges(routes))

    def begin(self, routes: Routes, owners: RowOwners, before: Callable[[], None]) -> None:
        """Open the edges of a step, which waits for the ranks at their other ends.

        owners: which rank has which rows, the same at both ends. before: called before rows are sent to, or awaited
        from, another rank.
        """
        self._owners, self._before = owners, before
        self._turn, self._after = routes.turn, routes.after
        self._launched = self._num_posted = 0
        # Every rank opens its edges in one global order, so there is no circular wait.
        for link in sorted(set(_edges(routes)) - self._edges.keys()):
            made, taken, source, target = link
            self._edges[link] = self._comm.edge(f"edge/{made}-{taken}/{source}-{target}", source, target)
        self._own.clear()
        self._place = {
            (message, link): index
            for link, messages in (*routes.incoming.items(), *routes.outgoing.items())
            for index, message in enumerate(messages)
        }
        self._sources, self._targets = _by_message(routes.incoming), _by_message(routes.outgoing)
        self._inboxes = {
            link: _Inbox(self, self._edges[link], link, routes.incoming[link])
            for link in _edges(routes)
            if link in routes.incoming
        }

    def reached(self, launched: int) -> None:
        """Post the receives that may be posted once `launched` of this rank's actions are launched."""
        self._launched = launched
        for inbox in sorted(self._inboxes.values(), key=lambda inbox: inbox.after):
            inbox.post_ahead()

    def receive(self, message: Message) -> tuple[Tensor, int | None]:
        """Wait for this rank's rows of `message`; returns [rows, width] and a remote rank that sent some of them, or
        None. Each message is received once."""
        parts: list[tuple[MessageSlice, Tensor]] = []
        came_from = None
        for link in self._sources.get(message, ()):
            parcel = self._owners.parcel(message, link)
            if _is_own(link):
                rows = self._own.pop(message)
            else:
                self._before()
                rows = self._inboxes[link].take(self._place[message, link])
                came_from = link[2] if parcel.rows else came_from
            parts.append((parcel, rows))
        if came_from is not None:
            self._let_go(self._ranks_of_stage[message.producer.stage], self._turn[message.producer])
        rows = self._joined(message, parts)
        shares = self._owners.shares(message, self._comm.rank)
        if shares is not None:
            self._before()
            rows = _gathered(rows, shares, self._groups[message.consumer.stage], describe(message))
        return rows, came_from

    def send(self, message: Message, rows: Tensor) -> None:
        """Send [rows, width], this rank's rows of `message`, to the ranks that need them, and return at once; `rows`
        must not change afterwards."""
        links = self._targets.get(message, ())
        turn, what = self._turn[message.consumer], describe(message)
        sending = self._sending[self._ranks_of_stage[message.consumer.stage]]
        rows = rows.contiguous()
        for link in links:
            parcel = self._owners.parcel(message, link)
            own = rows if parcel.at_source is None else _some(rows, parcel.at_source)
            if tuple(own.shape) != (parcel.rows, parcel.width) or own.dtype != parcel.dtype:
                raise TransportError(
                    f"{what}: {list(own.shape)} of {own.dtype} were made, but the sizes of the samples say "
                    f"{[parcel.rows, parcel.width]} of {parcel.dtype}; the sizes index does not fit the model"
                )
            if _is_own(link):
                self._own[message] = own
                continue
            if not parcel.rows:
                continue
            self._before()
            edge, target, place = self._edges[link], link[3], self._place[message, link]
            if self._check:
                header = self.header(message, link, place).to(self._comm.device)
                sending.append((turn, edge.send(header, target, _HEADER_TAG + place % _TAGS, what)))
            sending.append((turn, edge.send(own, target, place % _TAGS, what)))

    def finish(self) -> None:
        """Wait until everything is sent. Raises TransportError if a message was never received."""
        for sending in self._sending.values():
            for _, pending in sending:
                pending.wait()
        self._sending.clear()
        left = [message for inbox in self._inboxes.values() for message in inbox.left()]
        self._inboxes.clear()
        if left:
            raise TransportError(f"{len(left)} messages were not used; the first is {describe(left[0])}")

    def header(self, message: Message, link: RouteLink, place: int) -> Tensor:
        """Return the header that both ends of a checked edge compare: int64 [5]."""
        parcel = self._owners.parcel(message, link)
        samples = hashlib.sha256(repr(message).encode()).digest()
        return torch.tensor(
            [self._comm.generation, place, parcel.rows, parcel.width, int.from_bytes(samples[:7], "little")]
        )

    def _joined(self, message: Message, parts: Sequence[tuple[MessageSlice, Tensor]]) -> Tensor:
        """Assemble the rows of a message that this rank receives from one or several source ranks."""
        for parcel, rows in parts:
            if parcel.at_target is None and (parcel.rows or len(parts) == 1):
                return rows
        boundary = self._owners.boundary(message)
        count = sum(parcel.rows for parcel, _ in parts)
        whole = torch.empty(count, boundary.width, dtype=boundary.dtype, device=self._comm.device)
        for parcel, rows in parts:
            if parcel.at_target is not None:
                whole[upload(parcel.at_target, whole.device)] = rows
        return whole

    def _let_go(self, ranks: tuple[int, ...], turn: int) -> None:
        """Free buffers sent to actions of `ranks` up to `turn`, which have run; all `ranks` run the same actions."""
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

    def __init__(self, transport: Transport, edge: Group, link: RouteLink, messages: tuple[Message, ...]) -> None:
        self._transport = transport
        self._edge = edge
        self._link = link
        self._messages = messages
        self._posted: dict[int, _Posted] = {}
        self._next = 0
        self._last = transport._look_ahead - 1

    @property
    def after(self) -> int:
        """See `Routes.after`: of the message that is posted next."""
        return self._transport._after[self._messages[self._next]] if self._next < len(self._messages) else 0

    def post_ahead(self) -> None:
        """Post the receives that may be posted although nobody needs them yet."""
        transport, last = self._transport, min(self._last, len(self._messages) - 1)
        while self._next <= last and self.after <= transport._launched and transport._num_posted < MOST_POSTED:
            self._post()

    def take(self, place: int) -> Tensor:
        while self._next <= place:
            self._post()
        self._last = max(self._last, place + self._transport._look_ahead)
        self.post_ahead()
        posted = self._posted.pop(place)
        if posted.pending is not None:
            self._transport._num_posted -= 1
            posted.pending.wait()
        if posted.header is not None:
            posted = self._after_header(place, posted)
        return posted.buffer

    def left(self) -> list[Message]:
        return [message for place, message in enumerate(self._messages) if place in self._posted or place >= self._next]

    def _post(self) -> None:
        transport = self._transport
        place, message = self._next, self._messages[self._next]
        parcel = transport._owners.parcel(message, self._link)
        buffer = torch.empty(parcel.rows, parcel.width, dtype=parcel.dtype, device=transport._comm.device)
        header = pending = None
        if parcel.rows and transport._check:
            header = torch.zeros(5, dtype=torch.int64, device=transport._comm.device)
            pending = self._receive(header, place, _HEADER_TAG)
        elif parcel.rows:
            pending = self._receive(buffer, place, 0)
        transport._num_posted += pending is not None
        self._posted[place] = _Posted(buffer, header, pending)
        self._next += 1

    def _after_header(self, place: int, posted: _Posted) -> _Posted:
        """Check the header before the rows are received: Gloo ends the process when a message exceeds its buffer."""
        assert posted.header is not None
        message = self._messages[place]
        wanted = self._transport.header(message, self._link, place)
        if not torch.equal(posted.header.cpu(), wanted):
            raise TransportError(
                f"{describe(message)} was awaited as message {place} of its edge, but something else came: "
                f"generation, place, rows, width and samples are {posted.header.tolist()} instead of {wanted.tolist()}"
            )
        self._receive(posted.buffer, place, 0).wait()
        return posted

    def _receive(self, tensor: Tensor, place: int, tag: int) -> Pending:
        message = self._messages[place]
        return self._edge.receive(tensor, self._link[2], tag + place % _TAGS, describe(message))


def _gathered(own: Tensor, shares: Sequence[Rows], group: Group, what: str) -> Tensor:
    """All-gather the rows of a message over the tensor-parallel ranks, each of which was sent a slice."""
    most = max(len(rows) for rows in shares)
    padded = own if len(own) == most else torch.cat([own, own.new_empty(most - len(own), own.shape[1])])
    everybody = own.new_empty(len(shares), *padded.shape)
    group.all_gather(everybody, padded.contiguous(), what).wait()
    parts = [everybody[rank, : len(rows)] for rank, rows in enumerate(shares)]
    order = np.concatenate(shares)
    if np.array_equal(order, np.arange(len(order))):
        return everybody.flatten(0, 1) if all(len(part) == most for part in parts) else torch.cat(parts)
    whole = own.new_empty(int(order.max()) + 1, own.shape[1])
    whole[upload(order, own.device)] = torch.cat(parts)
    return whole


def _some(rows: Tensor, at: Rows) -> Tensor:
    """Return the rows at these ascending indices; a view where the indices are consecutive."""
    if len(at) and at[-1] - at[0] + 1 == len(at):
        return rows[int(at[0]) : int(at[-1]) + 1]
    return rows[upload(at, rows.device)]


def _edges(routes: Routes) -> Iterator[RouteLink]:
    """Yield the edges between this rank and other ranks."""
    return (link for link in (*routes.incoming, *routes.outgoing) if not _is_own(link))


def _is_own(link: RouteLink) -> bool:
    return link[2] == link[3]


def _by_message(links: Mapping[RouteLink, Sequence[Message]]) -> dict[Message, list[RouteLink]]:
    found: dict[Message, list[RouteLink]] = {}
    for link, messages in links.items():
        for message in messages:
            found.setdefault(message, []).append(link)
    return found


def describe(message: Message) -> str:
    """Describe a message for error texts."""
    producer, consumer = message.producer, message.consumer
    more = "..." if len(message.samples) > 8 else ""
    return (
        f"{'rows' if producer.kind == 'F' else 'gradients'} of samples {list(message.samples[:8])}{more} from "
        f"{producer.kind} of stage {producer.stage} microbatch {producer.microbatch} to {consumer.kind} of stage "
        f"{consumer.stage} microbatch {consumer.microbatch}"
    )
