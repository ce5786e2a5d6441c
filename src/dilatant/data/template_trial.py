"""Compiles and renders a chat template in a process that can be ended; run as a program, it imports jinja2 alone.

Standard input: the template and its special tokens as JSON. Arguments: the memory it may take, in bytes, and the
seconds of a processor. Exit code: 0 when the template has come to an end, were it by an error, and `TOO_LARGE` when it
lacks memory; too many seconds end it by SIGXCPU. The environment offers what transformers' offers, so what runs without
end there does so here.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import sys
from typing import Any, NoReturn

TOO_LARGE = 3


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _run(template: str, special_tokens: dict[str, str]) -> None:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **options)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": str}
    untagged = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
    contents: list[Any] = ["a", [{"type": "text", "text": "a"}]]
    for content in contents:
        with contextlib.suppress(ValueError, TypeError, ArithmeticError, LookupError, AttributeError):
            environment.from_string(untagged).render(
                messages=[{"role": "user", "content": content}], add_generation_prompt=False, **special_tokens
            )


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    most, seconds = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    try:
        _run(*asked)
    except MemoryError:
        sys.exit(TOO_LARGE)
    except Exception:
        sys.exit(0)
