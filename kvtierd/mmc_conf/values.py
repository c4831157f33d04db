"""Judges one value against the key table: what MemCache refuses and what it reads otherwise than written.

The rules are those of the real parser (measured on 1.3.0): booleans are true, false, 1 or 0 in any case; an
integer has an optional sign and nothing else; choices do not care for case; a text value runs to the end of the
line, comment and all.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from kvtierd.mmc_conf.keyspec import V1_0, FileKind, KeySpec, ValueType
from kvtierd.mmc_conf.parse import Entry, odd_character, printable
from kvtierd.mmc_conf.problems import ConfProblem, PathLookup, Severity
from kvtierd.mmc_conf.sizes import MAX_SIZE_BYTES, parse_mmc_size
from kvtierd.mmc_conf.urls import MmcUrl, UrlError, parse_url
from kvtierd.mmc_conf.versions import MmcVersion

_INLINE_COMMENT = re.compile(r"\s(#|//|;)|#")
_INLINE_IN_TEXT = re.compile(r"\s(#|//|;)(\s|$)|\s#")
_INT = re.compile(r"[+-]?\d{1,40}", re.ASCII)
_BOOLS = {"true": True, "1": True, "false": False, "0": False}
_QUOTES = ("'", '"')
LOG_PATH = "ock.mmc.log_path"
BARE_METRICS_VERSION = V1_0
"""The only release that wants metrics_url without ``http://``; 1.0.1 and later want it with."""


def check_value(
    spec: KeySpec,
    entry: Entry,
    kind: FileKind,
    version: MmcVersion,
    path_info: PathLookup | None = None,
) -> list[ConfProblem]:
    """What is wrong with one value. At most a few problems; a secret's value is never in a message."""
    check = _ValueCheck(spec, entry, version, kind, path_info)
    check.run()
    return check.problems


def parse_bool(text: str) -> bool | None:
    """The value as MemCache reads it, or None when it refuses it."""
    return _BOOLS.get(text.lower())


def url_schemes(spec: KeySpec, kind: FileKind, version: MmcVersion) -> tuple[str, ...]:
    """The schemes that an address key takes; "" is the bare ``host:port``."""
    if spec.type is ValueType.METRICS_URL:
        return ("",) if version <= BARE_METRICS_VERSION else ("http", "https")
    if kind == "local" and spec.name == "ock.mmc.meta_service_url" and version >= MmcVersion(1, 3, 0):
        return ("tcp", "etcd")
    return ("tcp",)


def read_url(spec: KeySpec, value: str, kind: FileKind, version: MmcVersion) -> MmcUrl:
    """An address value in parts.

    Raises:
        UrlError: it is not in the form that this release documents.
    """
    return parse_url(value, url_schemes(spec, kind, version), min_port=spec.min_port)


