"""Configuration for AISBench out of the settings of a run, so that both tools can measure the same thing.

Writes a directory for ``ais_bench --config-dir``: a model file, a dataset file, and the prompts in AISBench's form. Written
for ais-bench-benchmark 3.0 and 3.1.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvtierd.errors import WorkloadError
from kvtierd.files import write_atomic
from kvtierd.workload.load.client import Api
from kvtierd.workload.load.http_stream import Origin, read_origin
from kvtierd.workload.load.prompts import Session

MODEL: Final = "kvtierd_model"
DATASET: Final = "kvtierd_dataset"
# AISBench counts tries, not retries: with 0 it sends nothing and calls every request failed.
TRIES: Final = 1

_MODEL_FILE: Final = """\
# Written by kvtierctl bench aisbench-config.
from ais_bench.benchmark.models import {type}

models = [
    dict(
        attr="service",
        type={type},
        abbr="kvtierd",
        path={tokenizer!r},  # AISBench counts tokens with the tokenizer of this directory
        model={model!r},
        stream=True,
        request_rate={rate!r},  # 0: as fast as batch_size allows
        retry={tries},
        api_key="",  # put it in by hand if the server wants one; this file is readable by others
        host_ip={host!r},
        host_port={port!r},
        url={url!r},
        max_out_len={max_tokens!r},
        batch_size={concurrency!r},
        trust_remote_code=False,
        enable_ssl={tls!r},
        generation_kwargs=dict(temperature=0, ignore_eos={ignore_eos!r}),
    )
]
"""

_QA_FILE: Final = """\
# Written by kvtierctl bench aisbench-config.
from ais_bench.benchmark.datasets import CustomDataset
from ais_bench.benchmark.openicl.icl_evaluator import AccEvaluator
from ais_bench.benchmark.openicl.icl_inferencer import GenInferencer
from ais_bench.benchmark.openicl.icl_prompt_template import PromptTemplate
from ais_bench.benchmark.openicl.icl_retriever import ZeroRetriever

kvtierd_datasets = [
    dict(
        abbr="qa",
        type=CustomDataset,
        path={path!r},
        meta_path="",
        reader_cfg=dict(input_columns=["question"], output_column="answer"),
        infer_cfg=dict(
            # The question alone: AISBench's own template would put words around it.
            prompt_template=dict(
                type=PromptTemplate,
                template=dict(round=[dict(role="HUMAN", prompt="{{question}}")]),
            ),
            retriever=dict(type=ZeroRetriever),
            inferencer=dict(type=GenInferencer),
        ),
        eval_cfg=dict(evaluator=dict(type=AccEvaluator), pred_role="BOT"),
    )
]
"""

_CHAT_FILE: Final = """\
# Written by kvtierctl bench aisbench-config.
from ais_bench.benchmark.datasets import ShareGPTDataset, ShareGPTEvaluator
from ais_bench.benchmark.openicl.icl_inferencer import MultiTurnGenInferencer
from ais_bench.benchmark.openicl.icl_prompt_template import MultiTurnPromptTemplate
from ais_bench.benchmark.openicl.icl_retriever import ZeroRetriever

kvtierd_datasets = [
    dict(
        abbr="chat",
        type=ShareGPTDataset,
        disable_shuffle=True,
        path={path!r},
        reader_cfg=dict(input_columns=["question", "answer"], output_column="answer"),
        infer_cfg=dict(
            prompt_template=dict(
                type=MultiTurnPromptTemplate,
                template=dict(
                    round=[
                        dict(role="HUMAN", prompt="{{question}}"),
                        dict(role="BOT", prompt="{{answer}}"),
                    ]
                ),
            ),
            retriever=dict(type=ZeroRetriever),
            # every: each turn is a request, and the server's own answers make the history.
            inferencer=dict(type=MultiTurnGenInferencer, infer_mode="every"),
        ),
        eval_cfg=dict(evaluator=dict(type=ShareGPTEvaluator)),
    )
]
"""


class AisBench(NamedTuple):
    """What was written, and the command that uses it (words, no shell)."""

    files: list[Path]
    command: list[str]
    notes: list[str]

    @property
    def shown(self) -> str:
        """The command for a shell."""
        return shlex.join(self.command)


def write_config(
    output: Path,
    sessions: Sequence[Session],
    *,
    url: str,
    model: str,
    tokenizer: Path,
    concurrency: int,
    max_tokens: int,
    rate: float = 0.0,
    api: Api = "chat",
    ignore_eos: bool = True,
) -> AisBench:
    """Writes the directory.

    Raises:
        WorkloadError: chats over /v1/completions, which AISBench cannot do.
        StateError: it cannot be written.
    """
    output = output.absolute()
    origin = read_origin(url)
    questions = [(s.id, s.system, s.questions()) for s in sessions]
    several = any(len(q) > 1 for _, _, q in questions)
    if several and api != "chat":
        raise WorkloadError(
            "AISBench sends chats of several turns to /v1/chat/completions only",
            hint="--api chat",
            code="load.api",
        )
    notes = []
    if any(system for _, system, _ in questions):
        notes.append("AISBench has no system messages: they stand at the head of the first question")
    data, template = (output / "chat.json", _CHAT_FILE) if several else (output / "qa.jsonl", _QA_FILE)
    contents = {
        data: _chats(questions) if several else _questions(questions),
        output / "models" / f"{MODEL}.py": _model(
            origin, model, tokenizer, concurrency, max_tokens, rate, api, ignore_eos=ignore_eos
        ),
        output / "datasets" / f"{DATASET}.py": template.format(path=str(data)),
    }
    for path, text in contents.items():
        write_atomic(path, text.encode("utf-8", errors="replace"))
    command = [
        "ais_bench", "--config-dir", str(output), "--models", MODEL, "--datasets", DATASET, "--mode", "perf",
        "--num-warmups", "0", "--work-dir", str(output / "results"),
    ]  # fmt: skip
    return AisBench(sorted(contents), command, notes)


def _model(
    origin: Origin, model: str, tokenizer: Path, concurrency: int, max_tokens: int, rate: float, api: Api,
    *, ignore_eos: bool,
) -> str:  # fmt: skip
    return _MODEL_FILE.format(
        type="VLLMCustomAPIChat" if api == "chat" else "VLLMCustomAPI",
        tokenizer=str(tokenizer.absolute()),
        model=model,
        rate=rate,
        tries=TRIES,
        host=origin.host,
        port=origin.port,
        url=origin.url if origin.prefix else "",
        max_tokens=max_tokens,
        concurrency=concurrency,
        tls=origin.scheme == "https",
        ignore_eos=ignore_eos,
    )


def _first(system: str, questions: tuple[str, ...]) -> tuple[str, ...]:
    return (f"{system}\n\n{questions[0]}", *questions[1:]) if system else questions


def _questions(sessions: Sequence[tuple[str, str, tuple[str, ...]]]) -> str:
    rows = ({"question": _first(system, q)[0], "answer": ""} for _, system, q in sessions)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _chats(sessions: Sequence[tuple[str, str, tuple[str, ...]]]) -> str:
    chats: list[dict[str, Any]] = []
    for identity, system, questions in sessions:
        turns: list[dict[str, str]] = []
        for question in _first(system, questions):
            # An answer with text would set the length of this turn's answer to its own; an empty one leaves it to
            # max_out_len.
            turns += [{"from": "human", "value": question}, {"from": "gpt", "value": ""}]
        chats.append({"id": identity, "conversations": turns})
    return json.dumps(chats, ensure_ascii=False, indent=1)
