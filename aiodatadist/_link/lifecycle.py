"""The life of a link as tables of events and states, without I/O or clock.

A link has five aspects that change independently. Each is one value, and only :meth:`Lifecycle.on` changes it:

========= ===================================================================== =============================================
reach     how far the link has been made; it only grows                         OPENING -> AGREED -> FILED -> MUTUAL
end       how the link ends, and which end has said so                          RUNNING -> ... -> CLOSED or BROKEN
service   whether the peer is listened to, and what became of the channels      UP -> STOPPED -> DEAF -> SHUT or WITHHELD
ownership which ends the link belongs to                                        BOTH, OURS, PEERS, NEITHER
sequel    what follows if the link breaks                                       NONE, RELINK
========= ===================================================================== =============================================

:class:`LinkState`, which callers see, follows from the first two. An event that a table does not list is a defect.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from aiodatadist.errors import InternalError, LinkClosed, LinkError, PeerLost, ProtocolError

AWAIT_LINK: Final = "the link is being re-established: await wait_linked()"
"""The hint of errors that a lost link causes."""


class LinkState(Enum):
    """The state of a link, as callers and metrics see it.

    ::

        OPENING -> READY -> CLOSING -> CLOSED
                     |         |
                     +---------+-----> BROKEN     the peer died, or broke the protocol
    """

    OPENING = "opening"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"
    BROKEN = "broken"


class Cause(Enum):
    """Why a link ended."""

    UNLINKED = "unlinked"
    CONNECTION_LOST = "connection_lost"
    PROTOCOL_ERROR = "protocol_error"
    HEARTBEATS_MISSED = "heartbeats_missed"
    DATA_CONNECTION_LOST = "data_connection_lost"
    DEVICE_ERROR = "device_error"
    OTHER = "other"
    REFUSED = "refused"
    """The peer ended the link before it was ready there: no call unlinked the clusters. Metrics count it as unlinked."""

    @property
    def word(self) -> str:
        """The name of the cause in metrics."""
        return Cause.UNLINKED.value if self is Cause.REFUSED else self.value


LINK_CAUSES: Final = tuple(dict.fromkeys(cause.word for cause in Cause))


class Reach(Enum):
    """The stages in which a link is made."""

    OPENING = "opening"
    """The ends are shaking hands."""
    AGREED = "agreed"
    """The handshake has succeeded."""
    FILED = "filed"
    """The link is in this end's table, and is served. The peer may not have it."""
    MUTUAL = "mutual"
    """The peer has the link, too."""


class End(Enum):
    """The ways in which a link ends. ``state`` is what callers see, unless the link is still opening."""

    RUNNING = "running", LinkState.READY
    PARTING = "parting", LinkState.CLOSING
    """This end unlinks. The peer has not answered."""
    LEAVING = "leaving", LinkState.CLOSING
    """The peer has said its last word."""
    UNANSWERED = "unanswered", LinkState.CLOSING
    """The connection of a parting link was lost before the peer answered."""
    UNANSWERED_BROKEN = "unanswered and broken", LinkState.BROKEN
    UNANSWERED_CLOSED = "unanswered and closed", LinkState.CLOSED
    BROKEN = "broken", LinkState.BROKEN
    CLOSED = "closed", LinkState.CLOSED

    def __init__(self, word: str, state: LinkState) -> None:
        self.word = word
        self.state = state


class Service(Enum):
    """The service of a link: whether this end listens to the peer, and what became of the channels."""

    UP = "up"
    """The peer is listened to, or will be."""
    STOPPED = "stopped"
    """The tasks of the link have been told to end, or must not start."""
    DEAF = "deaf"
    """The peer is no longer listened to. What it can still reach here is not known."""
    SHUT = "shut"
    """The channels are closed: nothing of the peer's can land here."""
    WITHHELD = "withheld"
    """Like SHUT, except that the peer may still write into memory that is withheld until it lets go."""


class Ownership(Enum):
    """The ends that a link belongs to. A link that belongs to neither must be ended."""

    BOTH = "both", True, True
    OURS = "ours", True, False
    PEERS = "peers", False, True
    NEITHER = "neither", False, False

    def __init__(self, word: str, is_ours: bool, is_peers: bool) -> None:
        self.word = word
        self.is_ours = is_ours
        self.is_peers = is_peers


class Sequel(Enum):
    """The plan for a link that breaks: this end relinks, or does nothing."""

    NONE = "none"
    RELINK = "relink"
    """This end relinks."""


Aspect = Reach | End | Service | Ownership | Sequel


