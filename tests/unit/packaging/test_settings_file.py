"""The settings file the packages install, and kvtierd.toml(5)."""

import re
import tomllib

import pytest
from kvpack import conffile, keys

from kvtierd.settings import Settings, check_settings

TEXT = conffile.render()


def test_the_installed_file_is_valid_as_it_is_and_changes_only_what_must_be_said(tmp_path):
    file = tmp_path / "kvtierd.toml"
    file.write_text(TEXT)
    settings, problems = check_settings(file, {})
    assert problems == ()
    assert settings == Settings.model_validate({"pool": {"dram": "32GiB"}})


def test_every_default_shown_is_the_default(tmp_path):
    """A key that is uncommented stands in the right table and changes nothing."""
    file = tmp_path / "kvtierd.toml"
    single = TEXT.split("\n#[[")[0]
    uncommented = re.sub(r"(?m)^#(\w+ = )", r"\1", single)
    assert uncommented.count("\n") == single.count("\n")
    assert uncommented != single
    file.write_text(uncommented)
    settings, problems = check_settings(file, {})
    assert problems == ()
    assert settings == Settings.model_validate({"pool": {"dram": "32GiB"}})


def test_examples_of_an_engine_are_toml():
    engine = TEXT.split("\n#[[engine]]")[1].split("\n# kvtierd itself")[0]
    lines = re.findall(r"(?m)# for example: (.+)$", engine)
    assert tomllib.loads("\n".join(lines))["devices"] == [0, 1]


@pytest.mark.parametrize("table", keys.tables(), ids=lambda t: t.header)
def test_every_key_is_in_the_file_with_its_description(table):
    part = TEXT.split(f"\n{'#' if table.means_something else ''}{table.header}\n", 1)[1]
    for key in table.keys:
        assert re.search(
            rf"(?m)^(#?{key.name} = |# for example: {key.name} = |# {key.name}: not set)", part
        ), key.name
        assert key.description.split()[0] in part


def test_all_tables_of_the_model_are_there():
    headers = {re.sub(r"[\[\]]", "", t.header).split(".")[0] for t in keys.tables()}
    assert headers == set(Settings.model_fields)


@pytest.mark.parametrize(
    ("value", "as_toml"),
    [
        (True, "true"),
        ('a "b" \\c', '"a \\"b\\" \\\\c"'),
        ({"max-model-len": 1, "a.b": "x"}, '{ max-model-len = 1, "a.b" = "x" }'),
        ((), "[]"),
        ({}, "{}"),
        ([{"name": "a"}], '[{ name = "a" }]'),
    ],
)
def test_values_as_toml(value, as_toml):
    assert keys.toml_value(value) == as_toml
    assert tomllib.loads(f"x = {as_toml}")["x"] == (list(value) if isinstance(value, tuple) else value)
