"""The validator for configuration files that people wrote.

It reports what MemCache refuses (it then exits with status 0 and a line on stderr) and, more important, what it
takes otherwise than written: misspelt prefixes, dropped lines, comments that become values. Pure: bytes in,
problems out; it never raises on any input and takes bounded time.
"""

from __future__ import annotations

from kvtierd.mmc_conf.keyspec import KIND_NAMES, OTHER_KIND, V1_2, FileKind, KeySpec
from kvtierd.mmc_conf.lookup import find_key, has_known_prefix, nearest_key
from kvtierd.mmc_conf.parse import MAX_PROBLEMS, Entry, odd_character, parse_conf, printable
from kvtierd.mmc_conf.problems import ConfProblem, PathLookup, in_order
from kvtierd.mmc_conf.rules import (
    LOCAL_STORE_URL,
    META_STORE_URL,
    META_URL,
    ConfView,
    check_local_rules,
    check_meta_rules,
)
from kvtierd.mmc_conf.values import check_value
from kvtierd.mmc_conf.versions import MmcVersion, resolve_version


def check_meta(
    data: bytes,
    version: str | MmcVersion,
    *,
    path_info: PathLookup | None = None,
    allow_exposed: bool = False,
    assume_version: str | None = None,
) -> tuple[ConfProblem, ...]:
    """What is wrong with an mmc-meta.conf, by line.

    Args:
        data: The file's bytes.
        version: The MemCache that will read it.
        path_info: Looks a path up (symbolic links, missing files); None: paths are judged by their text alone.
        allow_exposed: An HTTP service or port that strangers can reach is only a warning.
        assume_version: The known version whose keys to use when ``version`` is unknown.

    Raises:
        ConfError: ``conf.version``, when the version is unknown and nothing is assumed.
    """
    view, problems = _read(data, "meta", resolve_version(version, assume=assume_version), path_info)
    if view is not None:
        check_meta_rules(view, allow_exposed=allow_exposed)
        problems += view.problems
    return in_order(problems)


def check_local(
    data: bytes,
    version: str | MmcVersion,
    *,
    path_info: PathLookup | None = None,
    a3: bool = False,
    assume_version: str | None = None,
) -> tuple[ConfProblem, ...]:
    """What is wrong with an mmc-local.conf, by line. ``a3``: the host is an A3, where all sizes align to 1 GB.

    The other arguments and the error are those of ``check_meta``.
    """
    view, problems = _read(data, "local", resolve_version(version, assume=assume_version), path_info)
    if view is not None:
        check_local_rules(view, a3=a3)
        problems += view.problems
    return in_order(problems)


def check_pair(
    meta: bytes, local: bytes, version: str | MmcVersion, *, assume_version: str | None = None
) -> tuple[ConfProblem, ...]:
    """What does not fit between the two files; lines are those of the local file.

    Only for nodes whose clients speak to the MetaService directly: behind kvtierd's endpoint the addresses differ.
    """
    known = resolve_version(version, assume=assume_version)
    meta_view, _ = _read(meta, "meta", known, None)
    local_view, _ = _read(local, "local", known, None)
    if meta_view is None or local_view is None:
        return ()
    for meta_key, local_key in ((META_URL, META_URL), (META_STORE_URL, LOCAL_STORE_URL)):
        _check_same_url(meta_view, local_view, meta_key, local_key)
    for prefix in ("ock.mmc.tls", "ock.mmc.config_store.tls"):
        name = f"{prefix}.enable"
        if meta_view.flag(name) != local_view.flag(name):
            on, off = ("meta", "local") if meta_view.flag(name) else ("local", "meta")
            local_view.report(
                name,
                "pair-mismatch",
                f"TLS is on in the {on} file and off in the {off} file; they cannot talk",
                f"set {name} to the same value in both files",
            )
    return in_order(local_view.problems)


def _check_same_url(meta: ConfView, local: ConfView, meta_key: str, local_key: str) -> None:
    served, dialled = meta.url(meta_key), local.url(local_key)
    if served is None or dialled is None or dialled.scheme == "etcd" or served.same_endpoint(dialled):
        return
    if served.port == dialled.port and served.reach == "any":
        return
    if "name" in {served.reach, dialled.reach} and served.port == dialled.port:
        local.report(
            local_key,
            "pair-unknown",
            f"{dialled} and {served} have the same port, but whether the names mean the same host cannot be told here",
            "make sure that they do",
            "warning",
        )
        return
    local.report(
        local_key,
        "pair-mismatch",
        f"clients dial {dialled}, but the MetaService serves {meta_key} at {served}",
        f"set {local_key} = {served}"
        if served.reach != "any"
        else f"use port {served.port} and the master's address",
    )


