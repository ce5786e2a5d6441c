"""What ranks of tests import, for the fork server: also the modules of transformers that building a model imports."""

from __future__ import annotations

import cases.parallel_cases
import harness.checked_steps
from cases.engine_case import CASE, build_model

__all__ = ["cases", "harness"]

build_model(CASE, "meta")
