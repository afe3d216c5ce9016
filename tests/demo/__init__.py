"""The demo as its user meets it: whole processes, started, watched and killed."""

import os

# As the demo does for its workers, and before numpy is imported: threads of two matrix products that wait for each other
# on busy cores make a test ten times slower.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
