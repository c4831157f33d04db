"""kvtierctl: one file a verb. Verbs import what they need when they run, so that each starts fast."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from kvtierd.errors import KvtierError


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of kvtierctl. Exit 0 ok, 1 the thing asked about is bad, 2 usage, 3 daemon unreachable."""
    import typer

    from kvtierd.cli.app import app

    usage_error: type[Exception] = typer.BadParameter.__bases__[0]  # typer brings a click of its own

    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = app(argv, prog_name="kvtierctl", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        sys.stdout.flush()
    except typer.Exit as exit_:
        code = exit_.exit_code
    except usage_error as error:
        error.show()  # type: ignore[attr-defined]
        code = 2
    except typer.Abort:
        code = 130
    except KvtierError as error:
        _show(error, as_json="--json" in argv)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader went away (head, less): not an error of ours. Keep the interpreter from saying so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _show(error: KvtierError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": error.as_dict()}))
        return
    print(f"kvtierctl: {error.message}", file=sys.stderr)
    if error.why:
        print(f"  why: {error.why}", file=sys.stderr)
    if error.hint:
        print(f"  do:  {error.hint}", file=sys.stderr)
