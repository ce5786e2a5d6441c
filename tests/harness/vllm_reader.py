"""Program for a Python that has vLLM: reads a request of JSON from standard input, and writes an answer to a file.

`names`: architecture → keys of a checkpoint. Answers with the names that the loader of vLLM's class gives them.
`prompts`: tokens and the path of an image or null, for the model in `folder`. Answers with the log-probabilities of
each prompt's tokens but the first, after the image took the place of its one token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def names(request: dict[str, Any]) -> dict[str, list[str | None]]:
    from vllm import ModelRegistry

    found = {}
    for architecture, keys in request["names"].items():
        mapper = ModelRegistry.models[architecture].load_model_cls().hf_to_vllm_mapper
        found[architecture] = [mapper.map_name(key) for key in keys]
    return found


def scores(request: dict[str, Any]) -> list[list[float]]:
    from PIL import Image
    from vllm import LLM, SamplingParams

    llm = LLM(request["folder"], dtype="float32", enforce_eager=True, seed=0, **request["settings"])
    prompts: list[Any] = [
        {"prompt_token_ids": ids, **({"multi_modal_data": {"image": Image.open(image)}} if image else {})}
        for ids, image in request["prompts"]
    ]
    found = []
    for output in llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)):
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found.append([likely[token].logprob for token, likely in pairs])
    return found


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    answer = names(asked) if "names" in asked else scores(asked)
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")
