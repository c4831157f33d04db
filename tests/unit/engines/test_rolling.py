from hypothesis import given
from hypothesis import strategies as st

from kvtierd.engines.rolling import Member, next_to_restart


def group(**ready):
    return {name: Member(name, "g", is_ready) for name, is_ready in ready.items()}


def test_one_of_a_group_goes_when_another_is_ready():
    assert next_to_restart(["a", "b"], group(a=True, b=True)) == "a"


def test_the_last_ready_one_of_a_group_waits_for_the_others():
    members = group(a=True, b=False)
    assert next_to_restart(["a"], members) is None
    assert next_to_restart(["a", "b"], members) == "b", "it is down anyway"


def test_a_lonely_engine_may_go_and_so_may_the_only_one_of_a_group():
    assert next_to_restart(["a"], {"a": Member("a", None, True), "b": Member("b", None, True)}) == "a"
    assert next_to_restart(["a"], group(a=True)) == "a"


def test_never_two_down_at_once():
    members = {"a": Member("a", "g", True), "b": Member("b", "g", True), "c": Member("c", None, False)}
    assert next_to_restart(["a"], members) is None


def test_what_is_no_longer_there_is_passed_over():
    assert next_to_restart(["gone", "a"], group(a=True, b=True)) == "a"
    assert next_to_restart([], group(a=True)) is None


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.sampled_from([None, "g", "h"]), st.booleans()), min_size=1),
    st.permutations(list("abcdef")),
)  # fmt: skip
def test_a_group_with_a_ready_member_keeps_one(shape, order):
    members = {name: Member(name, group, ready) for name, (group, ready) in shape.items()}
    chosen = next_to_restart(order, members)
    if chosen is None:
        return
    mates = [m for m in members.values() if m.group is not None and m.group == members[chosen].group]
    if members[chosen].ready and len(mates) > 1:
        assert any(m.ready for m in mates if m.unit_id != chosen)
