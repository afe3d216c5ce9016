"""Proofs of the key: its owner can prove it once, for one link, in one direction."""

from __future__ import annotations

import hmac
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist._wire.auth import Side, is_proof, proof
from aiodatadist._wire.frames import encode
from aiodatadist._wire.messages import Hello, Proof
from tests.unit.wire.examples import hello, hellos

CLIENT, SERVER = hello(1, has_key=True), hello(2, has_key=True)
SIDES: list[Side] = ["client", "server"]


def test_proof_is_hmac_sha256_over_both_hellos_as_they_travelled() -> None:
    said = b"aiodatadist link 1 client" + encode(CLIENT) + encode(SERVER)
    assert proof(b"key", "client", CLIENT, SERVER) == hmac.new(b"key", said, sha256).hexdigest()


@given(st.binary(min_size=1), hellos, hellos, st.sampled_from(SIDES))
def test_proof_is_accepted_by_who_has_the_same_key(key: bytes, client: Hello, server: Hello, side: Side) -> None:
    mac = proof(key, side, client, server)
    assert Proof(mac=mac).mac == mac, "it fits its message"
    assert is_proof(mac, key, side, client, server)


@given(st.binary(min_size=1, max_size=32), st.binary(min_size=1, max_size=32))
def test_other_key_gives_another_proof(mine: bytes, theirs: bytes) -> None:
    same = mine.ljust(64, b"\0") == theirs.ljust(64, b"\0")  # HMAC pads keys with zeros
    assert is_proof(proof(theirs, "client", CLIENT, SERVER), mine, "client", CLIENT, SERVER) == same


def test_proof_of_one_side_is_none_of_the_other() -> None:
    assert not is_proof(proof(b"key", "client", CLIENT, SERVER), b"key", "server", CLIENT, SERVER)


@pytest.mark.parametrize(
    "changed",
    [
        hello(1, has_key=True, nonce="f" * 64),
        hello(1, has_key=True, instance="f" * 64),
        hello(3, has_key=True),
        hello(1, has_key=True, role=1),
    ],
)
def test_proof_for_one_conversation_is_none_for_another(changed: Hello) -> None:
    assert not is_proof(proof(b"key", "client", CLIENT, SERVER), b"key", "client", changed, SERVER)
    assert not is_proof(proof(b"key", "client", SERVER, CLIENT), b"key", "client", CLIENT, SERVER)


def test_key_is_not_in_the_proof() -> None:
    assert b"key".hex() not in proof(b"key", "client", CLIENT, SERVER)
