"""Answers to requests: how a data worker replies and how a rank decodes the reply, for local pools and for Ray."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping

import numpy as np

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.sample import EncodedSample, Sample
from dilatant.data.text.encoding import Encoding
from dilatant.data.workers.ordered_map import UnreadableFileError, WorkerError
from dilatant.data.workers.pool import Dataset, SampleRequest, make
from dilatant.data.workers.pool_wire import Encoded, Failed, PoolRefused, lay_out, unpack_sample

PoolOutcome = EncodedSample | UserError | WorkerError
"""Result of a request, as the rank receives it."""


def answer(
    ticket: int,
    request: SampleRequest,
    datasets: Mapping[str, Dataset],
    encoding: Encoding,
    read: Callable[[Sample], None] = lambda sample: None,
) -> tuple[Encoded | PoolRefused | Failed, list[np.ndarray]]:
    """Make a sample. Return the reply, and the arrays to send with it if it is `Encoded`. read: see `make`. Raises
    nothing."""
    try:
        sample = make(request, datasets, encoding, read)
        places, arrays, nbytes = lay_out(sample)
        sizes = {unit: int(tokens) for unit, tokens in sample.sizes.items()}
        return Encoded(ticket, sample.id, sizes, places, nbytes, sample.made_seconds), arrays
    except UnreadableFileError as error:
        return Failed(ticket, str(error), is_withheld=True), []
    except SampleError as error:
        return PoolRefused(ticket, error.problem, error.sample, error.remedy), []
    except UserError as error:
        return PoolRefused(ticket, str(error)), []
    except BaseException:
        return Failed(ticket, f"a data worker failed:\n{traceback.format_exc()}"), []


def outcome_of(message: Encoded | PoolRefused | Failed, draw: int, buffer: memoryview) -> PoolOutcome:
    """Decode the reply to request `draw`. buffer: holds the arrays of an `Encoded` sample, which are copied. Raises
    ProtocolError if they do not fit."""
    if isinstance(message, Encoded):
        return unpack_sample(message, draw, buffer)
    if isinstance(message, Failed):
        return (UnreadableFileError if message.is_withheld else WorkerError)(message.problem)
    if message.sample:
        return SampleError(message.sample, message.problem, message.remedy)
    return UserError(message.problem)
