"""What README and docs/install.md tell people to type is one and the same, and is what the package tests do."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def blocks(file):
    return dict(
        re.findall(r"<!-- tested: (\w+) -->\n```console\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)
    )


def test_the_install_section_is_what_the_test_does():
    documented = blocks("docs/install.md")
    assert documented.keys() == {"install", "plugin"}
    assert blocks("README.md") == {"install": documented["install"]}
    test = (ROOT / "tests/packaging/test_install.py").read_text()
    for mark in documented:
        assert f'commands("{mark}")' in test


def test_directories_of_plugins_are_those_of_the_interpreter():
    from kvpack.stage import PLUGIN_DIRECTORIES

    text = (ROOT / "docs/install.md").read_text()
    assert all(f"`{directory}`" in text for directory in PLUGIN_DIRECTORIES)


def test_the_exposure_told_is_the_one_tested():
    assert "says 3.0" in (ROOT / "docs/install.md").read_text()
