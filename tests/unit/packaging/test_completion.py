"""Completion in real shells."""

import functools
import shutil
import subprocess

import pytest
from kvpack import completion, verbs

bash_script = functools.cache(completion.bash)  # every verb's help is looked through: seconds
VERBS = verbs.verbs()


def bash_offers(tmp_path, line):
    """What bash offers for the last word of a command line."""
    script = tmp_path / "kvtierctl"
    script.write_text(bash_script())
    program = f"""
        source {script}
        COMP_WORDS=({" ".join(f"'{w}'" for w in line)}); COMP_CWORD={len(line) - 1}
        _kvtierctl; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_bash_offers_every_verb(tmp_path):
    assert {v.words[0] for v in VERBS} <= bash_offers(tmp_path, ["kvtierctl", ""])


@pytest.mark.parametrize("verb", VERBS, ids=lambda v: " ".join(v.words))
def test_bash_offers_every_option_of_a_verb(tmp_path, verb):
    expected = {opt for param in verb.options for opt in param.opts if opt.startswith("--")}
    assert bash_offers(tmp_path, ["kvtierctl", *verb.words, "--"]) == expected


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        (["kvtierctl", "sta"], {"status", "start"}),
        (["kvtierctl", "conf", ""], {"check"}),
        (["kvtierctl", "hugepages", "re"], {"reserve", "release"}),
        (["kvtierctl", "--settings", "/etc/x", "sta"], {"status", "start"}),
        (["kvtierctl", "logs", "--lines", ""], set()),
        (["kvtierctl", "plan", "--inventory", "here"], {"here.json"}),
        (["kvtierctl", "conf", "check", "here"], {"here.json"}),
    ],
)
def test_bash_by_example(tmp_path, line, offers):
    (tmp_path / "here.json").touch()
    assert bash_offers(tmp_path, line) == offers


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_offers_verbs_and_options(tmp_path):
    (tmp_path / "_kvtierctl").write_text(completion.zsh())
    # A terminal of zsh's own, in which the keys are pressed and what is listed can be read.
    program = f"""
        zmodload zsh/zpty
        zpty shell zsh -f -i
        zpty -w shell 'PS1=">"; fpath=({tmp_path} $fpath); autoload -U compinit; compinit -u -D; LISTMAX=999'
        zpty -w shell 'stty rows 60 cols 150'
        zpty -w shell 'print READY$((1 + 1))'; zpty -r shell output '*READY2*'
        zpty -w -n shell $'kvtierctl \\t'; zpty -r shell more '*version*'; output+=$more
        zpty -w -n shell $'\\x15kvtierctl hugepages --\\t'; zpty -r shell more '*--json*'; output+=$more
        zpty -w -n shell $'\\x15kvtierctl conf \\t'; zpty -r shell more '*check*'; output+=$more
        while zpty -r -t shell more; do output+=$more; done
        print -r -- $output
    """
    done = subprocess.run(["zsh", "-f", "-c", program], capture_output=True, text=True, timeout=60)
    for word in (*(v.words[0] for v in VERBS), "--settings", "--json", "check"):
        assert word in done.stdout, word
