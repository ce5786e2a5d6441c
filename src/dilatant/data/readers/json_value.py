"""JSON parsing that reports any error as a SampleError of the record that holds the text."""

from __future__ import annotations

import json
from typing import Any

from dilatant.data.errors import SampleError


def json_value(text: str | bytes, place: str, what: str = "") -> Any:
    """Parse a JSON text, called `what` in the error of the record at `place`. Raises SampleError."""
    try:
        return json.loads(text)
    except RecursionError:
        problem = "nests too deep"
    except ValueError as error:  # invalid JSON or UTF-8, or integers of thousands of digits
        problem = f"is not valid JSON: {error}"
    raise SampleError(place, f"{what} {problem}".strip(), "correct or remove it")
