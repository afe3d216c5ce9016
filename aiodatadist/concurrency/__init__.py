"""Waiting, written once: completions, residents of a loop, loop threads, lines of waiters, signals."""
