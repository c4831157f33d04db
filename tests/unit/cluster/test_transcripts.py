"""Elections written down: one rule a file, commands and what must come of them.

``KVTIERD_REWRITE=1 pytest tests/unit/cluster/test_transcripts.py`` writes the files anew; read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .stage import replay

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(path):
    text = path.read_text()
    played = replay(text)
    if os.environ.get("KVTIERD_REWRITE"):
        path.write_text(played)
    assert played == text


def test_there_are_transcripts_and_a_wrong_one_fails():
    assert len(FILES) > 10
    text = FILES[0].read_text()
    assert replay(text.replace("epoch 2", "epoch 3")) != text.replace("epoch 2", "epoch 3")
