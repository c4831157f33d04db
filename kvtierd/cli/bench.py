"""kvtierctl bench: load on a server, and what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kvtierd.cli.common import JsonOption, SettingsOption, SocketOption, connect, print_json
from kvtierd.cli.progress import progress
from kvtierd.errors import UsageError

if TYPE_CHECKING:
    from kvtierd.workload.load.runner import LoadSettings
    from kvtierd.workload.load.start import RunRequest
    from kvtierd.workload.load.target import Target

bench_app = typer.Typer(
    help="Send a workload to an engine, measure it by tier, compare and report.", no_args_is_help=True
)

UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="The server: http://HOST:PORT. Or --engine.")
]
EngineOption = Annotated[
    str | None, typer.Option("--engine", metavar="NAME", help="An engine of this host instead of --url.")
]
ModelOption = Annotated[
    str, typer.Option("--model", metavar="NAME", help="Model name; may be left out when one is served.")
]
DatasetOption = Annotated[
    Path, typer.Option("--dataset", metavar="FILE", help="QA, ShareGPT, OpenAI messages or a Mooncake trace.")
]
OutputOption = Annotated[
    Path, typer.Option("--output", metavar="DIR", help="A new directory for the results.")
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option("--concurrency", min=1, help="Conversations at a time; with a rate: the most of them."),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="Length of every answer; else as the dataset says, or 128."),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help="File with the server's key; else OPENAI_API_KEY."),
]


@bench_app.command()
def run(
    dataset: DatasetOption,
    output: OutputOption,
    url: UrlOption = None,
    engine: EngineOption = None,
    model: ModelOption = "",
    concurrency: ConcurrencyOption = None,
    max_tokens: MaxTokensOption = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, help="Conversations started each second.")
    ] = None,
    arrival: Annotated[
        str | None,
        typer.Option("--arrival", help="closed, constant, poisson, burst or trace; with --rate: poisson."),
    ] = None,
    burst_size: Annotated[int, typer.Option(min=1, help="How many at once, --arrival burst.")] = 8,
    speed: Annotated[float, typer.Option(min=0.001, help="How much faster, --arrival trace.")] = 1.0,
    seed: Annotated[int, typer.Option(help="For the random times of --arrival poisson.")] = 0,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="The first N conversations of the dataset only.")
    ] = None,
    api: Annotated[str, typer.Option("--api", help="chat or completions.")] = "chat",
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Answers may end before --max-tokens.")
    ] = False,
    salt: Annotated[
        str | None,
        typer.Option("--salt", help="Text at the head of every prompt; default: new for each run; '': none."),
    ] = None,
    warm_up: Annotated[
        int | None, typer.Option("--warm-up", min=0, help="Requests before, with other prompts.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for one request.")] = 600.0,
    deadline: Annotated[
        float | None, typer.Option("--deadline", min=0.1, help="Seconds for the whole run.")
    ] = None,
    metrics_url: Annotated[
        str | None, typer.Option("--metrics-url", help="The engine's metrics; default: URL/metrics.")
    ] = None,
    engine_kind: Annotated[
        str | None,
        typer.Option("--engine-kind", help="vllm, sglang or refengine: hit rates by the server's counters."),
    ] = None,
    api_key_file: KeyFileOption = None,
    extra: Annotated[
        str, typer.Option("--extra", metavar="JSON", help="Further fields of every request.")
    ] = "{}",
    label: Annotated[str, typer.Option("--label", help="Name of the run in reports.")] = "",
    max_error_share: Annotated[
        float, typer.Option(min=0, max=1, help="Exit 1 when more of the requests failed.")
    ] = 0.1,
    chars_per_token: Annotated[
        float | None, typer.Option(min=0.1, help="For the texts of a trace; default: a word is a token.")
    ] = None,
    trace_block: Annotated[int, typer.Option(min=1, help="Tokens of a trace's hash id.")] = 512,
    settings: SettingsOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a dataset to a server as streams and measure: TTFT, TPOT, throughput, errors, and hits by tier.

    Exit 1 when all requests failed or more than the share allowed; 130 when interrupted. JSON: complete, ended, label,
    engine, salt, dataset, server, settings, summary {requests, succeeded, failed, seconds, prompt_tokens, output_tokens,
    requests_per_second, output_tokens_per_second, ttft_seconds {count, mean, std, min, max, p50, p75, p90, p95, p99},
    tpot_seconds, inter_token_seconds, e2e_seconds, errors [{kind, count, example}]}, tiers {looked_up_tokens, hit_tokens,
    hit_rate, l1, l2, l3 {query_tokens, hit_tokens, hit_rate, share}}, timeline, notes.
    """
    from kvtierd.workload.load.start import RunRequest, read_api_key, run_load

    load = _load(
        model, concurrency, max_tokens, rate, arrival, burst_size, speed, seed, api, stop_at_eos, warm_up,
        timeout, deadline,
    )  # fmt: skip
    shown = progress(quiet=as_json)
    request = RunRequest(
        dataset=dataset,
        output=output,
        load=load,
        salt=salt,
        limit=limit,
        label=label or output.name,
        trace_block_tokens=trace_block,
        chars_per_token=chars_per_token,
        extra=_fields(extra),
        tell_seconds=0.5 if shown.terminal else 10.0,
    )
    key = read_api_key(api_key_file)
    target = _target(url, engine, metrics_url, engine_kind, settings, socket)
    with shown as say:
        result, problem = run_load(request, target, api_key=key, say=say)
    _show(request, result, as_json=as_json)
    if problem is not None:
        raise problem
    _exit(result, max_error_share)


