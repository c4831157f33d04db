"""Datasets and request traces as blocks of prompts, in the order in which they are asked.

Forms: QA pairs, ShareGPT, OpenAI messages, Mooncake's trace (block ids instead of text), and a vLLM log that was written
with ``--enable-log-requests``. Text becomes tokens by the engine's tokenizer, or by UTF-8 bytes when there is none. A
block is ``block_tokens`` tokens; the rest of a prompt that fills no block is not cached, as in the engines.

A conversation is one request for each question, with everything before it in its prompt. What the prompt looks like
in detail is the engine's chat template's affair: here each message is its role, a line break and its text.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from kvtierd.errors import WorkloadError
from kvtierd.workload.dataset.conversations import (
    Conversation,
    Form,
    TraceRequest,
    dataset_form,
    read_conversations,
    read_mooncake,
)
from kvtierd.workload.dataset.records import Progress, Skips, read_lines
from kvtierd.workload.needs import need
from kvtierd.workload.sizing.curve import BlockTrace

TraceForm = Literal["qa", "sharegpt", "openai", "mooncake", "vllm-log"]

_BATCH_BLOCKS: Final = 1_000_000
_PROBED: Final = 200  # requests that tell a trace's block size
_AGREE: Final = 0.9
_USUAL_BLOCKS: Final = (512, 128, 16, 64, 256, 1024, 32, 2048)  # tokens; Mooncake's own traces have 512
_LOG_LINES: Final = 20_000  # without a request among them it is no log of requests
_MASK: Final = (1 << 64) - 1

# vLLM's line of a request: the prompt as Python writes a string, and perhaps its tokens.
_LOGGED: Final = "Received request "
_PROMPT: Final = re.compile(
    r"""prompt: ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"), (?:params|sampling_params): """
)
_TOKEN_IDS: Final = re.compile(r"prompt_token_ids: \[(\d+(?:, \d+)*)\]")

Encode = Callable[[str], Sequence[int]]


@dataclasses.dataclass(slots=True)
class TraceFacts:
    """What was read, and in which way: to be said beside the curve.

    ``block_tokens`` is that of the trace, which for one with block ids need not be the one that was asked for.
    """

    form: TraceForm
    block_tokens: int
    unit: Literal["tokens", "bytes"]
    short_requests: int = 0  # without one whole block: they can never hit
    requests: int = 0
    backwards: int = 0  # requests with a time before that of the one in front of them
    notes: list[str] = dataclasses.field(default_factory=list)


def read_trace(
    path: Path,
    *,
    block_tokens: int,
    skips: Skips,
    form: TraceForm | None = None,
    tokenizer: Path | None = None,
    concurrent: int = 1,
    rate: float | None = None,
    progress: Progress | None = None,
) -> tuple[BlockTrace, TraceFacts]:
    """Reads all of it.

    Args:
        path: The file; gzip and zstd are unpacked.
        block_tokens: The engine's block size in tokens.
        skips: Counts what could not be used.
        form: ``None``: told by the first record.
        tokenizer: ``tokenizer.json``, or a directory that has one. ``None``: one byte of text is one token.
        concurrent: So many conversations go on at a time, in turns; 1: one after the other.
        rate: Share of the blocks to look at; see :class:`BlockTrace`.
        progress: Is told how many bytes have been read.

    Raises:
        WorkloadError: ``sizing.form``, ``sizing.tokenizer``, ``sizing.block-size``, and those of reading datasets.
    """
    form = form or trace_form(path)
    trace = BlockTrace(rate=rate)
    if form == "mooncake":
        facts = TraceFacts("mooncake", block_tokens, "tokens")
        _add_mooncake(trace, facts, read_mooncake(path, skips=skips, progress=progress))
        return trace, facts
    encode = _encoder(tokenizer)
    facts = TraceFacts(form, block_tokens, "bytes" if tokenizer is None else "tokens")
    if tokenizer is None:
        facts.notes.append(
            "no tokenizer: one byte of text counts as one token; prompts have 3 to 5 times fewer tokens in English:"
            " --tokenizer MODEL_DIR counts them"
        )
    if form == "vllm-log":
        prompts = _logged_prompts(path, encode, facts, skips, progress)
    else:
        prompts = _asked(
            read_conversations(path, skips=skips, form=form, progress=progress), encode, facts, concurrent
        )
    _add_prompts(trace, facts, prompts)
    if not facts.requests:
        raise WorkloadError(
            f"{path} has no request that can be used",
            why="; ".join(skips.lines()) or "it is empty",
            hint="vLLM writes prompts into its log with --enable-log-requests only",
            code="dataset.empty",
        )
    return trace, facts