class _ValueCheck:
    def __init__(
        self, spec: KeySpec, entry: Entry, version: MmcVersion, kind: FileKind, path_info: PathLookup | None
    ) -> None:
        self.spec = spec
        self.entry = entry
        self.value = entry.value
        self.version = version
        self.kind = kind
        self.path_info = path_info
        self.problems: list[ConfProblem] = []

    def report(self, code: str, message: str, hint: str, severity: Severity = "error") -> None:
        self.problems.append(
            ConfProblem(self.entry.line, self.entry.shown, code, message, hint, severity, self.entry.column)
        )

    @property
    def shown(self) -> str:
        return "the value" if self.spec.secret else repr(printable(self.value))

    def run(self) -> None:
        if self.spec.secret and self.value:
            self.report(
                "secret-inline",
                "the secret itself is in this file, readable for everyone who may read the file",
                "give the file mode 0600 and its own owner, and keep it out of backups and tickets",
                "warning",
            )
        if not self.value:
            self._check_empty()
            return
        if self._inline_comment() or self._quoted() or self._odd_character():
            return
        if self.spec.max_bytes is not None and len(self.value.encode()) > self.spec.max_bytes:
            self.report(
                "value-too-long",
                f"the value has {len(self.value.encode())} bytes; MemCache refuses more than {self.spec.max_bytes}",
                "use a shorter path",
            )
            return
        checks: dict[ValueType, Callable[[], None]] = {
            ValueType.BOOL: self._check_bool,
            ValueType.INT: self._check_int,
            ValueType.ENUM: self._check_choice,
            ValueType.SIZE: self._check_size,
            ValueType.URL: self._check_url,
            ValueType.METRICS_URL: self._check_url,
            ValueType.ENDPOINT: self._check_endpoint,
            ValueType.PATH: self._check_path,
            ValueType.TEXT: self._check_text,
        }
        checks[self.spec.type]()

    # -- what is wrong whatever the type

    def _check_empty(self) -> None:
        if self.spec.name == LOG_PATH:
            self.report(
                "empty-value",
                "the log path is empty; MemCache then logs beside the Python binary",
                "write an absolute path, or remove the line for /var/log/memcache_hybrid",
            )
        elif self.spec.type not in {ValueType.PATH, ValueType.TEXT, ValueType.ENDPOINT}:
            default = self.spec.default_in(self.version)
            keep = f", or remove the line for the default {default}" if default else ""
            self.report(
                "empty-value",
                f"the value is empty; MemCache refuses that for {_article(self.spec.type)}",
                f"write {self._right()}{keep}",
            )

    def _inline_comment(self) -> bool:
        loose = self.spec.type in {ValueType.TEXT, ValueType.PATH}
        match = (_INLINE_IN_TEXT if loose else _INLINE_COMMENT).search(self.value)
        if match is None:
            return False
        before = self.value[: match.start()].rstrip()
        shown = "" if self.spec.secret else f": '{self.entry.shown} = {printable(before)}'"
        self.report(
            "inline-comment",
            "MemCache has no comments behind a value; it takes the comment as part of the value",
            f"put the comment on a line of its own, beginning with #{shown}",
        )
        return True

    def _quoted(self) -> bool:
        if len(self.value) < 2 or self.value[0] not in _QUOTES or self.value[-1] != self.value[0]:
            return False
        bare = "" if self.spec.secret else f": {printable(self.value[1:-1])}"
        self.report(
            "quoted-value", "MemCache takes the quotes as part of the value", f"write it without quotes{bare}"
        )
        return True

    def _odd_character(self) -> bool:
        if self.spec.type is ValueType.TEXT:
            return False
        odd = odd_character(self.value)
        if odd is None:
            return False
        severity: Severity = (
            "warning" if self.spec.type is ValueType.PATH and "control" not in odd else "error"
        )
        self.report(
            "odd-character",
            f"the value contains {odd}, which MemCache takes as part of it",
            "type the value again in plain ASCII",
            severity,
        )
        return severity == "error"

    # -- by type

    def _check_bool(self) -> None:
        if parse_bool(self.value) is None:
            self.report(
                "bad-bool", f"{self.shown} is not a boolean; MemCache refuses the file", "write true or false"
            )

    def _check_int(self) -> None:
        low, high = self.spec.low, self.spec.high
        if not _INT.fullmatch(self.value):
            self.report(
                "bad-int",
                f"{self.shown} is not a whole number; MemCache refuses the file",
                f"write {self._right()}",
            )
            return
        number = int(self.value)
        if (low is not None and number < low) or (high is not None and number > high):
            self.report(
                "out-of-range",
                f"{number} is out of range; MemCache takes {low} to {high}",
                f"write {self._right()}"
                + (" (99 is the most)" if self.spec.name == "ock.mmc.evict_threshold_high" else ""),
            )

    def _check_choice(self) -> None:
        choices = self.spec.choices_in(self.version)
        if self.value.lower() in choices:
            return
        later = next((v for v, names in self.spec.choices if self.value.lower() in names), None)
        since = f" (since {later})" if later is not None else ""
        self.report(
            "bad-choice",
            f"{self.shown} is not a choice of MemCache {self.version}{since}; it refuses the file",
            f"write one of {', '.join(choices)}",
        )

    def _check_size(self) -> None:
        try:
            size_bytes = parse_mmc_size(self.value)
        except ValueError as error:
            code = "bad-size-unit" if re.search(r"(?i)[kmgt]ib$", self.value) else "bad-size"
            self.report(code, str(error), f"write {self._right()}")
            return
        if size_bytes > MAX_SIZE_BYTES:
            self.report(
                "size-too-big",
                f"{self.shown} is more than 1TB, the documented limit; most releases refuse it",
                "write at most 1TB; the size is per rank, not per host",
            )

    def _check_url(self) -> None:
        try:
            url = read_url(self.spec, self.value, self.kind, self.version)
        except UrlError as error:
            if error.code == "url-scheme" and self._bare_metrics_url():
                return
            # The HTTP service ignores what follows the port; the client library refuses it in the other addresses.
            harmless = error.code == "url-trailing" and self.spec.type is ValueType.METRICS_URL
            self.report(error.code, f"{error}", error.hint, "warning" if harmless else "error")
            return
        if url.scheme == "etcd":
            self.report(
                "etcd-discovery",
                "the MetaService is looked up in etcd; kvtierd does not check that and does not use it",
                "write tcp://HOST:PORT of the MetaService, or of the endpoint of this node",
                "warning",
            )
        self._check_canonical(url)

    def _check_canonical(self, url: MmcUrl) -> None:
        """MemCache changes its mind between releases about anything but the plain form."""
        if self.value != str(url):
            self.report("url-form", f"{self.shown} is an unusual form of {url}", f"write {url}", "warning")

    def _bare_metrics_url(self) -> bool:
        """The old form without ``http://`` in a new release: 1.3.0 takes it."""
        if self.spec.type is not ValueType.METRICS_URL or "://" in self.value:
            return False
        try:
            url = parse_url(self.value, ("",), min_port=self.spec.min_port)
        except UrlError:
            return False
        self.report(
            "url-old-form",
            f"{self.shown} is the form of MemCache 1.0.0; later releases document http://HOST:PORT",
            f"write http://{url}",
            "warning",
        )
        return True

    def _check_endpoint(self) -> None:
        if not re.fullmatch(r"(tcp|ipc|inproc)://\S+", self.value):
            self.report(
                "bad-endpoint", f"{self.shown} is not a ZeroMQ endpoint", "write tcp://127.0.0.1:PORT"
            )
        elif self.value.startswith(("tcp://*", "tcp://0.0.0.0", "tcp://[::]")):
            self.report(
                "exposed",
                f"{self.shown} publishes the keys of the pool to everyone who can reach the host, without authentication",
                "write tcp://127.0.0.1:PORT",
                "warning",
            )

    def _check_path(self) -> None:
        if "-----BEGIN" in self.value:
            self.report(
                "secret-inline", "the value is a certificate or key, not a path", "write the path of a file"
            )
        elif not self.value.startswith("/"):
            where = "beside the Python binary" if self.spec.name == LOG_PATH else "from the working directory"
            self.report(
                "relative-path",
                f"{self.shown} is not an absolute path; MemCache looks {where}",
                "write an absolute path; ~ and $VARIABLES are not expanded",
            )
        elif self.spec.name == LOG_PATH:
            self._check_log_path()

    def _check_log_path(self) -> None:
        path = self.value.rstrip("/")
        if path.endswith("/logs"):
            self.report(
                "log-path-logs",
                f"MemCache appends /logs itself and would write to {printable(path)}/logs",
                f"write {printable(path.removesuffix('/logs') or '/')}",
            )
        if "/../" in f"{path}/":
            self.report("path-form", f"{self.shown} contains '..'", "write the resolved path", "warning")
        self._check_symlink()

    def _check_symlink(self) -> None:
        if self.path_info is None:
            return
        info = self.path_info(self.value)
        if info.symlink_target is not None:
            self.report(
                "symlink",
                f"{self.shown} is a symbolic link to {printable(info.symlink_target)}; MemCache refuses it",
                "write the path that the link leads to, or copy the file",
            )

    def _check_text(self) -> None:
        if any(c < " " for c in self.value):
            self.report("odd-character", "the value contains a control character", "type the value again")

    def _right(self) -> str:
        spec = self.spec
        match spec.type:
            case ValueType.INT if spec.low is not None and spec.high is not None:
                return f"a whole number from {spec.low} to {spec.high}"
            case ValueType.INT:
                return "a whole number"
            case ValueType.BOOL:
                return "true or false"
            case ValueType.ENUM:
                return f"one of {', '.join(spec.choices_in(self.version))}"
            case ValueType.SIZE:
                return 'a size such as "128GB", "512MB" or a number of bytes'
            case ValueType.URL | ValueType.METRICS_URL:
                schemes = url_schemes(spec, self.kind, self.version)
                return f"{schemes[0]}://127.0.0.1:PORT" if schemes[0] else "127.0.0.1:PORT"
            case _:
                return "a value"


def _article(value_type: ValueType) -> str:
    name = value_type.value
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