def _exit(result: dict[str, Any], max_error_share: float) -> None:
    summary = result["summary"]
    if result["ended"] == "interrupted":
        raise typer.Exit(130)
    failed, requests = summary["failed"], summary["requests"]
    if not summary["succeeded"] or failed > max_error_share * requests or result["ended"] == "gave-up":
        raise typer.Exit(1)


def _load(
    model: str, concurrency: int | None, max_tokens: int | None, rate: float | None, arrival: str | None,
    burst_size: int, speed: float, seed: int, api: str, stop_at_eos: bool, warm_up: int | None,
    timeout: float, deadline: float | None,
) -> LoadSettings:  # fmt: skip
    from kvtierd.workload.load.runner import Arrival, LoadSettings

    chosen = arrival or ("poisson" if rate is not None else "closed")
    if chosen not in {"closed", "constant", "poisson", "burst", "trace"}:
        raise UsageError(f"--arrival {chosen} is none of closed, constant, poisson, burst, trace")
    if api not in {"chat", "completions"}:
        raise UsageError(f"--api {api} is neither chat nor completions")
    if (chosen in {"constant", "poisson", "burst"}) != (rate is not None):
        raise UsageError(
            f"--arrival {chosen} needs a --rate" if rate is None else f"--arrival {chosen} takes no --rate"
        )
    if chosen == "closed" and concurrency is None:
        concurrency = 1
    return LoadSettings(
        model=model,
        concurrency=concurrency,
        arrival=cast("Arrival", chosen),
        rate=rate or 0.0,
        burst_size=burst_size,
        speed=speed,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=not stop_at_eos,
        api=cast("Any", api),
        warm_up=min(concurrency or 4, 4) if warm_up is None else warm_up,
        request_seconds=timeout,
        deadline_seconds=deadline,
    )


