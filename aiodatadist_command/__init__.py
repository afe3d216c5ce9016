"""The program ``aiodatadist``, outside the package: Ctrl-C is quiet while that is imported, which takes up to a second."""

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command, and return its exit code: 130 after Ctrl-C, as a shell reports it."""
    try:
        if sys.argv[1:2] == ["demo"] and sys.stderr.isatty():  # at once: the imports take longer on a busy machine
            print("aiodatadist demo: starting", file=sys.stderr, flush=True)
        from aiodatadist._cli import main as run  # noqa: PLC0415 - all that takes time
    except KeyboardInterrupt:
        return 130
    return run()
