"""A short ``kvtierctl bench compare`` over a demo node: documents that do not fit into the engine's own cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import platformdirs

from kvtierd.settings.load import DROP_IN_DIRECTORY
from kvtierd.workload.compare.sequence import Compared, Comparison, compare
from kvtierd.workload.dataset.convert import ConvertOptions, convert
from kvtierd.workload.dataset.sample import write_sample
from kvtierd.workload.demo import ENGINE, DemoNode, Say
from kvtierd.workload.load.runner import LoadSettings
from kvtierd.workload.load.start import RunRequest
from kvtierd.workload.report.write import Report, write_report

DOCUMENTS: Final = 4
WORDS: Final = 130  # about 750 bytes, which are the reference engine's tokens
L1: Final = "8MiB"  # room for two of them
MAX_TOKENS: Final = 8
READY_SECONDS: Final = 120.0


def report_directory() -> Path:
    """Where the report stays after the demo, each time anew."""
    return Path(platformdirs.user_cache_dir("kvtierd")) / "demo-report"


def compare_briefly(node: DemoNode, say: Say) -> tuple[Compared, Report]:
    """Four documents, each asked twice, in three modes; writes the report beside the user's other caches.

    Raises:
        KvtierError: a mode could not be set or measured, or the report cannot be written.
    """
    small = node.settings.parent / DROP_IN_DIRECTORY / "50-small-l1.toml"
    small.parent.mkdir(exist_ok=True)
    small.write_text(f'[[engine]]\nname = "{ENGINE}"\n[engine.args]\nl1 = "{L1}"\n', encoding="utf-8")
    raw, dataset = node.directory / "sample.jsonl", node.directory / "qa.jsonl"
    write_sample(raw, records=DOCUMENTS, shortest=WORDS, longest=WORDS, seed=1)
    convert(
        ConvertOptions(
            inputs=(raw,), output=dataset, min_length=0, max_length=WORDS, repeat=2, output_format="qa"
        )
    )
    output = report_directory()
    shutil.rmtree(output, ignore_errors=True)
    load = LoadSettings(model="", max_tokens=MAX_TOKENS, api="completions")
    comparison = Comparison(
        ENGINE, node.settings, RunRequest(dataset, node.directory / "compare", load), READY_SECONDS
    )
    done = compare(comparison, node.client, say=say)
    return done, write_report(done.last_passes, output)
