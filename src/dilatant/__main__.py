"""`python -m dilatant` is `dilatant`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

INTERRUPTED_EXIT = 128 + signal.SIGINT


def fill_streams() -> None:
    """Where standard streams are closed, let them lead nowhere: what is printed is lost, and no file that is opened
    later takes their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # until the end


def main() -> None:
    """Entry point of the command. Ctrl-C ends it without a trace from the first import on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    fill_streams()
    try:
        from dilatant.cli.app import main as run
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED_EXIT) from None
    run()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but end the process at once where a module is being imported: an exception that passes
    through the beginning of a C++ extension aborts the process."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            atexit._run_exitfuncs()
            os._exit(INTERRUPTED_EXIT)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
