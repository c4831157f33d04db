from __future__ import annotations

import pytest

from kvtierd.endpoint.names import certificate_names, dns_names, speaks_for
from kvtierd.errors import EndpointError


def test_the_names_of_a_certificate() -> None:
    assert certificate_names("node-a", "prod") == ("node-a", "node-a.prod.kvtierd")
    assert certificate_names("a.example.org", "prod") == ("a.example.org", "a.example.org.prod.kvtierd")


@pytest.mark.parametrize(
    ("node", "cluster"),
    [("", "c"), ("a", ""), ("a b", "c"), ("A", "c"), ("a", "b.c"), ("*", "c"), ("a" * 64, "c"), (".a", "c")],
)
def test_what_cannot_be_a_name(node: str, cluster: str) -> None:
    with pytest.raises(EndpointError) as caught:
        certificate_names(node, cluster)
    assert caught.value.stable_code == "endpoint.names"


@pytest.mark.parametrize(
    ("carried", "speaks"),
    [
        (("node-a", "node-a.prod.kvtierd"), True),
        (("NODE-A.PROD.KVTIERD",), True),
        (("node-a",), True),  # somebody else's authority
        (("node-a", "node-a.test.kvtierd"), False),  # of another cluster, and its plain name does not help
        (("node-b", "node-b.prod.kvtierd"), False),
        (("*.prod.kvtierd",), False),
        (("*",), False),
        (("node-a.prod.kvtierd.example.org",), False),
        ((), False),
    ],
)
def test_whose_certificate_it_is(carried: tuple[str, ...], speaks: bool) -> None:
    assert speaks_for(carried, "node-a", "prod") is speaks


def test_names_from_what_ssl_gives() -> None:
    found = {"subjectAltName": (("DNS", "node-a"), ("IP Address", "10.0.0.1"), ("DNS", "x.prod.kvtierd"))}
    assert dns_names(found) == ("node-a", "x.prod.kvtierd")
    assert dns_names({}) == ()
    assert dns_names(None) == ()
