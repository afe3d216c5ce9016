"""``policy.json``: what it may say, which rule counts for a peer, and how a wrong one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiodatadist import ParamInvalid
from aiodatadist._config.policy import MAX_RANGES, Policy, read_policy
from aiodatadist._config.trust import TrustFolder
from aiodatadist._values.peer_rights import EVERY_RIGHT, RIGHTS, PeerRights
from tests.keys import HEX, folder_of, policy_in

ANY: dict[str, Any] = {"version": 1, "clusters": []}
RULE: dict[str, Any] = {"match": {"key": "decode"}, "may": ["link", "read"]}


def rule(**parts: Any) -> dict[str, Any]:
    return ANY | {"clusters": [RULE | parts]}


def policy_of(tmp_path: Path, content: Any) -> Policy:
    path = policy_in(folder_of(tmp_path, f"first {HEX}"), content) / "policy.json"
    return read_policy(path)


def test_the_first_rule_that_fits_counts(tmp_path: Path) -> None:
    policy = policy_of(
        tmp_path,
        {
            "version": 1,
            "clusters": [
                {"match": {"spiffe": "spiffe://prod/kv/prefill/*"}, "ids": "1-999", "may": ["link", "read", "notify"]},
                {"match": {"key": "decode"}, "ids": "1000-1999, 3000", "may": ["link", "claim"]},
                {"match": {"key": "decode"}, "may": ["link"]},
                {"match": {"dns": "Pod-1.decode.svc"}, "ids": "5", "may": ["link", "write", "critical"]},
            ],
            "otherwise": ["link", "notify"],
        },
    )
    others = PeerRights(link=True, notify=True)
    assert policy.dns_ids() == {"pod-1.decode.svc": [range(5, 6)]}
    for name, cluster_id, rights in (
        ("spiffe://prod/kv/prefill/cluster", 1, PeerRights(link=True, read=True, notify=True)),
        ("spiffe://prod/kv/prefill/cluster", 999, PeerRights(link=True, read=True, notify=True)),
        ("spiffe://prod/kv/prefill/cluster", 1000, others),
        ("spiffe://prod/kv/prefill/cluster/7", 7, PeerRights(link=True, read=True, notify=True)),
        ("spiffe://prod/kv/prefill/", 7, others),
        ("spiffe://prod/kv/prefilled", 7, others),
        ("decode", 1000, PeerRights(link=True, claim=True)),
        ("decode", 3000, PeerRights(link=True, claim=True)),
        ("decode", 2000, PeerRights(link=True)),
        ("decoder", 1000, others),
        ("pod-1.decode.svc", 5, PeerRights(link=True, write=True, critical=True)),
        ("pod-1.decode.svc", 6, others),
        ("a.pod-1.decode.svc", 5, others),
        ("", 5, others),
    ):
        by_key = name.startswith("decode")
        assert policy.rights_of(name, cluster_id, by_key=by_key) == rights, (name, cluster_id)
        assert policy.rights_of(name, cluster_id, by_key=not by_key) == others, "a key is no certificate"


def test_without_otherwise_others_have_no_right(tmp_path: Path) -> None:
    assert policy_of(tmp_path, rule()).rights_of("first", 1) == PeerRights()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "Invalid JSON"),
        ("[]", "it is []: Input should be an object"),
        ({"clusters": []}, "version: Field required"),
        (ANY | {"version": 2}, "version is 2: Input should be 1"),
        (ANY | {"other": []}, "other: Extra inputs are not permitted"),
        (ANY | {"otherwise": ["read"]}, "'read' has no effect without 'link': add it"),
        (ANY | {"mode": "certificates"}, "mode is 'certificates': Input should be 'keys' or 'tls'"),
        (ANY | {"restart": "never"}, "restart is 'never': Input should be 'trusted'"),
        (ANY | {"private_memory": "no"}, "private_memory is 'no': Input should be a valid boolean"),
        (ANY | {"relink_after_rotation": True}, "relink_after_rotation is not supported yet"),
        (ANY | {"relink_after_rotation": 1}, "relink_after_rotation is 1: Input should be a valid boolean"),
        (rule(may=["link", "delete"]), "clusters.0.may.1 is 'delete': Input should be 'link', 'read'"),
        (rule(may=["claim"]), "'claim' has no effect without 'link': add it"),
        (rule(match={}), "must have exactly one of 'key', 'spiffe' and 'dns'"),
        (rule(match={"key": None}), "must have exactly one of 'key', 'spiffe' and 'dns'"),
        (rule(match={"key": "a", "dns": "b"}), "must have exactly one of 'key', 'spiffe' and 'dns'"),
        (rule(match={"spiffe": "https://prod"}), "spiffe must begin with 'spiffe://'"),
        (rule(match={"spiffe": "spiffe://prod/*a*"}), "at most one '*' between two slashes"),
        (rule(match={"dns": "*.b"}), "dns must have no '*'"),
        (rule(match={"dns": "a.b"}), "ids must be given with 'dns', because a DNS name has none"),
        (rule(ids="1-"), "ids has '1-': must be numbers and ranges, as '1-999, 2000'"),
        (rule(ids="9-1"), "ids has '9-1': the first number must not be above the last"),
        (rule(ids=",".join("1" for _ in range(MAX_RANGES + 1))), "ids has 65 ranges: must have at most 64"),
        (rule(ids=7), "clusters.0.ids is 7: Input should be a valid string"),
        (ANY | {"clusters": [RULE] * 257}, "clusters"),
        (" " * (1 << 16) + "{}", "has more than 65536 bytes"),
    ],
    ids=range(26),
)
def test_a_wrong_policy_is_refused_with_the_file_and_the_rule(content: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ParamInvalid) as caught:
        policy_of(tmp_path, content)
    assert why in str(caught.value)
    assert str(tmp_path / "policy.json") in str(caught.value)


def test_private_memory_is_said_with_the_rights(tmp_path: Path) -> None:
    assert policy_of(tmp_path, rule()).rights_of("decode", 1).private
    assert not policy_of(tmp_path, rule() | {"private_memory": False}).rights_of("decode", 1).private


def test_a_policy_that_others_may_write_is_refused_and_one_that_others_may_read_is_not(tmp_path: Path) -> None:
    folder = policy_in(folder_of(tmp_path, f"first {HEX}"), rule())
    (folder / "policy.json").chmod(0o644)
    assert read_policy(folder / "policy.json").clusters
    (folder / "policy.json").chmod(0o664)
    with pytest.raises(ParamInvalid, match="mode 0664: group and others must not be able to write it"):
        read_policy(folder / "policy.json")


def test_a_folder_reads_its_policy_again_when_it_has_changed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, f"first {HEX}")
    trust = TrustFolder(str(folder))
    assert trust.policy() is None
    policy_in(folder, ANY | {"otherwise": ["link"]})
    trust.current()
    policy = trust.policy()
    assert policy is not None
    assert policy.rights_of("first", 3) == PeerRights(link=True)
    policy_in(folder, ANY | {"otherwise": list(RIGHTS)})
    trust.current()
    policy = trust.policy()
    assert policy is not None
    assert policy.rights_of("first", 3) == EVERY_RIGHT
    (folder / "policy.json").unlink()
    for look in (trust.current, trust.policy):
        with pytest.raises(ParamInvalid, match=r"has no 'policy.json' now: must have one"):
            look()
    assert TrustFolder(str(folder)).policy() is None, "a process that begins without one"
    (folder / "policy.json").symlink_to(tmp_path / "nowhere")
    for look in (trust.current, trust.policy):
        with pytest.raises(ParamInvalid, match=r"policy.json' cannot be read: No such file"):
            look()


def test_a_policy_chooses_between_keys_and_certificates(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, f"first {HEX}")
    (folder / "tls.crt").touch()
    with pytest.raises(ParamInvalid, match=r"must have either, or a mode in policy.json"):
        TrustFolder(str(folder)).current()
    policy_in(folder, ANY | {"mode": "keys"})
    assert [key.name for key in TrustFolder(str(folder)).current()] == ["first"]
    policy_in(folder, ANY | {"mode": "tls"})
    with pytest.raises(ParamInvalid, match=r"the private key .*tls.key' cannot be read"):
        TrustFolder(str(folder)).current()


def test_the_text_of_a_policy_that_this_package_documents_is_valid() -> None:
    Policy.model_validate(json.loads(json.dumps(rule(ids="1-999"))))