def trace_form(path: Path) -> TraceForm:
    """The file's form by its content.

    Raises:
        WorkloadError: ``sizing.form``; ``dataset.empty`` for a file without a record; those of reading datasets.
    """
    found: Form | None = dataset_form(path)
    if found is not None:
        return found
    blank = True
    for number, line in read_lines(path, Skips()):
        if _LOGGED.encode() in line:
            return "vllm-log"
        blank = blank and not line.strip()
        if number >= _LOG_LINES:
            break
    if blank:
        raise WorkloadError(
            f"{path} is empty",
            hint="a dataset has one JSON object a line, or is one JSON array",
            code="dataset.empty",
        )
    raise WorkloadError(
        f"{path} is none of the forms that are known",
        why="no record has question, prompt, conversations, messages or hash_ids, and no line is a request in a vLLM log",
        hint="name the form with --form, or convert it; vLLM logs requests with --enable-log-requests",
        code="sizing.form",
    )


def _encoder(tokenizer: Path | None) -> Encode:
    if tokenizer is None:
        return lambda text: text.encode("utf-8", "surrogatepass")
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    library = need("tokenizers", "count tokens as the engine does")
    try:
        loaded = library.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise WorkloadError(
            f"cannot use {file} as a tokenizer",
            why=str(error)[:300],
            hint="name the model's tokenizer.json or its directory, or leave --tokenizer out to count bytes",
            code="sizing.tokenizer",
        ) from None

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = loaded.encode(
            text.encode("utf-8", "replace").decode(), add_special_tokens=False
        ).ids
        return ids

    return encode


def _asked(
    conversations: Iterator[Conversation], encode: Encode, facts: TraceFacts, concurrent: int
) -> Iterator[_Prompt]:
    """Prompts in the order they are asked: ``concurrent`` conversations take turns."""
    going: deque[Iterator[_Prompt]] = deque()
    last = float("-inf")
    more = True
    while more or going:
        while more and len(going) < concurrent:
            conversation = next(conversations, None)
            if conversation is None:
                more = False
                break
            at = conversation.timestamp_seconds
            if at is not None:
                facts.backwards += at < last
                last = at
            going.append(_turns(conversation, encode, facts))
        if not going:
            return
        talk = going.popleft()
        prompt = next(talk, None)
        if prompt is not None:
            yield prompt
            going.append(talk)


@dataclasses.dataclass(slots=True)
class _Prompt:
    """One prompt: its tokens, and the content of its whole blocks."""

    tokens: int
    blocks: list[int]


