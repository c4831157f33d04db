"""The run of doctor that the README shows is a real one."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_readme_shows_what_doctor_says():
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"\$ \.venv/bin/kvtierctl (doctor [^\n]*)\n(.*?)```", readme, re.DOTALL)
    assert shown
    done = subprocess.run(
        [sys.executable, "-m", "kvtierd.cli", *shown[1].split()],
        cwd=ROOT, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "COLUMNS": "100"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines()) == shown[2]
