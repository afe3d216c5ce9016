"""The number of wild requests that a peer makes: in each run of the tests, and at night."""

GATE = 1000
NIGHTLY = 100_000
