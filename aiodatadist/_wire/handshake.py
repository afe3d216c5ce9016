"""The order of the first messages on a link. A state machine without I/O.

::

    client                                server
    HELLO   hello    ->                   HELLO
            <-  hello                     PROOF (with a key) or CONNECT
    PROOF   proof    ->                            checks it
            <-  proof   checks it         CONNECT
    ACCEPT  connect  ->                   OPEN
    OPEN    <-  accept
            both open the channel
            <-  ready                     when its half is open
    DONE    ready    ->                   DONE
            when its half is open and heartbeats come

At any point either end may send ``refuse``, which ends the link. Any message that the other end should not have sent
does the same.

With a key the two ends compare their options once the other end is proved: the client before it sends ``connect``, the
server when it receives that. An unproved end can only decide about this connection. Without a key all ends are
unproved. A proof of another cluster than the expected one does not count, because a process at the expected one's
address may have relayed it. Nor does a refusal after the proof: the hellos are part of the proof, later messages are
not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Literal

from aiodatadist._config.trust import BOTH_ENDS, Key
from aiodatadist._values.foreign import printable
from aiodatadist._wire.auth import Side, proof, proved_key
from aiodatadist._wire.frames import Unknown, check_version
from aiodatadist._wire.messages import MINOR, PROTOCOL, Accept, Connect, Hello, Message, Proof, Ready, Refuse
from aiodatadist._wire.reasons import reason_of
from aiodatadist.errors import AuthError, IncompatiblePeer, LinkError, LLMStatusCode, ProtocolError


class OwnListener(IncompatiblePeer):
    """The client is the cluster that listens here."""


class State(Enum):
    """The states of a handshake, each named after the message that is expected next."""

    HELLO = "hello"
    PROOF = "proof"
    CONNECT = "connect"
    ACCEPT = "accept"
    OPEN = "open"
    DONE = "done"
    OVER = "over"


class Handshake:
    """An end of a handshake. Feed it what arrives, and send what it returns; it raises if there can be no link.

    Args:
        keys: a client proves the first one, a server accepts a proof of any. Empty if nothing is to be proved.
        expected: the cluster that must answer; None for any.
        before_asking: for the client: called with the peer's hello, which is proved if there is a key, before the
            client asks for the link. Raises LinkError if the client does not want it.
        hint: says how both ends get the same key.

    Attributes:
        peer: the other end's hello, which may be false until it is proved.
        proved: the same hello, once the other end has proved that it has the key; None if there is no key.
        credential: name of the key that the other end has proved to have; empty if there is none.
        connect: the name of the channel, once both ends know it; then open it and call :meth:`opened`.
        ready: the peer's message when its half of the channel was open.
    """

    def __init__(
        self,
        side: Side,
        hello: Hello,
        keys: Sequence[Key] = (),
        expected: int | None = None,
        before_asking: Callable[[Hello], None] = lambda _: None,
        hint: str = BOTH_ENDS,
    ) -> None:
        self.side = side
        self.state: State = State.HELLO
        self.peer: Hello | None = None
        self.proved: Hello | None = None
        self.credential: str = ""
        self.connect: Connect | None = None
        self.ready: Ready | None = None
        self._hello = hello
        self._keys = tuple(keys)
        self._hint = hint
        self._expected = expected
        self._before_asking = before_asking
        self._wanted: Connect | None = None
        self._is_open = False

    @property
    def me(self) -> int:
        """The cluster id of this end."""
        return self._hello.cluster_id

    @property
    def agreed(self) -> tuple[Hello, Connect] | None:
        """The peer's hello and the channel's name, once both are settled."""
        return None if self.peer is None or self.connect is None else (self.peer, self.connect)

    @property
    def is_introducing(self) -> bool:
        """True until a server knows who the client is, as far as it can be known."""
        return self.state in {State.HELLO, State.PROOF}

    @property
    def is_done(self) -> bool:
        return self._is_open and self.ready is not None

    def start(self, connect: Connect) -> list[Message]:
        """Return the client's first messages; ``connect`` is its later request."""
        self._wanted = connect
        return [self._hello]

    def opened(self, epoch: int, heartbeat_token: str) -> list[Message]:
        """Note that this end's half of the channel is open, and reaches what was registered up to ``epoch``."""
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
                raise refused(message, self.proved is not None, self._unsaid_version(message), self._hint)
            case State.HELLO, Hello():
                return self._on_hello(message)
            case State.PROOF, Proof(mac=mac):
                return self._on_proof(mac)
            case State.CONNECT, Connect() if self.side == "server":
                if self.proved is not None:
                    self._compare(self.proved)
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
        if self.peer is not None or not is_about_words or f"{PROTOCOL}.{MINOR}" in message.reason:
            return ""
        return f" (protocol {PROTOCOL}.{MINOR} here, the peer did not say its own)"

    def _on_hello(self, theirs: Hello) -> list[Message]:
        self.peer = theirs
        mine = self._hello
        check_version(theirs.protocol, theirs.minor)
        if theirs.instance == mine.instance:
            raise OwnListener(f"cluster {mine.cluster_id} met itself")
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
        if not self._keys:
            self._compare(theirs)
        return self._prove() if self.side == "client" else self._answer()

    def _compare(self, theirs: Hello) -> None:
        """Raise IncompatiblePeer if the options of the two ends do not fit together."""
        mine = self._hello
        us, them = (
            f"cluster {mine.cluster_id}",
            f"cluster {theirs.cluster_id}",
        )  # worded to be true at both ends, because the peer gets the text, too
        for what, a, b in (
            ("runtime", mine.endpoint.runtime, theirs.endpoint.runtime),
            ("transport", mine.endpoint.transport, theirs.endpoint.transport),
            ("enable_remote_cache_accessible", mine.one_sided, theirs.one_sided),
            ("transfer_backend", mine.backend or "none", theirs.backend or "none"),
        ):
            if a != b:
                error = IncompatiblePeer(f"{what} differs: {a} at {us}, {b} at {them}")
                error.is_proved = self.proved is not None
                raise error

    def _answer(self) -> list[Message]:
        self.state = State.PROOF if self._keys else State.CONNECT
        return [self._hello]

    def _prove(self) -> list[Message]:
        if not self._keys or self.peer is None:
            return self._ask()
        self.state = State.PROOF
        return [Proof(mac=proof(self._keys[0].secret, "client", self._hello, self.peer))]

    def _on_proof(self, mac: str) -> list[Message]:
        if not self._keys or self.peer is None:
            raise ProtocolError("a proof without a key")
        prover: Side = "server" if self.side == "client" else "client"
        hellos = (self._hello, self.peer) if self.side == "client" else (self.peer, self._hello)
        key = proved_key(mac, self._keys[:1] if self.side == "client" else self._keys, prover, *hellos)
        if key is None:
            raise AuthError(
                f"cluster {self.peer.cluster_id} does not have the key of cluster {self.me}", hint=self._hint
            )
        self.proved, self.credential = self.peer, key.name
        if self.side == "client":
            self._compare(self.proved)
            return self._ask()
        self.state = State.CONNECT
        return [Proof(mac=proof(key.secret, "server", self.peer, self._hello))]

    def _ask(self) -> list[Message]:
        if self._wanted is None or self.peer is None:
            raise ProtocolError("a client must start() first")
        self._before_asking(self.peer)
        self.state = State.ACCEPT
        return [self._wanted]


def refusal(error: LinkError) -> Refuse:
    """Return the message that tells the peer why there can be no link."""
    kind: Literal["", "key", "unfit"] = (
        "key" if isinstance(error, AuthError) else "unfit" if isinstance(error, IncompatiblePeer) else ""
    )
    return Refuse(status=int(error.status_code), reason=reason_of(error), kind=kind)


def refused(message: Refuse, is_proved: bool, versions: str = "", hint: str = BOTH_ENDS) -> LinkError:
    """Return the peer's refusal as an error of this end.

    Args:
        versions: appended to the peer's reason.
        hint: the hint if the peer refuses because of the key.
    """
    peer = "the peer" if is_proved else "an unproved peer"
    return {"": LinkError, "key": AuthError, "unfit": IncompatiblePeer}[message.kind](
        f"{peer} refused: {printable(message.reason)}{versions}",
        status_code=LLMStatusCode.of(message.status),
        hint=hint if message.kind == "key" else None,
    )
