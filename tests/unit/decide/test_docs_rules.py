"""docs/observability.md has every rule and every key of [policy] with its default, and none that is gone."""

import re
from pathlib import Path

from kvpack.keys import tables

from kvtierd.decide.policy import RULES

PAGE = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()
SECTION = PAGE[PAGE.index("\n## Rules\n") :]
SECTION = SECTION[: SECTION.index("\n## ", 5)] if "\n## " in SECTION[5:] else SECTION


def part(title):
    text = SECTION[SECTION.index(f"### {title}\n") :]
    return text[: text.index("\n### ", 5)] if "\n### " in text[5:] else text


def test_every_rule_is_documented_and_no_other():
    assert re.findall(r"^\| `([\w-]+)` \|", part("What each rule does"), re.MULTILINE) == list(RULES)


def test_every_key_is_documented_with_its_default_and_no_other():
    table = next(t for t in tables() if t.header == "[policy]")
    rows = re.findall(r"^\| `(\w+)` \| `([^|]*)` \| (.+) \|$", part("`[policy]`"), re.MULTILINE)
    assert rows == [(k.name, k.default, k.description) for k in table.keys]


def test_a_key_named_for_a_rule_stands_in_that_rules_row():
    """A description that begins with a rule's name is about a number of that rule: its row must name the key."""
    table = next(t for t in tables() if t.header == "[policy]")
    text = part("What each rule does") + part("Limits")
    missing = [
        k.name
        for k in table.keys
        if k.description.split(":")[0].split(",")[0] in RULES and f"`{k.name}`" not in text
    ]
    assert missing == []
