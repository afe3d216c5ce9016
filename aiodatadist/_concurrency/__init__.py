"""Waiting, written once: completions, residents of a loop, loop threads, queues of waiting tasks, signals."""
