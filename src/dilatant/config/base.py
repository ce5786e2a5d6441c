"""The base of every config section: typed, frozen, unknown keys refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the YAML file. Unknown keys are errors; values are checked as they are read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
