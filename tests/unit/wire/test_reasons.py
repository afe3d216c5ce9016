"""What a peer is told of an error, and that it is written in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiodatadist
from aiodatadist import LinkError, LLMStatusCode, TransferTimeout
from aiodatadist.testing import linked_pair, soft_fault, soft_faults_cleared
from aiodatadist.wire.handshake import refusal
from aiodatadist.wire.messages import MAX_REASON, Refuse, parser
from aiodatadist.wire.reasons import as_ascii, printable
from tests.test_told_once import DESC, ends, with_new_memory


@given(st.text())
def test_any_text_can_be_sent(text: str) -> None:
    for long in (text, text * 1000):
        message = refusal(LinkError(long))
        assert isinstance(parser.validate_json(message.model_dump_json()), Refuse)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=MAX_REASON))
def test_plain_text_stays(text: str) -> None:
    assert as_ascii(text) == text


@given(st.text(max_size=100))
def test_what_was_told_on_is_not_escaped_once_more(text: str) -> None:
    assert as_ascii(as_ascii(text)) == as_ascii(text)


def test_the_message_is_sent_and_not_what_is_said_of_it_here() -> None:
    error = TransferTimeout("too slow", operation="pull_blocks", hint="try again", peer=3)
    assert printable(error) == "too slow"
    assert printable(LinkError()) == "LinkError [LLM_LINK_FAILED]"
    assert printable(LinkError("a\nb\N{SNOWMAN}")) == r"a\nb\u2603"
    assert len(printable(LinkError("\N{SNOWMAN}" * 5000))) == MAX_REASON
    assert refusal(LinkError("no", status_code=LLMStatusCode.LLM_ALREADY_LINK)).reason == "no"


def test_no_other_place_writes_such_text() -> None:
    folder = Path(aiodatadist.__file__).parent
    found = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if re.search(r"\bascii\(", path.read_text())
    }
    assert found == {"wire/reasons.py"}


@pytest.mark.parametrize("side", ["client", "server"])
async def test_a_status_is_said_once_at_either_end(side: str) -> None:
    async with linked_pair(DESC) as pair:
        manager, cache, key = await with_new_memory(*ends(pair, side))
        with soft_faults_cleared():
            soft_fault("HcclCommPrepare:fail=9@*")
            with pytest.raises(LinkError) as caught:
                await manager.pull_blocks(key, cache, [0], [0])
    assert re.findall(r"\[LLM_\w+\]", str(caught.value)) == ["[LLM_LINK_FAILED]"]
