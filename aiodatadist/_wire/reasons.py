"""Reasons why there is no link: as they are sent to a peer, and as the peer's are reported here."""

from __future__ import annotations

from typing import Final, Literal

from aiodatadist._config.trust import BOTH_ENDS
from aiodatadist._values.foreign import printable
from aiodatadist._wire.messages import MAX_REASON, Refuse
from aiodatadist.errors import AuthError, IncompatiblePeer, LinkError, LLMException, LLMStatusCode, ProtocolError

_DECIDED: Final = "the proof was right: the peer's policy.json decides what this cluster may do"
"""The hint for a peer that refuses a cluster although it has proved its key or certificate."""


def reason_of(error: Exception) -> str:
    """Return only the error's message. Its status travels separately, and its hint is for a caller here."""
    return printable(error.args[0] if error.args else error, MAX_REASON)


def status_of(error: LLMException) -> int:
    """Return the status for an answer.

    A broken protocol becomes a failed link: its own status would tell the peer's caller that an argument was wrong.
    """
    return int(LLMStatusCode.LLM_LINK_FAILED if isinstance(error, ProtocolError) else error.status_code)


def refusal(error: LinkError) -> Refuse:
    """Return the message that tells the peer why there can be no link."""
    kind: Literal["", "key", "unfit"] = (
        "key" if isinstance(error, AuthError) else "unfit" if isinstance(error, IncompatiblePeer) else ""
    )
    return Refuse(status=int(error.status_code), reason=reason_of(error), kind=kind)


def discreet(error: LinkError) -> LinkError:
    """Return the error that an unproved peer is told. It does not say who this end is.

    The errors of a proof and of a decoder say nothing about this end but its versions.
    """
    is_of_the_proof = isinstance(error, (AuthError, IncompatiblePeer, ProtocolError))
    return error if is_of_the_proof else LinkError("this end gave up before the proof")


def refused(message: Refuse, is_proved: bool, versions: str = "", hint: str = BOTH_ENDS) -> LinkError:
    """Return the peer's refusal as an error of this end.

    Args:
        versions: appended to the peer's reason.
        hint: the hint if the peer refuses because of the key, before it is proved.
    """
    peer = "the peer" if is_proved else "an unproved peer"
    error = {"": LinkError, "key": AuthError, "unfit": IncompatiblePeer}[message.kind](
        f"{peer} refused: {printable(message.reason)}{versions}",
        status_code=LLMStatusCode.of(message.status),
        hint=None if message.kind != "key" else _DECIDED if is_proved else hint,
    )
    error.is_proved = is_proved
    return error
