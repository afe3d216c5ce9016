"""TLS without I/O: two ends prove their certificates, and every refusal has its reason at both ends."""

from __future__ import annotations

import ssl
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from aiodatadist._config.certificates import Certificates, read_certificates
from aiodatadist._wire.frames import encode
from aiodatadist._wire.messages import Ping, Refuse
from aiodatadist._wire.tls_pipe import MAX_HANDSHAKE, TlsPipe
from aiodatadist.errors import AuthError, IncompatiblePeer, LinkError, ProtocolError
from tests.certificates import DAY, Authority, Pair, tls_folder, uri_of
from tests.unit.wire.examples import hello

OURS, OTHER = Authority(0), Authority(1)
Make = Callable[..., Certificates]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that makes the certificates of a cluster."""
    numbers = count()

    def made(
        cluster_id: int, issuer: Authority = OURS, trusts: Authority = OURS, own: Pair | None = None
    ) -> Certificates:
        folder = tls_folder(tmp_path / str(next(numbers)), own or issuer.for_cluster(cluster_id), trusts)
        return read_certificates(folder)

    return made


class Ends:
    """Two ends that shake hands, the client first, and what came of it at each."""

    def __init__(self, client: Certificates, server: Certificates, expected: int = 2) -> None:
        self.client, self.server = TlsPipe("client", client, expected), TlsPipe("server", server)
        self.errors: dict[TlsPipe, LinkError] = {}
        self.left = b""
        """Bytes that the last step of the server wants to send."""
        is_complete = dict.fromkeys((self.client, self.server), False)
        data = b""
        for _ in range(2):
            for end in (self.client, self.server):
                if end not in self.errors and not is_complete[end]:
                    try:
                        is_complete[end] = end.shake(data)
                    except LinkError as error:
                        self.errors[end] = error
                data = end.outgoing()
        self.left = data

    def reason(self, end: TlsPipe) -> str:
        return str(self.errors[end].args[0])


def test_two_ends_prove_their_certificates_and_exchange_bytes(make: Make) -> None:
    ends = Ends(make(1), make(2))
    assert ends.errors == {}
    assert (ends.client.is_proved, ends.server.is_proved) == (True, True)
    one, two = hello(1, has_key=True), hello(2, has_key=True)
    at_client, at_server = ends.client.vouch(two, one), ends.server.vouch(one, two)
    assert (at_client.credential, at_server.credential) == (uri_of(2), uri_of(1))
    assert at_client.heartbeats == at_server.heartbeats
    assert at_client.heartbeats != ends.client.vouch(two, hello(1, nonce="9" * 64)).heartbeats
    assert at_client.expires is not None
    assert 29 * DAY < at_client.expires - time.time() <= 30 * DAY
    large = bytes(range(256)) * 4000
    for out, back in ((ends.client, ends.server), (ends.server, ends.client)):
        assert back.feed(out.seal(large)) == large
        assert back.feed(out.seal(b"")) == b""
        assert back.outgoing() == b""


def test_bytes_come_in_pieces_of_any_size(make: Make) -> None:
    ends = Ends(make(1), make(2))
    sealed = ends.client.seal(b"a" * 20000) + ends.client.seal(b"b")
    assert b"".join(ends.server.feed(sealed[i : i + 7]) for i in range(0, len(sealed), 7)) == b"a" * 20000 + b"b"


def test_records_are_counted_however_they_come(make: Make) -> None:
    ends = Ends(make(1), make(2))
    before = ends.server.records
    first, second = ends.client.seal(b"first"), ends.client.seal(b"second" * 1000)
    assert ends.server.feed(first) == b"first"
    for cut in (3, 5, 1000):
        within = []
        for piece, content in ((second[:cut], b""), (memoryview(second)[cut:], b"second" * 1000)):
            assert ends.server.feed(piece) == content
            within.append(ends.server.is_within)
        assert within == [True, False]
        second = ends.client.seal(b"second" * 1000)
    assert ends.server.feed(second + ends.client.seal(b"last")) == b"second" * 1000 + b"last"
    assert ends.server.records == before + 6


def test_messages_are_not_readable_on_the_way(make: Make) -> None:
    ends = Ends(make(1), make(2))
    assert b"secret" not in ends.client.seal(b"secret" * 10)


def test_no_link_resumes_another_one(make: Make) -> None:
    """A server that sent a ticket would have something to say right after the handshake."""
    assert Ends(make(1), make(2)).left == b""


def test_a_certificate_is_for_the_cluster_that_its_owner_says_it_is(make: Make) -> None:
    ends = Ends(make(7), make(2))
    with pytest.raises(IncompatiblePeer, match="its certificate is for cluster 7, it says 3") as caught:
        ends.server.vouch(hello(3), hello(2))
    assert not caught.value.is_proved, "a member at the address of cluster 3 does not decide about cluster 3"


def test_a_server_of_another_authority_is_refused_and_told(make: Make) -> None:
    ends = Ends(make(1), make(2, issuer=OTHER))
    assert "the peer's certificate does not verify: " in ends.reason(ends.client)
    assert ends.reason(ends.server) == "the peer refused this end's certificate: unknown ca"
    assert not any(error.is_proved for error in ends.errors.values())
    assert not ends.client.is_proved


def test_a_client_of_another_authority_is_refused_and_told(make: Make) -> None:
    """The server has proved itself when it refuses, so what it says is proved."""
    ends = Ends(make(1, issuer=OTHER), make(2))
    assert "the peer's certificate does not verify: " in ends.reason(ends.server)
    with pytest.raises(AuthError, match="the peer refused this end's certificate: unknown ca") as caught:
        ends.client.feed(ends.left)
    assert caught.value.is_proved
    other = Ends(make(1, issuer=OTHER), make(2), expected=3)
    with pytest.raises(AuthError) as caught:
        other.client.feed(other.left)
    assert not caught.value.is_proved, "cluster 2 does not decide about cluster 3"


@pytest.mark.parametrize("side", ["client", "server"])
def test_an_expired_certificate_is_refused_and_the_reason_is_told(side: str, make: Make) -> None:
    """The certificate takes the place of another one in the context, because no cluster starts with it."""
    own, expired = make(1), OURS.issue([uri_of(2)], valid=(-DAY, -1))
    theirs = make(2)
    for context in (theirs.client, theirs.server):
        _load(context, expired)
    ends = Ends(own, theirs) if side == "server" else Ends(theirs, own)
    judge, culprit = (ends.client, ends.server) if side == "server" else (ends.server, ends.client)
    assert ends.reason(judge) == "the peer's certificate does not verify: certificate has expired"
    if side == "client":
        with pytest.raises(AuthError, match="certificate expired"):
            ends.client.feed(ends.left)
    else:
        assert ends.reason(culprit) == "the peer refused this end's certificate: certificate expired"


def _load(context: ssl.SSLContext, own: Pair) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(own.certificate + own.key)
        file.flush()
        context.load_cert_chain(file.name)


def test_a_client_without_a_certificate_is_refused_and_told(make: Make) -> None:
    own, theirs = make(1), make(2)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    own.client = bare
    ends = Ends(own, theirs)
    assert ends.reason(ends.server) == "the peer showed no certificate: must show one"
    with pytest.raises(AuthError, match="the peer refused this end's certificate: certificate required"):
        ends.client.feed(ends.left)


def test_older_versions_of_tls_are_refused(make: Make) -> None:
    own = make(1)
    own.client.minimum_version = own.client.maximum_version = ssl.TLSVersion.TLSv1_2
    ends = Ends(own, make(2))
    assert "the peer broke the rules of TLS 1.3: " in ends.reason(ends.server)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"a" * 100, b"\0" * 100])
def test_a_client_that_speaks_something_else_is_refused(data: bytes, make: Make) -> None:
    with pytest.raises(ProtocolError, match=r"broke the rules of TLS 1\.3"):
        TlsPipe("server", make(1)).shake(data)


def test_a_handshake_has_a_largest_size(make: Make) -> None:
    """Each record says that the next one continues the same message, which OpenSSL would collect up to 16 MiB."""
    pipe, record = TlsPipe("server", make(1)), b"\x16\x03\x01\x10\x00"
    assert not pipe.shake(record + b"\x01\x00\xff\xff" + b"\0" * 4092)
    assert not pipe.shake((record + b"\0" * 4096) * 2)
    with pytest.raises(ProtocolError, match=f"more than {MAX_HANDSHAKE} bytes"):
        pipe.shake(record + b"\0" * 4096)


def test_a_server_that_answers_without_tls_is_heard(make: Make) -> None:
    pipe = TlsPipe("client", make(1))
    pipe.shake()
    data = encode(Refuse(status=1, reason="cluster 2 proves keys", kind="key"))
    assert not pipe.shake(data[:1])
    assert not pipe.shake(data[1:9])
    with pytest.raises(AuthError, match="an unproved peer refused: cluster 2 proves keys") as caught:
        pipe.shake(data[9:])
    assert not caught.value.is_proved
    other = TlsPipe("client", make(1))
    other.shake()
    with pytest.raises(ProtocolError, match="the peer answers without TLS"):
        other.shake(encode(Ping(call=1)))


@pytest.mark.parametrize("place", [0, 5, 20, -1])
def test_a_byte_that_was_changed_on_its_way_ends_the_link_before_it_is_read(place: int, make: Make) -> None:
    ends = Ends(make(1), make(2))
    sealed = bytearray(ends.client.seal(b"a message of some length"))
    sealed[place] ^= 1
    with pytest.raises(ProtocolError, match="a message was changed or added on its way"):
        ends.server.feed(bytes(sealed))


def test_bytes_that_come_twice_or_are_left_out_end_the_link(make: Make) -> None:
    ends = Ends(make(1), make(2))
    first, second = ends.client.seal(b"first"), ends.client.seal(b"second")
    assert ends.server.feed(first) == b"first"
    with pytest.raises(ProtocolError, match="changed or added"):
        ends.server.feed(first)
    ends = Ends(make(1), make(2))
    first, second = ends.client.seal(b"first"), ends.client.seal(b"second")
    with pytest.raises(ProtocolError, match="changed or added"):
        ends.server.feed(second)


def test_nothing_comes_after_the_peer_has_closed_its_side(make: Make) -> None:
    """The client here is OpenSSL's own, because a pipe never closes its side."""
    to_server, to_client, server = ssl.MemoryBIO(), ssl.MemoryBIO(), TlsPipe("server", make(2))
    client = make(1).client.wrap_bio(to_client, to_server)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    assert not server.shake(to_server.read())
    to_client.write(server.outgoing())
    client.do_handshake()
    assert server.shake(to_server.read())
    client.write(b"last")
    with pytest.raises(ssl.SSLWantReadError):
        client.unwrap()
    assert server.feed(to_server.read()) == b"last"
    assert server.is_over
    assert server.feed(b"more") == b""
