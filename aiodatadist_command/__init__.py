"""The program ``aiodatadist``, outside the package: Ctrl-C is quiet while that is imported, which takes up to a second."""

__all__ = ["main"]


def main() -> int:
    """Run the command, and return its exit code: 130 after Ctrl-C, as a shell reports it."""
    try:
        from aiodatadist._cli import main as run  # noqa: PLC0415 - all that takes time
    except KeyboardInterrupt:
        return 130
    return run()
