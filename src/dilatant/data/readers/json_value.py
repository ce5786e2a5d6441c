"""JSON text as a Python value; whatever is wrong with it is an error of the record that holds it."""

from __future__ import annotations

import json
from typing import Any

from dilatant.data.errors import SampleError


def json_value(text: str | bytes, place: str, what: str = "") -> Any:
    """The value that a JSON text holds, which is `what` of the record at `place`. Raises SampleError."""
    try:
        return json.loads(text)
    except RecursionError:
        problem = "nests too deep"
    except ValueError as error:  # wrong JSON, bytes that are no UTF-8, integers of thousands of digits
        problem = f"is not valid JSON: {error}"
    raise SampleError(place, f"{what} {problem}".strip(), "correct or remove it")
