"""Shared batches of a stream: one rank of a machine reads and sends batches without media, over CPU groups of two
ranks.

A rank that feeds media reads for itself. The others need only ids, labels and sizes, and cores are scarce: they take
them from the first rank of their machine that reads. Batches travel ahead of the steps, in threads.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.comm.group import Group, Pending
from dilatant.config.errors import UserError
from dilatant.data.order.sampler import SamplerState
from dilatant.data.sample import EncodedSample
from dilatant.data.workers.loader import GlobalBatch, Loader
from dilatant.data.workers.prefetch import Prefetcher


class SharedBatches:
    """Access of this rank to its batches; made by all ranks together.

    feeds_media: this rank runs the first stage of an encoder.
    """

    def __init__(self, comm: Comm, feeds_media: bool) -> None:
        self._comm = comm
        places = list(zip(comm.machines, all_gather_object(comm, feeds_media)))
        self.source = source_of(places, comm.rank)
        self._receivers = {
            receiver: self._group(comm.rank, receiver)
            for receiver in range(comm.size)
            if receiver != source_of(places, receiver) == comm.rank
        }
        self._from = self._group(self.source, comm.rank) if self.source != comm.rank else None

    @contextmanager
    def open(self, open_loader: Callable[[], Loader]) -> Iterator[Iterator[GlobalBatch]]:
        """Open the batches of `open_loader`'s loader, which is opened only if this rank reads itself.

        A rank that leaves this context without an error leaves it together with all others.
        """
        if self._from is not None:
            with _ahead(_received(self._from, self.source)) as batches:
                yield batches
            return
        with open_loader() as loader:
            if not self._receivers:
                yield loader
                return
            with _ahead(_broadcast(loader, self._receivers)) as batches:
                yield batches

    def _group(self, source: int, receiver: int) -> Group:
        return self._comm.group(f"batches/{source}-{receiver}", (source, receiver), torch.device("cpu"))


def source_of(places: list[tuple[str, bool]], rank: int) -> int:
    """Return the rank that reads for `rank`. places: by rank, its machine and whether it feeds media."""
    machine, feeds_media = places[rank]
    if feeds_media:
        return rank
    beside = [other for other, (name, _) in enumerate(places) if name == machine]
    return min((other for other in beside if places[other][1]), default=beside[0])


@contextmanager
def _ahead(source: Generator[GlobalBatch]) -> Iterator[Iterator[GlobalBatch]]:
    batches = Prefetcher(source, "dilatant-batches")
    yield _timed(batches)
    # Not after an error: the thread may then wait for a lost rank.
    batches.close()


def _timed(batches: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield replace(batch, wait_seconds=time.perf_counter() - began)


def _broadcast(loader: Iterator[GlobalBatch], receivers: dict[int, Group]) -> Generator[GlobalBatch]:
    """Yield the loader's batches, and send each of them, and then how they end, to `receivers`."""
    sending: list[Pending] = []

    def send(batch: GlobalBatch | None, error: str | None = None) -> None:
        message = batch_to_bytes(batch, error)
        for pending in sending:
            pending.wait()
        sending[:] = [p for receiver, group in receivers.items() for p in _send(group, receiver, message)]

    try:
        for batch in loader:
            send(batch)
            yield batch
    except (UserError, GeneratorExit) as reason:
        send(None, str(reason) if isinstance(reason, UserError) else None)
        raise
    else:
        send(None)
    finally:
        for pending in sending:  # nothing would wait for these later
            pending.wait()


def _send(group: Group, receiver: int, message: bytes) -> Iterator[Pending]:
    yield group.send(torch.tensor([len(message)]), receiver, 0, "the length of a batch")
    yield group.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), receiver, 1, "a batch")


def _received(group: Group, source: int) -> Generator[GlobalBatch]:
    """Yield what `_broadcast` on rank `source` sends; closing this waits until that rank has finished, too."""
    try:
        while (batch := _receive(group, source)) is not None:
            yield batch
    except GeneratorExit:
        with suppress(UserError):
            while _receive(group, source) is not None:
                pass
        raise


def _receive(group: Group, source: int) -> GlobalBatch | None:
    length = torch.zeros(1, dtype=torch.int64)
    group.receive(length, source, 0, "the length of a batch").wait()
    message = torch.empty(int(length), dtype=torch.uint8)
    group.receive(message, source, 1, "a batch").wait()
    return batch_from_bytes(message.numpy().tobytes())


def batch_to_bytes(batch: GlobalBatch | None, error: str | None = None) -> bytes:
    """Serialise all of a batch but media and packed rows; or the end of data (None), or an error text."""
    header: dict[str, Any] = {"error": error}
    arrays: list[np.ndarray] = []
    if batch is not None:
        header |= {
            "samples": [[s.id, len(s.input_ids), dict(s.sizes)] for s in batch.samples],
            "position": batch.position.to_json(),
            "epoch": batch.epoch,
            "problems": batch.problems,
        }
        arrays = [s.input_ids for s in batch.samples] + [s.labels for s in batch.samples]
    text = json.dumps(header).encode()
    body = np.concatenate(arrays).astype("<i8").tobytes() if arrays else b""
    return struct.pack("<q", len(text)) + text + body


def batch_from_bytes(message: bytes) -> GlobalBatch | None:
    """Read what `batch_to_bytes` returned. Raises UserError if that is an error."""
    (length,) = struct.unpack_from("<q", message)
    header = json.loads(message[8 : 8 + length])
    if header["error"] is not None:
        raise UserError(header["error"])
    if "samples" not in header:
        return None
    cuts = np.cumsum([count for _, count, _ in header["samples"]])
    ids, labels = np.frombuffer(message, "<i8", offset=8 + length).reshape(2, -1).astype(np.int64)
    samples = tuple(
        EncodedSample(name, own_ids, own_labels, {}, sizes)
        for (name, _, sizes), own_ids, own_labels in zip(
            header["samples"], np.split(ids, cuts[:-1]), np.split(labels, cuts[:-1]), strict=True
        )
    )
    position = SamplerState.from_json(header["position"])
    return GlobalBatch(samples, position, header["epoch"], tuple(header["problems"]))
