from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dilatant.config.errors import UserError
from dilatant.data.sample import EncodedSample


@dataclass(frozen=True, slots=True)
class Request:
    draw: int
    index: int
    parts: frozenset[str]
    dataset: str = "train"
    nbytes: int = 0


class Source(Protocol):
    def ask(self, requests: Sequence[Request]) -> None: ...
    def take(self, dataset: str, draw: int) -> EncodedSample | UserError: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...
