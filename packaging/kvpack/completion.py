"""Completion for bash and zsh: plain shell, nothing is started while the user types."""

from __future__ import annotations

from collections.abc import Sequence

from kvpack import verbs
from kvpack.verbs import PROGRAM, Param, Verb


def bash() -> str:
    """The script for /usr/share/bash-completion/completions."""
    tops = _tops()
    lines = [
        f"# bash completion for {PROGRAM}; written by the build from its command line",
        "_kvtierctl() {",
        "    local cur=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} verb= word index",
        "    COMPREPLY=()",
        "    for ((index = 1; index < COMP_CWORD; index++)); do",
        "        word=${COMP_WORDS[index]}",
        '        case "$word" in',
        f"            {_pattern(_valued(verbs.global_params()))}) ((index++)) ;;",
        "            -*) ;;",
        '            *) verb+="${verb:+ }$word"; [[ $verb == ' + _groups_test() + " ]] || break ;;",
        "        esac",
        "    done",
        '    case "$previous" in',
        f"        {_pattern(_files())})",
        '            compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$cur"); return ;;',
        f"        {_pattern(_other_values())}) return ;;",
        "    esac",
        "    local words=",
        '    case "$verb" in',
        f'        "") words="{" ".join((*tops, *_words(verbs.global_params())))}" ;;',
    ]
    for group in _groups():
        inner = " ".join(v.words[1] for v in verbs.verbs() if v.words[0] == group)
        lines.append(f'        "{group}") words="{inner}" ;;')
    for verb in verbs.verbs():
        choices = [choice for param in verb.arguments for choice in param.choices]
        lines.append(
            f'        "{" ".join(verb.words)}") words="{" ".join((*choices, *_words(verb.options)))}" ;;'
        )
    files = "|".join(f'"{" ".join(v.words)}"' for v in verbs.verbs() if any(p.is_file for p in v.arguments))
    lines += [
        "    esac",
        '    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")',
        '    case "$verb" in',
        f"        {files}) compopt -o filenames 2>/dev/null",
        '            mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$cur") ;;',
        "    esac",
        "}",
        f"complete -F _kvtierctl {PROGRAM}",
    ]
    return "\n".join(lines) + "\n"


def zsh() -> str:
    """The function for zsh's site-functions."""
    lines = [
        f"#compdef {PROGRAM}",
        f"# zsh completion for {PROGRAM}; written by the build from its command line",
        "_kvtierctl() {",
        "  local curcontext=$curcontext state line",
        "  typeset -A opt_args",
        f"  _arguments -C {_specs(verbs.global_params())} '1: :->verb' '*:: :->rest'",
        "  case $state in",
        "    verb)",
        f"      local -a verbs=({' '.join(_described(t, _summary(t)) for t in _tops())})",
        "      _describe verb verbs ;;",
        "    rest)",
        "      case $line[1] in",
    ]
    lines += [f"        {v.words[0]}) _arguments {_of(v)} ;;" for v in verbs.verbs() if len(v.words) == 1]
    for group in _groups():
        inner = [v for v in verbs.verbs() if v.words[0] == group]
        described = " ".join(_described(v.words[1], v.summary) for v in inner)
        lines += [
            f"        {group})",
            "          if (( CURRENT == 2 )); then",
            f"            local -a verbs=({described})",
            "            _describe verb verbs",
            "          else",
            "            shift words; (( CURRENT-- ))",
            "            case $words[1] in",
            *(f"              {v.words[1]}) _arguments {_of(v)} ;;" for v in inner),
            "            esac",
            "          fi ;;",
        ]
    lines += ["      esac ;;", "  esac", "}", '_kvtierctl "$@"']
    return "\n".join(lines) + "\n"


def _groups() -> tuple[str, ...]:
    return tuple(dict.fromkeys(v.words[0] for v in verbs.verbs() if len(v.words) > 1))


def _tops() -> tuple[str, ...]:
    return tuple(dict.fromkeys(v.words[0] for v in verbs.verbs()))


def _groups_test() -> str:
    return "@(" + "|".join(_groups()) + ")"


def _summary(top: str) -> str:
    own = [v.summary for v in verbs.verbs() if v.words == (top,)]
    return own[0] if own else ", ".join(" ".join(v.words) for v in verbs.verbs() if v.words[0] == top)


def _words(params: Sequence[Param]) -> tuple[str, ...]:
    return tuple(opt for param in params if param.is_option for opt in param.opts)


def _valued(params: Sequence[Param]) -> list[str]:
    return [opt for p in params if p.is_option and p.takes_value for opt in p.opts]


def _every_option() -> list[Param]:
    return [*verbs.global_params(), *(p for v in verbs.verbs() for p in v.options)]


def _files() -> list[str]:
    return _valued([p for p in _every_option() if p.is_file])


def _other_values() -> list[str]:
    return sorted(set(_valued([p for p in _every_option() if not p.is_file])) - set(_files()))


def _pattern(opts: Sequence[str]) -> str:
    return "|".join(dict.fromkeys(opts)) or "--"


def _described(word: str, text: str) -> str:
    return _quote(f"{word}:{text}")


def _of(verb: Verb) -> str:
    return " ".join(filter(None, (_specs(verb.options), *(_place(p) for p in verb.arguments)))).strip()


def _place(param: Param) -> str:
    action = f"({' '.join(param.choices)})" if param.choices else "_files" if param.is_file else ""
    return _quote(f"{'*' if param.multiple else ''}:{param.metavar.lower().replace('|', ' ')}:{action}")


def _specs(params: Sequence[Param]) -> str:
    specs = []
    for param in params:
        if not param.is_option:
            continue
        text = param.help.replace("[", "(").replace("]", ")").replace(":", "\\:")
        value = f":{param.metavar.lower()}:{'_files' if param.is_file else ''}" if param.takes_value else ""
        specs += [_quote(f"{opt}[{text}]{value}") for opt in param.opts]
    return " ".join(specs)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
