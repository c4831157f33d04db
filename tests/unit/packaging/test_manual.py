"""The man pages: everything is in them, and they are well-formed."""

import re
import shutil
import subprocess

import pytest
from kvpack import keys, man, roff, verbs

PAGES = man.pages("1.2.3", "2026-01-31")


def plain(page):
    """The page's words: macros and escapes away."""
    text = re.sub(r"\\f[BIR]|\\&", "", PAGES[page])
    return text.replace("\\-", "-").replace("\\e", "\\").replace("\\(dq", '"')


@pytest.mark.parametrize("verb", verbs.verbs(), ids=lambda v: " ".join(v.words))
def test_kvtierctl_1_has_every_verb_with_all_it_takes(verb):
    text = plain("kvtierctl.1")
    heading = " ".join(verb.words)
    section = re.split(rf'(?m)^\.SS "{heading}\b[^\n]*$', text)[1].split("\n.S")[0]
    for param in verb.params:
        for word in param.opts if param.is_option else (param.metavar,):
            assert word in section
        assert " ".join(param.help.split()[:3]) in " ".join(section.split())


def test_the_verbs_are_those_of_the_program():
    assert {"status", "hugepages", "conf check", "plugin new"} <= {" ".join(v.words) for v in verbs.verbs()}
    hugepages = next(v for v in verbs.verbs() if v.words == ("hugepages",))
    assert hugepages.arguments[0].choices == ("show", "reserve", "release")
    assert not hugepages.arguments[0].required


@pytest.mark.parametrize("table", keys.tables(), ids=lambda t: t.header)
def test_kvtierd_toml_5_has_every_key(table):
    text = plain("kvtierd.toml.5")
    section = text.split(f'.SH "{table.header}"', 1)[1].split("\n.SH")[0]
    for key in table.keys:
        assert f"\n{key.name} ({key.kind}" in section
        if key.default is not None:
            assert f"default {key.default})" in section


def test_kvtierd_8_has_options_signals_and_files():
    text = plain("kvtierd.8")
    for word in (
        "--settings",
        "--version",
        "SIGHUP",
        "SIGTERM",
        "/etc/kvtierd/kvtierd.toml",
        "kvtierd-hugepages.service",
    ):
        assert word in text


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_well_formed(page, tmp_path):
    file = tmp_path / page
    file.write_text(PAGES[page])
    assert PAGES[page].startswith(".TH ")
    assert PAGES[page].isascii()
    if shutil.which("mandoc"):
        done = subprocess.run(["mandoc", "-Tlint", "-Wstyle", str(file)], capture_output=True, text=True)
        assert done.stdout + done.stderr == ""
    elif shutil.which("man"):
        command = ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0
        assert done.stderr == ""
    else:
        pytest.skip("neither mandoc nor man is installed")


def test_text_cannot_become_a_macro():
    page = roff.Page("x", 1, version="1", date="2026-01-01", summary="y")
    page.text(".SH not a heading", "'quoted at the start", "back\\slash and ~/.config")
    lines = page.render().splitlines()
    assert "\\&.SH not a heading" in lines
    assert "\\&'quoted at the start" in lines
    assert "back\\eslash and \\(ti/.config" in lines
    assert not [line for line in lines if line.startswith(".SH not")]
