"""Takes secrets out of text before it leaves the host. Pure.

By rule, not by guess: values behind names that mean a secret, the forms that well-known keys have, and the secrets that
this host is known to hold. Rather a word too many than one too few; counts of tokens stay, since they are what a bundle
is read for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

MASK: Final = "***"

# A name whose last part is one of these: API_KEY, hf-token, db.password, AWS_SECRET_ACCESS_KEY, aws_session_token.
# The length before it is bounded: a line of 64 KiB of dashes must not take a minute.
_NAME: Final = (
    r"(?:[A-Za-z0-9_.-]{0,60}?(?:[_.-]|(?<=[a-z0-9])(?=[A-Z])|\b)"
    r"(?i:api[_.-]?keys?|access[_.-]?keys?|secret[_.-]?keys?|private[_.-]?keys?|admin[_.-]?keys?|auth[_.-]?keys?"
    r"|secret[_.-]?access[_.-]?key|pwd|secrets?|token|auth[_.-]?token|credentials?"
    r"|cookie|session[_.-]?key|signing[_.-]?key|encryption[_.-]?key)"
    r"|[A-Za-z0-9_.-]{0,60}?(?i:password|passwd|passphrase))"
)
_VALUE: Final = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;&"'\\\]})]+)"""

_PEM: Final = re.compile(
    r"-----BEGIN (?P<what>[A-Z ]*PRIVATE KEY|OPENSSH PRIVATE KEY|PGP PRIVATE KEY BLOCK)-----.*?"
    r"(?:-----END (?P=what)-----|\Z)",
    flags=re.DOTALL,
)
_ASSIGNED: Final = re.compile(
    rf"""(?P<name>(?<![A-Za-z0-9_.-]){_NAME})(?P<mark>["']?\s*(?:=|:(?!//))\s*)(?P<value>{_VALUE})"""
)
# --api-key VALUE in a line of text, and as two items of a JSON or Python list.
_OPTION: Final = re.compile(
    rf"""(?P<name>(?<![A-Za-z0-9_.-])--?{_NAME})(?P<mark>(?:["']\s*,\s*["'])|\s+)(?P<value>(?:(?<=["'])[^"'\\]+|{_VALUE}))"""
)
_BEARER: Final = re.compile(
    r"\b(?P<name>Bearer|Basic)(?P<mark>\s+)(?P<value>[A-Za-z0-9._~+/=-]{6,})", flags=re.IGNORECASE
)
_HEADER: Final = re.compile(
    r"^(?P<name>\s*(?:Authorization|Proxy-Authorization|Cookie|Set-Cookie|X-Api-Key))(?P<mark>\s*:\s*)(?P<value>.+)$",
    flags=re.IGNORECASE | re.MULTILINE,
)
_USERINFO: Final = re.compile(
    r"(?P<name>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,20}://[^/\s:@\"']*)(?P<mark>:)(?P<value>[^/\s@\"']+)(?=@)",
    flags=re.IGNORECASE,
)
_KNOWN_FORMS: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|glpat-[A-Za-z0-9_-]{16,}|xox[abprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|ms-[0-9a-f]{8}-[0-9a-f-]{20,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
)
# Where such a name is followed by no secret: a path to a file, a number, a word that says yes or no, or our own mask.
_HARMLESS: Final = re.compile(
    r"""["']?(?:\d{1,12}(?:\.\d+)?|true|false|null|none|yes|no|on|off|\*\*\*|/[^\s"']*)["']?$""",
    flags=re.IGNORECASE,
)
# token=5 is a count; password=12345 is a password.
_NO_NUMBER: Final = re.compile("pass|pwd|secret|key", flags=re.IGNORECASE)
SHORTEST_KNOWN: Final = 6


def redactor(known: Iterable[str] = ()) -> Callable[[str], str]:
    """A function that takes secrets out of a text.

    Args:
        known: Secrets that this host holds; they go wherever they stand. Those shorter than six characters are left
            out: they would take ordinary words with them.
    """
    words = sorted({word for word in known if len(word) >= SHORTEST_KNOWN}, key=len, reverse=True)
    literal = re.compile("|".join(map(re.escape, words))) if words else None

    def redact(text: str) -> str:
        if literal is not None:
            text = literal.sub(MASK, text)
        text = _PEM.sub(lambda m: f"-----BEGIN {m['what']}----- {MASK}", text)
        text = _HEADER.sub(_masked, text)
        text = _BEARER.sub(_masked, text)
        text = _USERINFO.sub(_masked, text)
        text = _OPTION.sub(_masked, text)
        text = _ASSIGNED.sub(_masked, text)
        return _KNOWN_FORMS.sub(MASK, text)

    return redact


def _masked(match: re.Match[str]) -> str:
    value = match["value"]
    if _HARMLESS.fullmatch(value) and not (_NO_NUMBER.search(match["name"]) and value.strip("\"'").isdigit()):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match['name']}{match['mark']}{quote}{MASK}{quote}"
