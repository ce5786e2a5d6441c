"""YAML from outside: whatever is wrong with a text is one kind of error."""

from __future__ import annotations

from typing import Any

import yaml


def read_yaml(text: str) -> Any:
    """The plain values of a document.

    Raises yaml.YAMLError, also where the parser fails in ways of its own: nesting without end, numbers of thousands of
    digits, days that no month has, tags that their text does not fit.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise
    except Exception as error:
        problem = "nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise yaml.YAMLError(problem or type(error).__name__) from None
