"""Reasons that a peer is told of an error, which are written in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiodatadist
from aiodatadist import LinkError, LLMStatusCode, TransferTimeout
from aiodatadist._wire.messages import MAX_REASON, Refuse, parser
from aiodatadist._wire.reasons import reason_of, refusal
from aiodatadist.testing import linked_pair, soft_fault, soft_faults_cleared
from tests.test_told_once import DESC, ends, with_new_memory


@given(st.text())
def test_any_text_can_be_sent(text: str) -> None:
    for long in (text, text * 1000):
        message = refusal(LinkError(long))
        assert isinstance(parser.validate_json(message.model_dump_json()), Refuse)


def test_the_message_is_sent_and_not_what_is_said_of_it_here() -> None:
    error = TransferTimeout("too slow", operation="pull_blocks", hint="try again", peer=3)
    assert reason_of(error) == "too slow"
    assert reason_of(LinkError()) == "LinkError [LLM_LINK_FAILED]"
    assert reason_of(LinkError("a\nb\N{SNOWMAN}")) == r"a\nb\u2603"
    assert len(reason_of(LinkError("\N{SNOWMAN}" * 5000))) == MAX_REASON
    assert refusal(LinkError("no", status_code=LLMStatusCode.LLM_ALREADY_LINK)).reason == "no"


def test_no_other_place_writes_such_text() -> None:
    folder = Path(aiodatadist.__file__).parent
    found = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if re.search(r"\bascii\(", path.read_text())
    }
    assert found == {"_values/foreign.py"}


@pytest.mark.parametrize("side", ["client", "server"])
async def test_a_status_is_said_once_at_either_end(side: str) -> None:
    async with linked_pair(DESC) as pair:
        manager, cache, key = await with_new_memory(*ends(pair, side))
        with soft_faults_cleared():
            soft_fault("HcclCommPrepare:fail=9@*")
            with pytest.raises(LinkError) as caught:
                await manager.pull_blocks(key, cache, [0], [0])
    assert re.findall(r"\[LLM_\w+\]", str(caught.value)) == ["[LLM_LINK_FAILED]"]
