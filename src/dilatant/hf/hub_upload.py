"""Upload of an export to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dilatant.config.errors import UserError, as_user_error, one_line
from dilatant.hf.export import FILES

_WEIGHTS = ["*.safetensors", "*.safetensors.index.json", "*.distcp", "*.metadata"]
"""Files that an upload removes from the repository if the export has them not: shards of an earlier one."""


def check_push(repository: str) -> None:
    """Raise UserError if an upload cannot begin: without a token, or for an impossible name."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    with as_user_error("--push-to-hub", HFValidationError):
        validate_repo_id(repository)
    if get_token() is None:
        raise UserError("--push-to-hub needs a token with write access: `hf auth login`, or set HF_TOKEN")


def push(folder: Path, repository: str, step: int, api: Any = None) -> str:
    """Upload an export, and return the repository's address. A new repository is private; an existing one stays as it
    is. api: of huggingface_hub. Raises UserError."""
    from huggingface_hub import HfApi

    api = api or HfApi()
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id,
            folder_path=folder,
            commit_message=f"Step {step}, exported by Dilatant",
            ignore_patterns=[FILES],
            delete_patterns=_WEIGHTS,
        )
    except Exception as error:
        is_refused = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
        remedy = "`hf auth login` with a token that may write there" if is_refused else "the same command tries again"
        raise UserError(
            f"{str(folder)!r} is exported, but could not be pushed to {repository!r}: {one_line(error)}; {remedy}"
        ) from None
    return str(address)