def _fields(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--extra is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError("--extra must be a JSON object")
    taken = {"model", "messages", "prompt", "stream", "max_tokens"} & value.keys()
    if taken:
        raise UsageError(f"--extra may not set {', '.join(sorted(taken))}: the load generator does")
    return value


def _target(
    url: str | None, engine: str | None, metrics_url: str | None, kind: str | None,
    settings: Path | None, socket: Path | None,
) -> Target:  # fmt: skip
    from kvtierd.workload.load.target import address_target, engine_target

    if (url is None) == (engine is None):
        raise UsageError("name the server with --url, or one of this host's engines with --engine")
    if url is not None:
        return address_target(url, metrics_url, kind)
    with connect(settings, socket) as client:
        return engine_target(client, cast("str", engine))


def _show(request: RunRequest, result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    from kvtierd.workload.report.table import run_text

    print(run_text(result), end="")
    print(f"results: {request.output}/")


@bench_app.command(name="aisbench-config")
def aisbench_config(
    dataset: DatasetOption,
    output: OutputOption,
    tokenizer: Annotated[
        Path,
        typer.Option(
            "--tokenizer", metavar="DIR", help="The model's directory: AISBench counts with its tokenizer."
        ),
    ],
    url: UrlOption = None,
    engine: EngineOption = None,
    model: ModelOption = "",
    concurrency: ConcurrencyOption = None,
    max_tokens: MaxTokensOption = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, help="Requests started each second.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="The first N conversations only.")
    ] = None,
    api: Annotated[str, typer.Option("--api", help="chat or completions.")] = "chat",
    stop_at_eos: Annotated[bool, typer.Option("--stop-at-eos", help="Answers may be shorter.")] = False,
    salt: Annotated[
        str | None, typer.Option("--salt", help="As for run; the same salt sends the same prompts.")
    ] = None,
    settings: SettingsOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write AISBench's model and dataset files for a run with these settings, and say how to start it.

    JSON: files, command (words), salt, notes.
    """
    import secrets

    from kvtierd.workload.load.aisbench import write_config
    from kvtierd.workload.load.start import RunRequest, read_sessions

    if not model:
        raise UsageError("AISBench needs --model, the name that the server lists")
    load = _load(model, concurrency, max_tokens, rate, None, 1, 1.0, 0, api, stop_at_eos, 0, 600.0, None)
    target = _target(url, engine, None, None, settings, socket)
    chosen = secrets.token_hex(4) if salt is None else salt
    sessions, _ = read_sessions(RunRequest(dataset, output, load, limit=limit), chosen)
    made = write_config(
        output,
        sessions,
        url=target.url,
        model=model,
        tokenizer=tokenizer,
        concurrency=concurrency or 1,
        max_tokens=max_tokens or 128,
        rate=rate or 0.0,
        api=load.api,
        ignore_eos=not stop_at_eos,
    )
    if as_json:
        files = [str(f) for f in made.files]
        print_json({"files": files, "command": made.command, "salt": chosen, "notes": made.notes})
        return
    print("\n".join(f"written: {f}" for f in made.files))
    print("\n".join(f"note: {n}" for n in made.notes), end="\n" if made.notes else "")
    print(f"start it with:\n  {made.shown}")


@bench_app.command()
def compare(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="An engine of this host.")],
    dataset: DatasetOption,
    output: OutputOption,
    model: ModelOption = "",
    concurrency: ConcurrencyOption = None,
    max_tokens: MaxTokensOption = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, help="Conversations started each second.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="The first N conversations only.")
    ] = None,
    api: Annotated[str, typer.Option("--api", help="chat or completions.")] = "chat",
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for one request.")] = 600.0,
    ready: Annotated[
        float, typer.Option("--ready", min=1, help="Seconds for the engine to be ready again.")
    ] = 600.0,
    api_key_file: KeyFileOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it: the engine is restarted four times and the pool is emptied.")
    ] = False,
    settings: SettingsOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure an engine without a cache, with its prefix cache, and with the pool too: one table, settings put back.

    Each mode starts the engine anew and sends the dataset twice, cold and warm; the warm passes are compared. No speed-up is
    told where the warm pass had no hits. JSON: runs and files as for report, directories {mode: [cold, warm]}, ended.
    """
    import signal

    from kvtierd.cli.common import settings_path
    from kvtierd.workload.compare.sequence import Comparison
    from kvtierd.workload.compare.sequence import compare as run_all
    from kvtierd.workload.load.start import RunRequest, read_api_key
    from kvtierd.workload.report.write import write_report

    if not yes:
        raise UsageError(
            f"compare restarts the engine {engine} four times and empties the pool for all engines",
            hint="if that is meant: the same with --yes",
        )
    load = _load(model, concurrency, max_tokens, rate, None, 1, 1.0, 0, api, False, None, timeout, None)
    shown = progress(quiet=as_json)
    request = RunRequest(dataset, output, load, limit=limit, tell_seconds=0.5 if shown.terminal else 10.0)
    key = read_api_key(api_key_file)
    comparison = Comparison(engine, settings_path(settings)[0].absolute(), request, ready)
    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: the settings are put back
        signal.signal(number, _interrupt)
    with connect(settings, socket) as client, shown as say:
        done = run_all(comparison, client, api_key=key, say=say)
    made = write_report(done.last_passes, output)
    if as_json:
        directories = {mode: [str(d) for d in runs] for mode, runs in done.runs.items()}
        files = [str(f) for f in made.files]
        print_json({"runs": made.rows, "files": files, "directories": directories, "ended": done.ended})
    else:
        print(made.text, end="")
        print(f"report: {output / 'report.html'}")
    if done.ended == "interrupted":
        raise typer.Exit(130)
    if done.ended:
        raise typer.Exit(1)


def _interrupt(number: int, _: object) -> None:
    del number
    raise KeyboardInterrupt


@bench_app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of bench run.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Where to write; default: the only run's directory."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a report of one run, or of several beside each other; the first is what the others are compared with.

    Files: report.json, report.txt, report.html (self-contained), and as PNG and SVG ttft-distribution, ttft-over-time
    and comparison. JSON: runs [{label, complete, requests, failed, hit_rate, l1_share, l2_share, l3_share,
    ttft_mean_seconds, ttft_p50_seconds, ttft_p99_seconds, tpot_mean_seconds, e2e_mean_seconds,
    output_tokens_per_second, ttft_reduction, speed_up, no_speed_up_because}], files.
    """
    from kvtierd.workload.report.write import write_report

    if output is None and len(runs) > 1:
        raise UsageError("where to? a report of several runs needs --output")
    made = write_report(runs, output or runs[0])
    if as_json:
        print_json({"runs": made.rows, "files": [str(f) for f in made.files]})
        return
    print(made.text, end="")
    print("\n".join(f"written: {f}" for f in made.files))
