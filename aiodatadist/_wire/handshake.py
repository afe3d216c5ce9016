"""The order of the messages with which a link begins. A state machine without I/O.

::

    client                                server
    HELLO   hello    ->                   HELLO
            <-  hello                     CONNECT
    ACCEPT  connect  ->                   OPEN
    OPEN    <-  accept
            both open the channel
            <-  ready                     when its half is open
    DONE    ready    ->                   DONE
            when its half is open and heartbeats come

At any point either end may send ``refuse``, which ends the link. Any message that the other end should not have sent
does the same.

With a key all of this is sealed, because ``key_proof`` comes before it. A client may then send ``connect`` together with
its hello. So an end says who it is only to a member of the group. Still, a member at the address of another one may pass on
the messages of a third. So a message from another cluster than the expected one decides nothing.

Without a key all ends are unproved, and an unproved end can only decide about this connection.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from aiodatadist._config.trust import BOTH_ENDS
from aiodatadist._wire.data_proof import said_secret
from aiodatadist._wire.frames import Unknown, check_version
from aiodatadist._wire.key_proof import Side, other_proof
from aiodatadist._wire.messages import (
    MINOR,
    PLAIN_PROTOCOL,
    Accept,
    Connect,
    Hello,
    Hello1,
    Message,
    Ready,
    Refuse,
)
from aiodatadist._wire.proved import Proved, Vouch
from aiodatadist._wire.reasons import refused
from aiodatadist._wire.ways import AUTO, TCP, option_of, way_between
from aiodatadist.errors import AuthError, IncompatiblePeer, LinkError, LLMStatusCode, ProtocolError


class OwnListener(IncompatiblePeer):
    """The client is the cluster that listens here."""


class State(Enum):
    """The states of a handshake, each named after the message that is expected next."""

    HELLO = "hello"
    CONNECT = "connect"
    ACCEPT = "accept"
    OPEN = "open"
    DONE = "done"
    OVER = "over"


class Handshake:
    """An end of a handshake. Feed it what arrives, and send what it returns; it raises if there can be no link.

    Args:
        hello: what this end says of itself.
        vouch: says what the proof is worth for a peer with this hello; None if nothing was proved.
        expected: the cluster that must answer; None for any.
        met: for the client: called with the peer's hello, before the client asks for the link unless it asks at once.
            Raises LinkError if the client does not want it.
        hint: says how both ends get the same key.

    Attributes:
        peer: the other end's hello.
        vouch: the same, which a client sets when both ends have proved themselves.
        proved: the credential of the peer, once its hello is known.
        way: how the bytes of the link travel, once the options of both ends have been compared.
        connect: the name of the channel, once both ends know it; then open it and call :meth:`opened`.
        ready: the peer's message when its half of the channel was open.
    """

    def __init__(
        self,
        side: Side,
        hello: Hello,
        vouch: Vouch | None = None,
        expected: int | None = None,
        met: Callable[[Hello], None] = lambda _: None,
        hint: str = BOTH_ENDS,
    ) -> None:
        self.side = side
        self.state: State = State.HELLO
        self.peer: Hello | None = None
        self.vouch: Vouch | None = vouch
        self.proved: Proved | None = None
        self.way: str = ""
        self.connect: Connect | None = None
        self.ready: Ready | None = None
        self._hello = hello
        self._hint = hint
        self._expected = expected
        self._met = met
        self._wanted: Connect | None = None
        self._has_asked = False
        self._is_open = False

    @property
    def me(self) -> int:
        """The cluster id of this end."""
        return self._hello.cluster_id

    @property
    def is_proved(self) -> bool:
        """True if the other end has proved a credential, so that its hello cannot be of a stranger."""
        return self.vouch is not None

    @property
    def protocol(self) -> int:
        """The major version that this end speaks."""
        return self._hello.protocol

    @property
    def secret(self) -> bytes:
        """The secret of the link, which only its two ends know; without a proof, those that hear this connection."""
        if self.proved is not None:
            return self.proved.heartbeats.secret
        if self.peer is None:
            raise ProtocolError("the two ends have not agreed")
        return said_secret(self.peer, self._hello)

    @property
    def agreed(self) -> tuple[Hello, Connect] | None:
        """The peer's hello and the channel's name, once both are settled."""
        return None if self.peer is None or self.connect is None else (self.peer, self.connect)

    @property
    def is_done(self) -> bool:
        return self._is_open and self.ready is not None

    def start(self, connect: Connect, at_once: bool = False) -> list[Message]:
        """Return the client's first messages.

        Args:
            connect: the client's request.
            at_once: True to make the request now, before the client knows who the peer is.
        """
        self._wanted, self._has_asked = connect, at_once
        return [self._hello, connect] if at_once else [self._hello]

    def opened(self, epoch: int, heartbeat_token: str = "") -> list[Message]:
        """Note that this end's half of the channel is open, and reaches what was registered up to ``epoch``.

        Args:
            heartbeat_token: what the connection for heartbeats must present to this end; empty if it proves a key.
        """
        self._is_open = True
        return [Ready(epoch=epoch, heartbeat_token=heartbeat_token)]

    def receive(self, message: Message | Unknown) -> list[Message]:
        """Return the answers to a message.

        Raises:
            LinkError: if the peer refused; with the peer's status, and of the class for its reason.
            ProtocolError, IncompatiblePeer, AuthError: if this end refuses. Send :func:`refusal` to tell the peer.
        """
        try:
            return self._react(message)
        except LinkError:
            self.state = State.OVER
            raise

    def _react(self, message: Message | Unknown) -> list[Message]:
        match self.state, message:
            case _, Refuse():
                error = refused(message, self.is_proved, self._unsaid_version(message), self._hint)
                # Only the expected cluster decides, which a member at its address need not be.
                error.is_proved = self.is_proved and self.peer is not None
                raise error
            case State.HELLO, Hello():
                return self._on_hello(message)
            case State.HELLO, Hello1():
                raise other_proof(PLAIN_PROTOCOL, message.protocols)
            case State.CONNECT, Connect() if self.side == "server":
                if self.is_proved and self.peer is not None:
                    self._compare(self.peer)
                self.connect = message
                self.state = State.OPEN
                return [Accept()]
            case State.ACCEPT, Accept():
                self.connect = self._wanted
                self.state = State.OPEN
                return []
            case State.OPEN, Ready():
                self.ready = message
                self.state = State.DONE
                return []
        raise ProtocolError(f"the peer sent {message.type!r} in state {self.state.value!r}")

    def _unsaid_version(self, message: Refuse) -> str:
        """Return words to add to a refusal of our hello if the peer may not have understood it.

        A peer of another version cannot always name both. The words are empty if the peer has named its version, or
        refuses for another reason.
        """
        is_about_words = message.kind == "" and message.status == LLMStatusCode.LLM_PARAM_INVALID
        version = f"{self._hello.protocol}.{MINOR}"
        if self.peer is not None or not is_about_words or version in message.reason:
            return ""
        return f" (protocol {version} here, the peer did not say its own)"

    def _on_hello(self, theirs: Hello) -> list[Message]:
        mine = self._hello
        check_version(mine.protocol, theirs.protocol, theirs.minor)
        if theirs.instance == mine.instance:
            raise OwnListener(f"cluster {mine.cluster_id} met itself")
        if self.vouch is not None:
            self.proved = self.vouch(theirs, mine)
        if theirs.cluster_id == mine.cluster_id:
            raise IncompatiblePeer(f"both ends have cluster id {mine.cluster_id}: ids must be unique")
        if self._expected is not None and theirs.cluster_id != self._expected:
            raise IncompatiblePeer(
                f"cluster {self._expected} was asked for, {theirs.cluster_id} answered",
                hint="check the address and the cluster id",
            )
        if theirs.has_key != mine.has_key:
            owner = theirs if theirs.has_key else mine
            raise AuthError(f"only cluster {owner.cluster_id} has a key", hint=self._hint)
        self.peer = theirs
        if self.side == "server":
            if not self.is_proved:
                self._compare(theirs)
            self.state = State.CONNECT
            return [self._hello]
        self._compare(theirs)
        if self._wanted is None:
            raise ProtocolError("a client must start() first")
        self._met(theirs)
        self.state = State.ACCEPT
        return [] if self._has_asked else [self._wanted]

    def _compare(self, theirs: Hello) -> None:
        """Raise IncompatiblePeer if the options of the two ends do not fit together."""
        mine = self._hello
        # ids instead of "this end" and "the peer": the peer gets the text, too, and it must be true there
        us, them = f"cluster {mine.cluster_id}", f"cluster {theirs.cluster_id}"
        self.way = way_between(mine.endpoint, theirs.endpoint, self.is_proved)
        options = option_of(mine.endpoint), option_of(theirs.endpoint)
        # HOST memory of an NPU's machine and memory of softnpu meet over TCP.
        one_runtime = (("runtime", mine.endpoint.runtime, theirs.endpoint.runtime),) if self.way != TCP else ()
        for what, a, b in (
            *one_runtime,
            *((("transport", *options),) if not self.way else ()),
            ("enable_remote_cache_accessible", mine.one_sided, theirs.one_sided),
            ("transfer_backend", mine.backend or "none", theirs.backend or "none"),
        ):
            if a != b:
                error = IncompatiblePeer(f"{what} differs: {a} at {us}, {b} at {them}")
                if what == "transport" and set(options) == {AUTO, TCP}:
                    error.hint = "give both ends a key or certificates: 'auto' does not take TCP without them"
                error.is_proved = self.is_proved
                raise error
