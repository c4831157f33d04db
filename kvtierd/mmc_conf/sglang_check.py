"""The validator for SGLang's JSON: first whether it is JSON, then keys and types, then the rules of the conf files."""

from __future__ import annotations

from collections.abc import Mapping

from kvtierd.mmc_conf.attributes import (
    META_ATTRIBUTES,
    STORAGE_ATTRIBUTES,
    Attribute,
    class_defaults,
    fits,
    json_type_of,
)
from kvtierd.mmc_conf.jsontext import Member, read_object
from kvtierd.mmc_conf.keyspec import V1_1, FileKind
from kvtierd.mmc_conf.lookup import nearest
from kvtierd.mmc_conf.parse import Entry, printable
from kvtierd.mmc_conf.problems import ConfProblem, PathLookup, in_order
from kvtierd.mmc_conf.rules import DRAM, PROTOCOL, ConfView, check_local_rules, check_meta_rules
from kvtierd.mmc_conf.values import check_value
from kvtierd.mmc_conf.versions import MmcVersion, resolve_version


def check_sglang_meta(
    data: bytes,
    version: str | MmcVersion,
    *,
    path_info: PathLookup | None = None,
    allow_exposed: bool = False,
    assume_version: str | None = None,
) -> tuple[ConfProblem, ...]:
    """What is wrong with SGLang's metaservice_config.json, by line and column. Arguments as for ``check_meta``.

    Unknown keys are errors: SGLang only warns of them and goes on with the default.
    """
    known = resolve_version(version, assume=assume_version)
    view, problems = _read(data, "meta", META_ATTRIBUTES, known, path_info)
    if view is not None:
        check_meta_rules(view, allow_exposed=allow_exposed)
        problems += _renamed(view.problems, META_ATTRIBUTES)
    return in_order(problems)


def check_sglang_storage(
    data: bytes,
    version: str | MmcVersion,
    *,
    path_info: PathLookup | None = None,
    a3: bool = False,
    assume_version: str | None = None,
) -> tuple[ConfProblem, ...]:
    """What is wrong with the JSON of ``--hicache-storage-backend-extra-config``. Arguments as for ``check_local``."""
    known = resolve_version(version, assume=assume_version)
    view, problems = _read(data, "local", STORAGE_ATTRIBUTES, known, path_info)
    if view is not None:
        check_local_rules(view, a3=a3)
        for name in (PROTOCOL, DRAM):
            if name not in view.entries:
                default = view.text(name)
                text = f"{name} is not set; MemCache takes {default}, which is hardly what was meant"
                view.report(name, "default-used", text, "set it explicitly", "warning")
        problems += _renamed(view.problems, STORAGE_ATTRIBUTES)
    return in_order(problems)


def _read(
    data: bytes,
    kind: FileKind,
    attributes: Mapping[str, Attribute],
    version: MmcVersion,
    path_info: PathLookup | None,
) -> tuple[ConfView | None, list[ConfProblem]]:
    members, found = read_object(data)
    problems = list(found)
    if problems:
        return None, problems
    if version < V1_1:
        text = (
            f"MemCache {version} has neither MetaConfig nor LocalConfig; SGLang's backend needs 1.1 or later"
        )
        return None, [ConfProblem(None, None, "too-old", text, "use MemCache 1.1 or later")]
    entries: dict[str, Entry] = {}
    seen: dict[str, Member] = {}
    for member in members:
        if member.name in seen:
            first = seen[member.name].line
            problems.append(
                _problem(
                    member,
                    "duplicate-key",
                    f"{_shown(member)} is set in line {first} and again in line {member.line}; the last one wins",
                    f"remove line {first} or line {member.line}",
                )
            )
        seen[member.name] = member
        attribute = attributes.get(member.name)
        if attribute is None or not attribute.known_in(version):
            problems.append(_unknown(member, attribute, attributes, version))
            continue
        if not fits(member.value, attribute.types):
            problems.append(_wrong_type(member, attribute))
            if attribute.spec is not None:  # set, but to nothing that a rule could use
                entries[attribute.spec.name] = Entry(
                    attribute.spec.name, "", member.line, _shown(member), member.column
                )
            continue
        spec = attribute.spec
        if spec is None:
            continue
        value = str(member.value).lower() if isinstance(member.value, bool) else str(member.value)
        entry = Entry(spec.name, value, member.line, _shown(member), member.column)
        entries[spec.name] = entry
        problems += check_value(spec, entry, kind, version, path_info)
    return ConfView(kind, version, entries, class_defaults(kind, version), path_info), problems


def _shown(member: Member) -> str:
    return printable(member.name)


def _problem(member: Member, code: str, message: str, hint: str) -> ConfProblem:
    return ConfProblem(member.line, _shown(member), code, message, hint, column=member.column)


def _unknown(
    member: Member, attribute: Attribute | None, attributes: Mapping[str, Attribute], version: MmcVersion
) -> ConfProblem:
    name = _shown(member)
    if attribute is not None:
        since = max(attribute.since, attribute.spec.since) if attribute.spec else attribute.since
        if since > version:
            return _problem(
                member,
                "key-too-new",
                f"{name} exists since MemCache {since}; with {version} SGLang ignores it",
                f"remove it, or use MemCache {since} or later",
            )
        return _problem(
            member, "key-removed", f"{name} does not exist in MemCache {version} any more", "remove it"
        )
    known = [a for a in attributes.values() if a.known_in(version)]
    by_key = {a.spec.name: a.name for a in known if a.spec is not None}
    guess = by_key.get(member.name) or nearest(member.name, (a.name for a in known))
    return _problem(
        member,
        "unknown-key",
        f"{name} is not a key here; SGLang ignores it with a warning in its log",
        f"did you mean {guess}?" if guess else "remove it",
    )


def _wrong_type(member: Member, attribute: Attribute) -> ConfProblem:
    found, wanted = json_type_of(member.value), " or ".join(attribute.types)
    text = printable(str(member.value), 60)
    match attribute.types[0]:
        case "string" if found in {"integer", "number", "boolean"}:
            hint = f'write "{text}" in double quotes'
        case "integer" if found == "string" and text.lstrip("+-").isdecimal():
            hint = f"write {text} without quotes"
        case "boolean" if text.lower() in {"true", "false", "1", "0"}:
            hint = f"write {'true' if text.lower() in {'true', '1'} else 'false'} without quotes"
        case _:
            hint = f"write {_article(wanted)}"
    if attribute.spec is not None and attribute.spec.secret:
        hint = f"write {_article(wanted)}"
    return _problem(
        member,
        "wrong-type",
        f"{_shown(member)} is a JSON {found}, but must be {_article(wanted)}; SGLang ends with a TypeError",
        hint,
    )


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _renamed(problems: list[ConfProblem], attributes: Mapping[str, Attribute]) -> list[ConfProblem]:
    """The conf files' rules speak of ``ock.mmc.*`` keys; say them in the names of this file."""
    names = {a.spec.name: a.name for a in attributes.values() if a.spec is not None}
    longest_first = sorted(names, key=len, reverse=True)

    def renamed(text: str) -> str:
        for key in longest_first:
            text = text.replace(key, names[key])
        return text

    return [
        ConfProblem(
            p.line,
            names.get(p.key, p.key) if p.key else None,
            p.code,
            renamed(p.message),
            renamed(p.hint),
            p.severity,
            p.column,
        )
        for p in problems
    ]
