"""The ABI gate: are native/acl.h and native/hccl.h what the vendor's libraries really export?

There is no such hardware here, so the claim that the bindings fit it rests on a compiler. Every function, type,
constant, struct and field that we declare becomes a line of a generated C++ unit that includes the vendor's headers;
each error is carried back to the declaration that caused it.

    declarations.py     our headers as data, with the sizes and values that cffi computes from them
    unit.py             declarations -> lines of C++
    compiler.py         g++, its errors, and the parameter names it sees
    check.py            errors -> findings
    findings.py         what was found, and the report
    vendor_headers.py   where the vendor's headers come from; they are never part of this repository

``make abi`` runs all of it. A plain ``pytest`` skips what needs the vendor's headers when they were never fetched.
"""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = (REPOSITORY / "native" / "acl.h", REPOSITORY / "native" / "hccl.h")


class CannotCheck(Exception):
    """The gate could not be run; the message is one line that says what is missing."""
