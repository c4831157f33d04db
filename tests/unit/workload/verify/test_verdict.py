import pytest

from kvtierd.plan.engine import TierTokens
from kvtierd.workload.verify.verdict import (
    Step,
    Stored,
    enough_restored,
    judge_again,
    judge_cold,
    judge_restored,
    judge_texts,
    judge_warm,
)


def step(l1=0, l2=None, l3=0, text="t", prompt=1000):
    return Step("cold", TierTokens(prompt=prompt, l1=l1, l2=l2, l3=l3), text, 0.1)


WARM = step(l1=960)


def code(fault):
    return None if fault is None else fault.code


@pytest.mark.parametrize(
    ("cold", "expected"),
    [
        (step(), None),
        (step(l1=100), None),  # a block at the head that every prompt shares
        (step(l1=101), "not-cold"),
        (step(l3=900), "not-cold"),
        (step(l1=50, l2=50, l3=50), "not-cold"),
        (step(l1=None, l3=None), "details-off"),
    ],
)
def test_cold(cold, expected):
    assert code(judge_cold(cold)) == expected


@pytest.mark.parametrize(
    ("warm", "expected"),
    [
        (WARM, None),
        (step(l1=960, l2=0), None),
        (step(), "no-l1-hit"),
        (step(l1=500, l2=460), "l1-incomplete"),
        (step(l1=500, l3=460), "l1-incomplete"),
        (step(l1=None), "details-off"),
    ],
)
def test_warm(warm, expected):
    assert code(judge_warm(warm)) == expected


ALL_WRITTEN = Stored(written_tokens=960, has_l3=True)


@pytest.mark.parametrize(
    ("restored", "stored", "expected"),
    [
        (step(l3=960), ALL_WRITTEN, None),
        (step(l3=864), ALL_WRITTEN, None),
        (step(l3=863), ALL_WRITTEN, "partly-restored"),
        (step(l3=500), Stored(960, True, l2_capacity_tokens=512), "host-too-small"),
        (step(l3=500), Stored(960, True, l2_capacity_tokens=5000), "partly-restored"),
        (step(l3=0), ALL_WRITTEN, "not-prefetched"),
        (step(l3=0), Stored(written_tokens=0, has_l3=True), "not-persisted"),
        (step(l3=500), Stored(written_tokens=500, has_l3=True), "not-persisted"),
        (step(l3=0), Stored(written_tokens=None, has_l3=True), "not-restored"),
        (step(l3=0), Stored(written_tokens=None, has_l3=None), "not-restored"),
        (step(l3=0), Stored(has_l3=False), "no-l3"),
        (step(l3=0), Stored(960, True, after_restart=True), "hash-seed"),
        (step(l3=0), Stored(960, True, after_restart=True, hash_seed="random"), "hash-seed"),
        (step(l3=0), Stored(960, True, after_restart=True, hash_seed="0"), "not-prefetched"),
        (step(l1=960), ALL_WRITTEN, "flush-no-effect"),
        (step(l2=960), ALL_WRITTEN, "flush-no-effect"),
        (step(l1=None, l3=None), ALL_WRITTEN, "details-off"),
    ],
)
def test_restored(restored, stored, expected):
    fault = judge_restored(WARM, restored, stored)
    assert code(fault) == expected
    assert fault is None or fault.hint
    assert enough_restored(WARM, restored) == (expected is None)


@pytest.mark.parametrize(
    ("texts", "expected", "remark"),
    [
        ("aaaa", None, ""),
        ("baaa", None, "when it computes the prompt"),
        ("bbab", "wrong-text", ""),
        ("aaba", "wrong-text", ""),
        ("abaa", None, "L3 agrees with the computed one"),
        ("abcd", "engine-differs", ""),
        ("aaab", None, "not deterministic"),
    ],
)
def test_texts(texts, expected, remark):
    fault, said = judge_texts(*(step(text=text) for text in texts))
    assert code(fault) == expected
    assert (remark in said) if remark else not said


def test_again():
    assert judge_again(step(l1=900)) is None
    assert code(judge_again(step(l1=0))) == "not-in-l1-again"