class _Blocks:
    """Cuts tokens that come piece by piece into blocks and names each by its content."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._rest: list[int] = []
        self.tokens = 0
        self.names: list[int] = []

    def add(self, tokens: Sequence[int]) -> None:
        """The next tokens."""
        self.tokens += len(tokens)
        rest = [*self._rest, *tokens]
        whole = len(rest) - len(rest) % self._size
        for start in range(0, whole, self._size):
            self.names.append(_name(rest[start : start + self._size]))
        self._rest = rest[whole:]


def _name(tokens: Sequence[int]) -> int:
    content = b"".join(token.to_bytes(4, "little") for token in tokens)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _turns(conversation: Conversation, encode: Encode, facts: TraceFacts) -> Iterator[_Prompt]:
    blocks = _Blocks(facts.block_tokens)
    plain = facts.form == "qa"  # a QA pair is sent as it is, not as a chat
    for turn in conversation.turns:
        blocks.add(encode(turn.text if plain else f"{turn.role}\n{turn.text}\n"))
        if turn.role == "user":
            yield _Prompt(blocks.tokens, list(blocks.names))


def _logged_prompts(
    path: Path, encode: Encode, facts: TraceFacts, skips: Skips, progress: Progress | None
) -> Iterator[_Prompt]:
    for number, raw in read_lines(path, skips, progress=progress):
        if _LOGGED.encode() not in raw:
            continue
        line = raw.decode("utf-8", "replace")
        line = line[line.index(_LOGGED) :]
        written = _PROMPT.search(line)
        # Behind the prompt: the client's own text could hold the label.
        listed = _TOKEN_IDS.search(line, written.end() if written else 0)
        blocks = _Blocks(facts.block_tokens)
        if listed is not None:
            blocks.add([int(token) & 0xFFFFFFFF for token in listed[1].split(", ")])
        elif written is not None:
            try:
                blocks.add(encode(ast.literal_eval(written[1])))
            except (ValueError, SyntaxError):
                skips.add("a logged prompt that is cut off", f"{path.name}:{number}")
                continue
        else:
            skips.add("a logged request without its prompt or tokens", f"{path.name}:{number}")
            continue
        yield _Prompt(blocks.tokens, blocks.names)


def _add_prompts(trace: BlockTrace, facts: TraceFacts, prompts: Iterator[_Prompt]) -> None:
    batch = _Batch(trace, facts)
    for prompt in prompts:
        batch.add(prompt.blocks, prompt.tokens)
    batch.flush()


def _add_mooncake(trace: BlockTrace, facts: TraceFacts, requests: Iterator[TraceRequest]) -> None:
    first = list(itertools.islice(requests, _PROBED))
    facts.block_tokens = _block_tokens_of(first, facts)
    batch = _Batch(trace, facts)
    last = float("-inf")
    for some in (first, requests):
        for request in some:
            facts.backwards += request.timestamp_seconds < last
            last = request.timestamp_seconds
            batch.add(request.hash_ids, request.input_tokens)
    batch.flush()


def _block_tokens_of(requests: Sequence[TraceRequest], facts: TraceFacts) -> int:
    """Tokens that one block id of the trace stands for: what was asked for when it fits, else what does."""
    asked = facts.block_tokens
    with_blocks = [r for r in requests if r.hash_ids and r.input_tokens]

    def fits(size: int) -> bool:
        good = sum(
            r.input_tokens // size <= len(r.hash_ids) <= -(-r.input_tokens // size) for r in with_blocks
        )
        return good >= _AGREE * len(with_blocks)

    if not with_blocks or fits(asked):
        return asked
    found = next((size for size in _USUAL_BLOCKS if fits(size)), None)
    if found is None:
        example = with_blocks[0]
        raise WorkloadError(
            f"the trace's blocks are not of {asked} tokens, nor of another usual size",
            why=f"a request of {example.input_tokens:,} tokens has {len(example.hash_ids):,} block ids",
            hint="name the tokens of one block id with --block-size",
            code="sizing.block-size",
        )
    facts.notes.append(
        f"the trace's block ids stand for {found} tokens each, not {asked}: the curve is in blocks of {found}"
    )
    return found


class _Batch:
    """Collects requests and hands them over as arrays."""

    def __init__(self, trace: BlockTrace, facts: TraceFacts) -> None:
        self._np: Any = need("numpy", "compute hit rates against pool sizes")
        self._trace, self._facts = trace, facts
        self._ids: list[int] = []
        self._lengths: list[int] = []
        self._countable: list[int] = []
        self._tokens = 0

    def add(self, ids: Sequence[int], tokens: int) -> None:
        """One request: its whole blocks are cached, and at least its last token is computed."""
        facts = self._facts
        size = facts.block_tokens
        whole = min(len(ids), tokens // size)
        facts.requests += 1
        facts.short_requests += not whole
        self._ids.extend(ids if whole == len(ids) else ids[:whole])
        self._lengths.append(whole)
        self._countable.append(min(whole, (tokens - 1) // size) if tokens else 0)
        self._tokens += tokens
        if len(self._ids) >= _BATCH_BLOCKS:
            self.flush()

    def flush(self) -> None:
        """Hands over what is there."""
        if not self._lengths:
            return
        np = self._np
        try:
            ids = np.array(self._ids, dtype=np.int64).view(np.uint64)
        except OverflowError:  # ids of 64 bits without a sign
            ids = np.array([number & _MASK for number in self._ids], dtype=np.uint64)
        lengths, countable = np.array(self._lengths, np.int64), np.array(self._countable, np.int64)
        self._trace.add(ids, lengths, countable, self._tokens)
        self._ids, self._lengths, self._countable, self._tokens = [], [], [], 0
