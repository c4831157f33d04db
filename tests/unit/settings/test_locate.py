import tomllib

from hypothesis import given
from hypothesis import strategies as st

from kvtierd.settings.locate import key_lines, line_of

TEXT = '''\
# a comment with [brackets] and = signs
top = 1
[a]
plain = "x # not a comment"
"quoted key" = 2
dotted.key = 3
multi = """
[not.a.table]
neither = 1
"""
array = [
  1, # one ]
  2,
]
after = 5
[a.b]   # with a comment
x = 1
[[list]]
x = 1
[list.sub]
y = 2
[[list]]
x = 3
'''


def test_every_kind_of_key_is_found():
    tomllib.loads(TEXT)  # the sample itself is valid
    lines = key_lines(TEXT)
    expected = {
        ("top",): 2, ("a",): 3, ("a", "plain"): 4, ("a", "quoted key"): 5, ("a", "dotted", "key"): 6,
        ("a", "multi"): 7, ("a", "array"): 11, ("a", "after"): 15, ("a", "b"): 16, ("a", "b", "x"): 17,
        ("list", 0): 18, ("list", 0, "x"): 19, ("list", 0, "sub"): 20, ("list", 0, "sub", "y"): 21,
        ("list", 1): 22, ("list", 1, "x"): 23,
    }  # fmt: skip
    assert {path: lines.get(path) for path in expected} == expected
    assert ("not", "a", "table") not in lines
    assert ("a", "neither") not in lines


def test_an_absent_key_is_shown_at_its_parent():
    lines = key_lines(TEXT)
    assert line_of(lines, ("a", "b", "missing")) == 16
    assert line_of(lines, ("nowhere",)) is None


@given(st.text(max_size=300))
def test_any_text_is_survived(text):
    count = len(text.splitlines())
    assert all(1 <= number <= count for number in key_lines(text).values())