def _read(
    data: bytes, kind: FileKind, version: MmcVersion, path_info: PathLookup | None
) -> tuple[ConfView | None, list[ConfProblem]]:
    """The file's valid entries as a view, and the problems of its lines. No view: nothing could be read."""
    parsed = parse_conf(data)
    problems = list(parsed.problems)
    if not parsed.readable:
        return None, problems
    seen: dict[str, Entry] = {}
    for entry in parsed.entries:
        if len(problems) >= MAX_PROBLEMS:
            problems.append(_too_many(entry))
            break
        spec = _judge_key(entry, kind, version, problems)
        if entry.key in seen:
            problems.append(_duplicate(seen[entry.key], entry))
            continue
        seen[entry.key] = entry
        if spec is not None:
            problems += check_value(spec, entry, kind, version, path_info)
    known = {
        key: entry for key, entry in seen.items() if (spec := find_key(kind, key)) and spec.known_in(version)
    }
    return ConfView(kind, version, known, path_info=path_info), problems


def _too_many(entry: Entry) -> ConfProblem:
    return ConfProblem(
        entry.line,
        None,
        "too-many",
        f"more than {MAX_PROBLEMS} problems; the rest is not checked",
        "is this the right file?",
    )


def _duplicate(first: Entry, second: Entry) -> ConfProblem:
    return ConfProblem(
        second.line,
        second.shown,
        "duplicate-key",
        f"{second.shown} is set in line {first.line} and again in line {second.line}; MemCache refuses the file",
        f"remove line {first.line} or line {second.line}",
        column=second.column,
    )


def _judge_key(
    entry: Entry, kind: FileKind, version: MmcVersion, problems: list[ConfProblem]
) -> KeySpec | None:
    """The key's specification when this release knows it in this file; else a problem is added."""
    spec = find_key(kind, entry.key)
    if spec is not None and spec.known_in(version):
        return spec
    problems.append(_unknown_key(entry, spec, kind, version))
    return None


def _unknown_key(entry: Entry, spec: KeySpec | None, kind: FileKind, version: MmcVersion) -> ConfProblem:
    def problem(code: str, message: str, hint: str) -> ConfProblem:
        return ConfProblem(entry.line, entry.shown, code, message, hint, column=entry.column)

    file_name = KIND_NAMES[kind]
    if spec is not None and spec.since > version:
        return problem(
            "key-too-new",
            f"{spec.name} exists since MemCache {spec.since}; {version} refuses the file because of it",
            f"remove the line, or use MemCache {spec.since} or later",
        )
    if spec is not None:
        return problem(
            "key-removed",
            f"{spec.name} exists in MemCache {_span(spec)} only; {version} refuses the file because of it",
            "remove the line",
        )
    if find_key(OTHER_KIND[kind], entry.key) is not None:
        return _wrong_file(entry, kind)
    guess = nearest_key(entry.key, kind, version)
    hint = (
        f"did you mean {guess}?"
        if guess
        else f"remove the line; see the keys of {file_name} for MemCache {version}"
    )
    odd = odd_character(entry.key)
    if odd is not None:
        return problem(
            "lookalike-key", f"the key contains {odd}, so it is not the key that it looks like", hint
        )
    if entry.key.startswith((";", "//")):
        refused = version < V1_2
        return ConfProblem(
            entry.line,
            entry.shown,
            "foreign-comment",
            "only # begins a comment; MemCache "
            + (
                f"{version} takes the line as a key and refuses the file"
                if refused
                else "drops the line as an unknown key"
            ),
            "begin the line with #",
            "error" if refused else "warning",
        )
    if not has_known_prefix(entry.key):
        fate = "drops the line without a word and uses its default" if version >= V1_2 else "refuses the file"
        return problem(
            "unknown-prefix", f"{entry.shown} does not begin with 'ock.mmc.'; MemCache {version} {fate}", hint
        )
    if entry.key.startswith("ubsio."):
        return problem(
            "unknown-key", f"{entry.shown} is not a key of UBS IO in MemCache {version}; it is dropped", hint
        )
    return problem(
        "unknown-key", f"MemCache {version} does not know {entry.shown}; it refuses the file", hint
    )


def _span(spec: KeySpec) -> str:
    return str(spec.since) if spec.until == spec.since else f"{spec.since} to {spec.until}"


def _wrong_file(entry: Entry, kind: FileKind) -> ConfProblem:
    other = KIND_NAMES[OTHER_KIND[kind]]
    if entry.key == META_STORE_URL:
        fate, hint = "it is dropped here", f"write {LOCAL_STORE_URL}"
    elif entry.key.startswith("ubsio."):
        fate, hint = "it does nothing here", f"move the line to {other}"
    else:
        fate, hint = "MemCache refuses the file", f"move the line to {other}"
    return ConfProblem(
        entry.line,
        entry.shown,
        "wrong-file",
        f"{printable(entry.key)} belongs into {other}, not into {KIND_NAMES[kind]}; {fate}",
        hint,
        column=entry.column,
    )
