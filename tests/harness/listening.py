"""What a process listens on, as the kernel lists its sockets."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

LISTEN = "0A"


def listening(process: int) -> dict[str, str]:
    """Addresses that a process listens on, by the inode of the socket."""
    own = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except FileNotFoundError:
            continue  # closed meanwhile
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in own:
                found[fields[9]] = _address(fields[1].split(":")[0])
    return found


def _address(text: str) -> str:
    """The kernel writes words of four bytes in the machine's order."""
    words = [int.from_bytes(bytes.fromhex(text[at : at + 8]), "little") for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(word.to_bytes(4, "big") for word in words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
