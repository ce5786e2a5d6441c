"""Template trial: compile and render a chat template in a process that can be killed. Imports only jinja2.

Standard input: the template and its special tokens as JSON. Arguments: memory limit in bytes and CPU seconds. Exit
code: 0 if the template finished, even with an error; `TOO_LARGE` if memory ran out; `RUNAWAY` if it exceeded a limit of
`template_engine`, which standard output names. Exceeding the CPU seconds ends the process by SIGXCPU.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from typing import Any

from dilatant.data.text.template_engine import RunawayTemplate, render

TOO_LARGE, RUNAWAY = 3, 4


def _run(template: str, special_tokens: dict[str, str]) -> None:
    contents: list[Any] = ["a", [{"type": "text", "text": "a"}]]
    for content in contents:
        with contextlib.suppress(ValueError, TypeError, ArithmeticError, LookupError, AttributeError):
            messages = [{"role": "user", "content": content}]
            render(template, "", messages, 1, {"add_generation_prompt": False, **special_tokens})


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    most, seconds = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    try:
        _run(*asked)
    except MemoryError:
        sys.exit(TOO_LARGE)
    except RunawayTemplate as error:
        print(error)
        sys.exit(RUNAWAY)
    except Exception:
        sys.exit(0)
