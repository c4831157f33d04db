from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.endpoint.hop import (
    ANSWER_BYTES,
    HELLO_BYTES,
    Answer,
    Hello,
    HopProtocolError,
    Port,
    Verdict,
)

NAMES = st.text("abcxyz019._-", max_size=63)
EPOCHS = st.integers(0, 2**64 - 1)


@given(st.sampled_from(Port), EPOCHS, NAMES, NAMES, EPOCHS, st.booleans(), st.booleans())
def test_a_hello_comes_through(
    port: Port, epoch: int, cluster: str, node: str, era: int, joined: bool, question: bool
) -> None:
    hello = Hello(port, epoch, cluster, node, era=era, joined=joined, question=question)
    data = hello.encode()
    assert len(data) == HELLO_BYTES
    assert Hello.decode(data) == hello


def test_the_bytes_of_version_1_stay() -> None:
    data = Hello(Port.CONFIG_STORE, 258, "prod", "node-b", era=3, joined=True).encode()
    assert data[:24] == b"kvth\x01\x02\x00\x01" + bytes(6) + b"\x01\x02" + bytes(7) + b"\x03"
    assert data[24:88] == b"prod" + bytes(60)
    assert data[88:] == b"node-b" + bytes(58)
    answer = Answer(Verdict.STALE_EPOCH, 258, 2, 3).encode()
    assert answer == b"kvta\x01\x01\0\0" + bytes(6) + b"\x01\x02" + bytes(7) + b"\x02" + bytes(7) + b"\x03"
    assert len(answer) == ANSWER_BYTES


@given(st.binary(max_size=HELLO_BYTES + 8))
def test_other_bytes_are_refused_and_never_worse(data: bytes) -> None:
    for decode in (Hello.decode, Answer.decode):
        with pytest.raises(HopProtocolError, match=r"^(not-hop|other-version)$"):
            decode(data)


def test_another_version_is_told_from_nonsense() -> None:
    data = bytearray(Hello(Port.META, 1, "c", "n").encode())
    data[4] = 2
    with pytest.raises(HopProtocolError, match="other-version"):
        Hello.decode(bytes(data))


def test_an_answer_of_a_newer_endpoint_is_a_refusal_with_a_number() -> None:
    answer = Answer.decode(Answer(200, 1).encode())
    assert (answer.reason, Answer(Verdict.LATE_RETURN, 1).reason) == ("verdict-200", "late-return")