class Event(Enum):
    """Events in the life of a link. ``aspect`` is the attribute of :class:`Lifecycle` that the event changes."""

    AGREE = "agree", "reach"
    """The handshake has succeeded."""
    FILE = "file", "reach"
    """The link enters this end's table, which may find it broken already."""
    MEET = "meet", "reach"
    """The peer is known to have the link, too."""

    UNLINK = "unlink", "end"
    """A call of this end's unlinks the clusters."""
    LAST_WORD = "last word", "end"
    """The peer says that it ends the link, or agrees to the end."""
    FALL_SILENT = "fall silent", "end"
    """The connection of a closing link is lost."""
    BREAK = "break", "end"
    """The peer is lost or cannot be trusted, or the service of the link failed."""
    CLOSE = "close", "end"
    """This end gives the link up at once, whatever the peer says."""
    GIVE_BACK = "give back", "end"
    """The service of the link has ended, and everything that it holds is to be released."""

    STOP = "stop", "service"
    """The tasks of the link are to end."""
    STOP_LISTENING = "stop listening", "service"
    """The peer is no longer listened to."""
    SHUT = "shut", "service"
    """The channels are closed."""
    WITHHOLD = "withhold", "service"
    """The channels are closed, and the peer may still be writing."""

    OWN = "own", "ownership"
    DISOWN = "disown", "ownership"
    PEER_OWNS = "peer owns", "ownership"
    PEER_DISOWNS = "peer disowns", "ownership"

    WANT = "want", "sequel"
    """This end relinks if the link breaks."""
    STOP_WANTING = "stop wanting", "sequel"

    def __init__(self, word: str, aspect: str) -> None:
        self.word = word
        self.aspect = aspect


_REACH: Mapping[Aspect, Mapping[Event, Aspect]] = {
    Reach.OPENING: {Event.AGREE: Reach.AGREED},
    Reach.AGREED: {Event.FILE: Reach.FILED},
    Reach.FILED: {Event.MEET: Reach.MUTUAL},
    Reach.MUTUAL: {},
}

_END: Mapping[Aspect, Mapping[Event, Aspect]] = {
    End.RUNNING: {
        Event.UNLINK: End.PARTING,
        Event.LAST_WORD: End.LEAVING,
        Event.BREAK: End.BROKEN,
        Event.CLOSE: End.CLOSED,
        Event.GIVE_BACK: End.CLOSED,
    },
    End.PARTING: {
        Event.LAST_WORD: End.LEAVING,
        Event.FALL_SILENT: End.UNANSWERED,
        Event.BREAK: End.UNANSWERED_BROKEN,
        Event.GIVE_BACK: End.CLOSED,  # this end no longer waits for the answer
    },
    End.LEAVING: {
        Event.LAST_WORD: End.LEAVING,  # the peer repeats it until it hears ours
        Event.FALL_SILENT: End.LEAVING,
        Event.BREAK: End.BROKEN,
        Event.GIVE_BACK: End.CLOSED,
    },
    End.UNANSWERED: {
        Event.BREAK: End.UNANSWERED_BROKEN,
        Event.GIVE_BACK: End.UNANSWERED_CLOSED,
    },
    End.UNANSWERED_BROKEN: {
        Event.LAST_WORD: End.BROKEN,  # it had arrived before, and is read before the tasks of the link end
        Event.GIVE_BACK: End.UNANSWERED_BROKEN,
    },
    End.UNANSWERED_CLOSED: {},
    End.BROKEN: {
        Event.LAST_WORD: End.BROKEN,
        Event.CLOSE: End.CLOSED,  # a link that was never filed
        Event.GIVE_BACK: End.BROKEN,
    },
    End.CLOSED: {
        Event.LAST_WORD: End.CLOSED,
        Event.GIVE_BACK: End.CLOSED,
    },
}

_SERVICE: Mapping[Aspect, Mapping[Event, Aspect]] = {
    Service.UP: {
        Event.STOP: Service.STOPPED,
        Event.STOP_LISTENING: Service.DEAF,
        Event.SHUT: Service.SHUT,  # a link that was never served
        Event.WITHHOLD: Service.WITHHELD,
    },
    Service.STOPPED: {
        Event.STOP: Service.STOPPED,
        Event.STOP_LISTENING: Service.DEAF,
        Event.SHUT: Service.SHUT,
        Event.WITHHOLD: Service.WITHHELD,
    },
    Service.DEAF: {Event.STOP: Service.DEAF, Event.SHUT: Service.SHUT, Event.WITHHOLD: Service.WITHHELD},
    Service.SHUT: {Event.STOP: Service.SHUT},
    Service.WITHHELD: {Event.STOP: Service.WITHHELD},
}

_OWNERSHIP: Mapping[Aspect, Mapping[Event, Aspect]] = {
    Ownership.BOTH: {
        Event.OWN: Ownership.BOTH,
        Event.DISOWN: Ownership.PEERS,
        Event.PEER_OWNS: Ownership.BOTH,
        Event.PEER_DISOWNS: Ownership.OURS,
    },
    Ownership.OURS: {
        Event.OWN: Ownership.OURS,
        Event.DISOWN: Ownership.NEITHER,
        Event.PEER_OWNS: Ownership.BOTH,
        Event.PEER_DISOWNS: Ownership.OURS,
    },
    Ownership.PEERS: {
        Event.OWN: Ownership.BOTH,
        Event.DISOWN: Ownership.PEERS,
        Event.PEER_OWNS: Ownership.PEERS,
        Event.PEER_DISOWNS: Ownership.NEITHER,
    },
    Ownership.NEITHER: {
        Event.OWN: Ownership.OURS,
        Event.DISOWN: Ownership.NEITHER,
        Event.PEER_OWNS: Ownership.PEERS,
        Event.PEER_DISOWNS: Ownership.NEITHER,
    },
}

