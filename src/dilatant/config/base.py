"""Base class of the config sections: typed, frozen, with unknown keys refused."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+]?\d{1,2}")


class Section(BaseModel):
    """A part of the YAML file. Unknown keys are errors; values are checked when read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _read_whole_numbers(cls, given: Any, info: ValidationInfo) -> Any:
        """Convert whole numbers in exponent notation: YAML reads 1e3 as a text."""
        if not isinstance(given, str) or not _EXPONENT.fullmatch(given):
            return given
        field = cls.model_fields[str(info.field_name)]
        is_whole = field.annotation in (int, int | None) and float(given).is_integer()
        return int(float(given)) if is_whole else given
