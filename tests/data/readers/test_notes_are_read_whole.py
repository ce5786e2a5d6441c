"""Notes of data workers, read by another process while they are written, or after their writer was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dilatant.data.workers.pool_wire import NOTE_BYTES, Arena, read_note, write_note

READS = 3_000

WRITER = """
import mmap, sys
from itertools import count
from dilatant.data.workers.pool_wire import NOTE_BYTES, write_note

with memoryview(mmap.mmap(int(sys.argv[1]), NOTE_BYTES)) as note:
    for ticket in count(1):
        write_note(note, ticket, ticket + 0.5, f"{ticket}," * (ticket % 40))
"""


def test_notes_are_whole_while_their_writer_never_stops() -> None:
    arena = Arena(NOTE_BYTES, NOTE_BYTES)
    package = str(Path(sys.modules["dilatant"].__path__[0]).parent)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(arena.fd)], pass_fds=[arena.fd], env={"PYTHONPATH": package}
    )
    try:
        newest, seen, unknown = 0, 0, 0
        with arena.view(0, NOTE_BYTES) as buffer:
            while seen < READS:
                assert writer.poll() is None
                note = read_note(buffer)
                if note is None or note.ticket < 1:
                    unknown += newest > 0
                    continue
                assert note.since == note.ticket + 0.5
                assert note.sample == f"{note.ticket}," * (note.ticket % 40)
                assert note.ticket >= newest
                seen += note.ticket > newest
                newest = note.ticket
        assert unknown < READS / 100  # the writer is not faster eight times in a row, but for a pause of the reader
    finally:
        writer.kill()
        writer.wait()
        arena.close()


class _Seen:
    """A buffer whose reads return the given contents in turn."""

    def __init__(self, *contents: bytearray) -> None:
        self.contents = iter(contents)

    def __getitem__(self, where: slice) -> bytes:
        return bytes(next(self.contents)[where])


def test_a_note_older_than_one_that_was_half_replaced_is_not_given() -> None:
    """The reader sees the newest copy while it is replaced, and beside it the note before."""
    first, second, later = bytearray(NOTE_BYTES), bytearray(), bytearray()
    write_note(memoryview(first), 1, 0.5)
    second += first
    write_note(memoryview(second), 2, 0.5)
    later += second
    write_note(memoryview(later), 3, 0.5)
    replaced = bytearray(second)
    replaced[next(at for at in range(NOTE_BYTES) if first[at] != second[at])] ^= 0xFF
    note = read_note(_Seen(replaced, later))  # type: ignore[arg-type]
    assert note is not None
    assert note.ticket == 3


@pytest.mark.parametrize("before", [1, 2])
def test_a_writer_killed_in_mid_note_leaves_the_note_before(before: int) -> None:
    old = bytearray(NOTE_BYTES)
    for number in range(before):
        write_note(memoryview(old), 70 + number, 3.25, "first" * 30)
    new = bytearray(old)
    write_note(memoryview(new), 80, 4.75, "second" * 20)
    changed = [at for at in range(NOTE_BYTES) if old[at] != new[at]]
    for cut in range(changed[0], changed[-1] + 1):
        for torn in (new[:cut] + old[cut:], old[:cut] + new[cut:]):
            note = read_note(memoryview(torn))
            assert note == ((80, 4.75, "second" * 20) if torn == new else (69 + before, 3.25, "first" * 30))
            write_note(memoryview(torn), 90, 5.5, "third")  # by who takes its place
            assert read_note(memoryview(torn)) == (90, 5.5, "third")


def test_a_long_name_is_cut_and_no_note_is_none() -> None:
    buffer = memoryview(bytearray(NOTE_BYTES))
    assert read_note(buffer) is None
    write_note(buffer, 1, 2.0, "\N{SNOWMAN}" * 1000)
    note = read_note(buffer)
    assert note is not None
    assert note.sample.rstrip("\N{REPLACEMENT CHARACTER}") == "\N{SNOWMAN}" * 160