_SEQUEL: Mapping[Aspect, Mapping[Event, Aspect]] = {
    Sequel.NONE: {Event.WANT: Sequel.RELINK, Event.STOP_WANTING: Sequel.NONE},
    Sequel.RELINK: {Event.WANT: Sequel.RELINK, Event.STOP_WANTING: Sequel.NONE},
}

TABLE: Final[Mapping[Aspect, Mapping[Event, Aspect]]] = {**_REACH, **_END, **_SERVICE, **_OWNERSHIP, **_SEQUEL}
"""The next value for each event and value. An event is listed with the values at which it can happen."""


class Lifecycle:
    """The life of one link. Any code may read its attributes; only :meth:`on` changes them.

    They are plain attributes because every transfer reads them, and a property costs a call.

    Attributes:
        state: the state of the link, as callers see it.
        reach, end, service, ownership, sequel: the five aspects.
        failure: why the link ended; None as long as it has not.
        cause: the same in a word.
    """

    __slots__ = ("cause", "end", "failure", "ownership", "reach", "sequel", "service", "state")

    def __init__(self) -> None:
        self.reach: Reach = Reach.OPENING
        self.end: End = End.RUNNING
        self.service: Service = Service.UP
        self.ownership: Ownership = Ownership.BOTH
        self.sequel: Sequel = Sequel.NONE
        self.state: LinkState = LinkState.OPENING
        self.failure: LinkError | None = None
        self.cause: Cause | None = None

    def on(self, event: Event, failure: LinkError | None = None, cause: Cause | None = None) -> bool:
        """Apply an event. Return True if the link ends with it: ``failure`` says why, and stays.

        Args:
            failure: required if the event may end the link. Ignored if the link has ended.
            cause: if the type of ``failure`` does not tell it.

        Raises:
            InternalError: if the event cannot happen now.
        """
        now: Aspect = getattr(self, event.aspect)
        after = TABLE[now].get(event)
        if after is None or (now is End.RUNNING and failure is None):
            raise InternalError(f"{event.word!r} happened to a link whose {event.aspect} is {now.name}")
        setattr(self, event.aspect, after)
        ends = now is End.RUNNING
        if ends and failure is not None:
            self.failure = failure
            self.cause = cause or _cause_of(failure)
        is_opening = self.reach is Reach.OPENING and self.end is End.RUNNING
        self.state = LinkState.OPENING if is_opening else self.end.state
        return ends

    @property
    def is_open(self) -> bool:
        """True if the peer hears this end."""
        return self.state is LinkState.READY or self.state is LinkState.CLOSING

    @property
    def is_filed(self) -> bool:
        """True once the link has entered this end's table, also after its end."""
        return self.reach is Reach.FILED or self.reach is Reach.MUTUAL

    @property
    def is_mutual(self) -> bool:
        """True once both ends have the link, also after its end."""
        return self.reach is Reach.MUTUAL

    @property
    def is_usable(self) -> bool:
        """True if the link is ready at both ends."""
        return self.state is LinkState.READY and self.reach is Reach.MUTUAL

    @property
    def is_unanswered(self) -> bool:
        """True if this end unlinked, and the peer went away without an answer."""
        return self.end in (End.UNANSWERED, End.UNANSWERED_BROKEN, End.UNANSWERED_CLOSED)

    @property
    def was_unlinked(self) -> bool:
        """True if a call at either end has ended the link, or has begun to."""
        return self.cause is Cause.UNLINKED

    @property
    def is_retryable(self) -> bool:
        """True if the link broke, and this end relinks."""
        is_broken = self.cause is not None and self.cause.word != Cause.UNLINKED.word
        return is_broken and self.sequel is Sequel.RELINK

    @property
    def is_listening(self) -> bool:
        """True until the service of the link ends."""
        return self.service is Service.UP or self.service is Service.STOPPED

    @property
    def is_shut(self) -> bool:
        """True if nothing of the peer's can land here, except in memory that is withheld."""
        return self.service is Service.SHUT or self.service is Service.WITHHELD


def _cause_of(failure: LinkError) -> Cause:
    if isinstance(failure, LinkClosed):
        return Cause.UNLINKED
    if isinstance(failure, PeerLost):
        return Cause.CONNECTION_LOST
    return Cause.PROTOCOL_ERROR if isinstance(failure, ProtocolError) else Cause.OTHER
