"""What README and docs/install.md tell people to type is one and the same, and is what the tests do."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
TESTED_IN = {
    "install": "systemd/test_installed.py",
    "rpm": "systemd/test_installed_rpm.py",
    "plugin": "packaging/test_install.py",
    "container": "packaging/test_container.py",
}


def blocks(file):
    return dict(
        re.findall(r"<!-- tested: (\w+) -->\n```console\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)
    )


def test_the_install_section_is_what_the_test_does():
    documented = blocks("docs/install.md")
    assert documented.keys() == set(TESTED_IN)
    assert blocks("README.md") == {"install": documented["install"]}
    for mark, file in TESTED_IN.items():
        assert f'("{mark}")' in (ROOT / "tests" / file).read_text()


def test_directories_of_plugins_are_those_of_the_interpreter():
    from kvpack.stage import PLUGIN_DIRECTORIES

    text = (ROOT / "docs/install.md").read_text()
    assert all(f"`{directory}`" in text for directory in PLUGIN_DIRECTORIES)


def test_the_exposure_told_is_the_one_tested():
    assert "says 3.0" in (ROOT / "docs/install.md").read_text()
