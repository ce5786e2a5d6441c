"""Ranks that have parts of the tokens between regions: each row is one rank's, in every tensor that is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilatant.models.core.random_draws import KeyedDraws, SampleLayout
from dilatant.models.core.sequence_parallel import TokenShards


class OneOf:
    """Stands for the other ranks where nothing is exchanged."""

    rows_of_piece: int | None = None

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index

    def all_gather(self, own: Any, what: str) -> Any:
        raise AssertionError(what)

    reduce_scatter = all_gather


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("items", "tokens"), [(1, 7), (1, 1), (1, 2), (3, 5), (5, 1)])
def test_shares_are_equally_long_and_together_all_rows(items: int, tokens: int, size: int) -> None:
    hidden = torch.arange(items * tokens * 2.0).view(items, tokens, 2) + 1
    shares = [TokenShards(OneOf(size, index)).split(hidden) for index in range(size)]
    assert {share.shape for share in shares} == {(1, -(-items * tokens // size), 2)}
    together = torch.cat(shares, 1)[0]
    assert torch.equal(together[: items * tokens], hidden.flatten(0, 1))
    assert not together[items * tokens :].any()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_share_drops_what_the_whole_drops_there(packed: bool, size: int) -> None:
    lengths = (3, 4) if packed else (2, 1)
    items, tokens = (1, 7) if packed else (3, 5)
    whole, _ = KeyedDraws(1, ["a", "b"], SampleLayout(packed, lengths)).uniform(
        "x/0", (items, tokens, 6), torch.device("cpu")
    )
    rows = []
    for index in range(size):
        shards = TokenShards(OneOf(size, index))
        draws = KeyedDraws(1, ["a", "b"], SampleLayout(packed, lengths), shards=shards)
        outside, each = draws.uniform("x/0", (items, tokens, 6), torch.device("cpu"))
        assert torch.equal(outside, whole)
        share = shards.split(torch.zeros(items, tokens, 2))
        own, of_share = draws.uniform("x/0", (*share.shape[:2], 6), torch.device("cpu"))
        assert of_share == each
        rows.append(own[0])
    assert torch.equal(torch.cat(rows)[: items * tokens], whole.flatten(0, 1))


def test_a_block_may_drop_the_batch_dimension_of_one() -> None:
    hidden = torch.arange(14.0).view(1, 7, 2)
    parts = torch.stack([TokenShards(OneOf(2, index)).split(hidden)[0] for index in range(2)])

    class Gathering(OneOf):
        def all_gather(self, own: Any, what: str) -> Any:
            assert torch.equal(own, parts[0])
            return parts, Waited()

    class Waited:
        def wait(self) -> None: ...

    shards = TokenShards(Gathering(2, 0))
    own = shards.split(hidden)
    assert torch.equal(shards.gather(own), hidden)
    assert torch.equal(shards.gather(own.squeeze(0)), hidden.squeeze(0))


def test_a_recomputed_block_has_the_shares_of_its_own_microbatch() -> None:
    shards = TokenShards(OneOf(2, 0))
    shards.split(torch.zeros(1, 6, 2))
    _, again = shards.recompute_contexts()
    shards.split(torch.zeros(1, 10, 2))
    with again:
        assert shards.is_share((1, 3, 8))
    assert not shards.is_share((1, 3, 8))
    assert shards.is_share((1, 5, 8))


class Echo(OneOf):
    """All ranks have what this one has; `log` says what is started and awaited when."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(2, 0)
        self.log = log
        self.rows_of_piece = 1

    def all_gather(self, own: Any, what: str) -> Any:
        return torch.stack([own, own]), self._started(what)

    def reduce_scatter(self, parts: Any, what: str) -> Any:
        return 2 * parts[0], self._started(what)

    def _started(self, what: str) -> Any:
        number = sum(entry.startswith("start") for entry in self.log)
        self.log.append(f"start {number}")
        return Work(self.log, f"wait {number}")


class Work:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(self.name)


def logged(log: list[str], name: str) -> Any:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            log.append(name)
            return 3 * value

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            log.append(name)
            return 3 * gradient

    return Product.apply


def test_products_are_computed_while_the_next_piece_travels() -> None:
    log: list[str] = []
    shards = TokenShards(Echo(log))
    own = shards.split(torch.ones(1, 4, 2)).requires_grad_()  # two rows of each rank: two pieces
    hidden, (product,) = shards.gather_products(own, [logged(log, "product")])
    assert log == ["start 0", "start 1", "wait 0", "product", "wait 1", "product"]
    assert hidden.shape == product.shape == (1, 4, 2)
    log.clear()
    product.sum().backward()
    # What leaves first has its product behind it to hide behind; both are awaited at the end.
    assert log == ["product", "start 0", "product", "start 1", "wait 1", "wait 0"]
    log.clear()
    left = shards.sum_products(hidden.detach().requires_grad_(), logged(log, "product"))
    assert log == ["product", "start 0", "product", "start 1", "wait 0", "wait 1"]
    log.clear()
    left.sum().backward()
    assert log == ["start 0", "start 1", "wait 0", "product", "wait 1", "product"]


def test_what_still_travels_is_awaited_where_a_product_fails() -> None:
    log: list[str] = []
    shards = TokenShards(Echo(log))
    own = shards.split(torch.ones(1, 4, 2))
    with pytest.raises(ZeroDivisionError):
        shards.gather_products(own, [lambda hidden: hidden / (1 // 0)])
    assert log == ["start 0", "start 1", "wait 0", "wait 1"]
