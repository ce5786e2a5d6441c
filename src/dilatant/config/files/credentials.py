"""Credentials of a run: secrets in the addresses of its config, kept apart from config.yaml in a file that only its
owner reads.

config.yaml, which people show to others, has the masked addresses. A resumed run gets the whole ones back.
"""

from __future__ import annotations

import json
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from dilatant.config.files.durable import write_durably
from dilatant.config.files.own_files import read_text
from dilatant.config.files.paths import texts_in
from dilatant.config.printable import masked

CREDENTIALS = "credentials.json"
_MODE = stat.S_IRUSR | stat.S_IWUSR


def mask_tree(tree: Any) -> dict[str, str]:
    """Mask all texts in a tree of plain values; return dotted key → text as it was, of those that changed."""
    secret = {key: parent[place] for key, parent, place in texts_in(tree) if masked(parent[place]) != parent[place]}
    for _, parent, place in texts_in(tree):
        parent[place] = masked(parent[place])
    return secret


def store_credentials(folder: Path, secret: dict[str, str]) -> None:
    """Write what `mask_tree` returned, for the owner's eyes; without secrets there is no file. Raises OSError."""
    if secret:
        write_durably(folder / CREDENTIALS, json.dumps(secret, indent=1) + "\n", _MODE)
    else:
        (folder / CREDENTIALS).unlink(missing_ok=True)


def restore_credentials(tree: Any, folder: Path) -> None:
    """Put stored secrets back into the tree of a config that `mask_tree` masked. A text stays if the file is missing,
    belongs to somebody else, or tells of another address."""
    stored: Any = {}
    with suppress(OSError, ValueError, RecursionError):
        stored = json.loads(read_text(folder / CREDENTIALS))
    for key, parent, place in texts_in(tree) if isinstance(stored, dict) else ():
        whole = stored.get(key)
        if isinstance(whole, str) and masked(whole) == parent[place]:
            parent[place] = whole
