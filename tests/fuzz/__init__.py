"""Fuzzing of every reader of input from others: ``python -m tests.fuzz --seconds 60``, or ``make fuzz``.

Readers of Python run under atheris, in the lane ``fuzz`` of ``tests/lanes.py``. Programs of C stand in ``native/fuzz``, and
run under libFuzzer if there is clang, otherwise under a small driver of this project's, in both cases with ASan and UBSan.

To add a reader: a :class:`~tests.fuzz.readers.Reader` in ``READERS``, with examples, which every run begins with.
``python -m tests.fuzz.corpora`` writes them into ``tests/fuzz/corpus/NAME``, too, where older ones stay. An input that broke
a reader goes there once it is mended: a short test in ``make pytest`` reads everything that is kept.
"""
