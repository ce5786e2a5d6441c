"""Questions to vLLM, in a process of a Python that has it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import vllm_reader

VARIABLE = "DILATANT_VLLM_PYTHON"
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def ask_vllm(unchecked: str) -> Callable[[dict[str, Any]], Any]:
    """Return a function from a request (see `vllm_reader`) to vLLM's answer, or skip the test. unchecked: what then is
    not checked."""
    python = os.environ.get(VARIABLE) or (sys.executable if importlib.util.find_spec("vllm") else None)
    if python is None:
        pytest.skip(f"vLLM is absent ({VARIABLE} names a Python that has it); not checked: {unchecked}")

    def ask(request: dict[str, Any]) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder, "answer.json")
            command = [python, vllm_reader.__file__, str(answer)]
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            ended = subprocess.run(
                command,
                input=json.dumps(request),
                env=environment | QUIET,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=500,
            )
            assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
            return json.loads(answer.read_text(encoding="utf-8"))

    return ask
