"""Each front door between real processes, for as long as one likes: idle, under load, beside a busy interpreter.

``python -m tests.soak await load --seconds 600`` ends with one line of JSON and exit code 0 if nothing was lost.
"""
