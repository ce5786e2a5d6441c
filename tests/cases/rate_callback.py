"""A run in Python whose callback lowers the learning rate once, and logs each step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dilatant

FACTOR, AFTER = 0.25, 3


class LowersOnce:
    """Callback that changes the rate after step `AFTER`, and never again."""

    def on_step(self, run: Any, metrics: Any) -> None:
        run.log({"heard": run.step})
        if run.step == AFTER:
            run.learning_rate_factor = FACTOR


def train_with_callback() -> None:
    """Train ./config.yaml."""
    sys.exit(dilatant.train(Path("config.yaml"), callbacks=[LowersOnce()], overwrite=True).exit_code)
