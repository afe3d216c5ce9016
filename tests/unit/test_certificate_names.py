"""The clusters that names in certificates stand for: one spelling each, and nothing that only looks like one."""

from __future__ import annotations

import pytest

from aiodatadist._config.certificate_names import CertificateNames, uri_id

MOST = 2**64 - 1


@pytest.mark.parametrize(
    ("uri", "cluster"),
    [
        ("spiffe://prod/cluster/7", 7),
        ("spiffe://prod/kv/prefill/cluster/7", 7),
        ("spiffe://prod.example.org/cluster/8/cluster/7", 7),
        ("spiffe://prod/a/../b/cluster/7", None),
        ("spiffe://prod/./cluster/7", None),
        ("spiffe://prod/kv//cluster/7", None),
        ("spiffe://prod/.../cluster/7", 7),
        (f"spiffe://prod/cluster/{MOST}", MOST),
        ("aiodatadist://cluster/0", 0),
        ("aiodatadist://cluster/7", 7),
        (f"spiffe://prod/cluster/{MOST + 1}", None),
        ("spiffe://prod/cluster/07", None),
        ("spiffe://prod/cluster/+7", None),
        ("spiffe://prod/cluster/7/", None),
        ("spiffe://prod/cluster/7\n", None),
        ("spiffe://prod/cluster/7\0", None),
        ("spiffe://prod/cluster/7?x=1", None),
        ("spiffe://prod/cluster/7#x", None),
        ("spiffe://prod/cluster/%37", None),
        ("spiffe://prod/cluster/\u0667", None),
        ("spiffe://prod/cluster/", None),
        ("spiffe://prod/mycluster/7", None),
        ("spiffe://prod/Cluster/7", None),
        ("spiffe:///cluster/7", None),
        ("spiffe://user@prod/cluster/7", None),
        ("spiffe://prod:443/cluster/7", None),
        ("SPIFFE://prod/cluster/7", None),
        ("https://prod/cluster/7", None),
        ("x spiffe://prod/cluster/7", None),
        ("aiodatadist://prod/cluster/7", None),
        ("aiodatadist://cluster/7/8", None),
        (f"spiffe://prod/{'a' * 2048}/cluster/7", None),
        ("", None),
    ],
)
def test_a_uri_names_at_most_one_cluster(uri: str, cluster: int | None) -> None:
    assert uri_id(uri) == cluster


def test_a_long_uri_that_names_no_cluster_costs_no_more_than_its_length() -> None:
    """A pattern that went back would take longer than this test may."""
    assert uri_id("spiffe://prod" + "/cluster" * 250) is None


def test_a_certificate_is_for_the_clusters_that_its_uris_name() -> None:
    names = CertificateNames([("URI", "https://x"), ("URI", "spiffe://a/cluster/7"), ("URI", "spiffe://b/cluster/8")])
    assert [names.name_for(each) for each in (7, 8, 9)] == ["spiffe://a/cluster/7", "spiffe://b/cluster/8", None]
    assert names.clusters() == "clusters 7, 8"
    assert names.any == "spiffe://a/cluster/7"


def test_a_name_of_another_kind_names_no_cluster() -> None:
    uri = "spiffe://a/cluster/7"
    names = CertificateNames([("DNS", uri), ("email", uri), ("Registered ID", uri), ("DirName", uri)])
    assert names.name_for(7) is None
    assert names.clusters() == "no cluster"


def test_a_dns_name_is_for_the_clusters_that_the_policy_lists() -> None:
    """A name is compared as a whole and without case. A name with a * in the certificate stands for no other name."""
    listed = {"decode.example": [range(10, 20), range(42, 43)], "*.example": [range(5)]}

    names = CertificateNames([("DNS", "DECODE.example"), ("DNS", "other.example")], listed)
    found = [names.name_for(each) for each in (10, 19, 20, 42, 1)]
    assert found == [*["decode.example"] * 2, None, "decode.example", None]
    assert names.clusters() == "clusters 10-19, 42"
    assert CertificateNames([("DNS", "decode.example")]).name_for(10) is None
    assert CertificateNames([("DNS", "decode.example.")], listed).name_for(10) is None


def test_a_message_lists_few_of_many_clusters() -> None:
    names = CertificateNames([("URI", f"spiffe://a/cluster/{number}") for number in range(300)])
    assert names.clusters() == "clusters 0, 1, 2, 3, ..."
    assert names.name_for(299) == "spiffe://a/cluster/299"


def test_a_certificate_without_names_is_for_no_cluster() -> None:
    names = CertificateNames([])
    assert (names.any, names.clusters(), names.name_for(0)) == ("", "no cluster", None)
