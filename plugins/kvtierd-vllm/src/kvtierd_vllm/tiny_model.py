"""Makes a language model with random weights, on the spot and offline: for the demo, tests and measurements.

    python -m kvtierd_vllm.tiny_model DIRECTORY [--size tiny|100m]

It has Qwen3's form and a tokenizer in which one byte of ASCII is one token, so a prompt's length in tokens is known. Run
it with the interpreter of the engine: it needs torch, transformers and tokenizers from there. The same options give the
same weights, and a directory that is complete already is left alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

STAMP: Final = "kvtierd-model.json"
_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The model's numbers. ``context`` is the longest sequence in tokens."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    context: int = 8192
    seed: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2


SHAPES: Final = {
    "tiny": Shape(layers=2, hidden=256, heads=4, kv_heads=2, head_size=64),
    "100m": Shape(layers=16, hidden=768, heads=12, kv_heads=4, head_size=64),
}


def make(directory: Path, shape: Shape) -> bool:
    """Writes the model; False when it was there already. Interrupted, it leaves no half of one."""
    wanted = json.dumps(dataclasses.asdict(shape), sort_keys=True)
    stamp = directory / STAMP
    if stamp.is_file() and stamp.read_text(encoding="ascii") == wanted:
        return False
    scratch = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        _write(scratch, shape)
        (scratch / STAMP).write_text(wanted, encoding="ascii")
        if directory.exists():
            if any(directory.iterdir()) and not stamp.exists():
                raise FileExistsError(f"{directory} holds something else")
            shutil.rmtree(directory)
        scratch.replace(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def _write(directory: Path, shape: Shape) -> None:
    # Here: every kvtierctl may import this package, and these are heavy and not in its interpreter.
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    symbols = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_SPECIAL[0],
        pad_token=_SPECIAL[0],
        additional_special_tokens=list(_SPECIAL[1:]),
        model_max_length=shape.context,
    )
    fast.chat_template = _CHAT
    torch.manual_seed(shape.seed)
    config = Qwen3Config(
        vocab_size=320,  # the symbols, rounded up
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    fast.save_pretrained(directory)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 when the model is there, 1 when it cannot be made."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtierd_vllm.tiny_model", description="Make a random model."
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=sorted(SHAPES), default="tiny")
    options = parser.parse_args(arguments)
    try:
        made = make(options.directory.absolute(), SHAPES[options.size])
    except ImportError as error:
        print(f"kvtierd: {sys.executable} lacks {error.name}: use the engine's interpreter", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"kvtierd: cannot make the model: {error}", file=sys.stderr)
        return 1
    print(f"{options.directory}: {'made' if made else 'already there'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
