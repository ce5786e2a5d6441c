"""Pools that end with the test."""

from __future__ import annotations

import pytest

from cases.pool_cases import ENCODING, PLENTY
from dilatant.data.workers.pool_owner import PoolOwner
from dilatant.data.workers.pool_source import PoolSource


@pytest.fixture
def pool(request: pytest.FixtureRequest):
    """Opens pools, and sources of them, that end with the test."""
    opened = []

    def open_pool(datasets, workers=2, decode_seconds=60.0):
        datasets = datasets if isinstance(datasets, dict) else {"train": datasets}
        owner = PoolOwner(datasets, ENCODING, workers, decode_seconds)
        opened.append(owner)

        def source(budget=PLENTY, **settings):
            opened.append(PoolSource(owner.address, budget, **settings))
            return opened[-1]

        return owner, source

    yield open_pool
    for each in reversed(opened):
        each.close()
