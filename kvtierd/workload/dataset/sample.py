"""A small dataset in the form of LongBench's files, made here from a text that kvtierd brings along."""

from __future__ import annotations

import hashlib
import json
import random
import re
from importlib import resources
from pathlib import Path

from kvtierd.files import replacing

TEXT = "alice_in_wonderland.txt"


def write_sample(output: Path, *, records: int, shortest: int, longest: int, seed: int) -> None:
    """Writes ``records`` of ``shortest`` to ``longest`` words; the same seed gives the same bytes.

    Fields as in LongBench: input, context, answers, length (words), dataset, language, all_classes, _id. Each context
    begins with its own number and is put together from sentences at random, so no two share a beginning.

    Raises:
        StateError: the output cannot be written.
    """
    text = resources.files("kvtierd.data").joinpath(TEXT).read_text(encoding="utf-8")
    sentences = [" ".join(s.split()) for s in re.split(r"(?<=[.!?])\s+", text) if len(s.split()) > 3]
    chance = random.Random(seed)
    with replacing(output) as stream:
        for number in range(records):
            wanted = chance.randint(shortest, longest)
            words = [f"Document {number + 1} of sample {seed}."]
            count = len(words[0].split())
            while count < wanted:
                sentence = chance.choice(sentences)
                words.append(sentence)
                count += len(sentence.split())
            context = " ".join(" ".join(words).split()[:wanted])
            record = {
                "input": "",
                "context": context,
                "answers": [chance.choice(sentences)],
                "length": len(context.split()),
                "dataset": "kvtierd_sample",
                "language": "en",
                "all_classes": None,
                "_id": hashlib.sha256(context.encode()).hexdigest()[:48],
            }
            stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
