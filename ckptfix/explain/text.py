"""Extracts the error messages from pasted text.

A log has timestamps, ranks, colours, quotation marks, progress bars and lines that a terminal has wrapped, and a
traceback may contain several exceptions, of which one matters."""

import os
import re
from collections.abc import Iterator
from enum import Enum
from functools import cached_property

from msgspec import Struct

from ckptfix.reading.folders.ranks.names import POINTERS, RANK_NAMES

LONGEST = 2_000_000  # characters examined, from the end of a log, where the error is

# Characters of a message, which may list ten thousand keys, and of the end of a log without a traceback.
LONGEST_MESSAGE, _LONGEST_LOG = 500_000, 100_000

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_SHOWN_ESCAPE = re.compile(r"(?:\\x1b|\\033|\\u001b|\^\[|␛)\[[0-9;]*m", re.IGNORECASE)
# In a JSON log, or in the repr() of a message. Windows paths contain \n too.
_SHOWN_BREAK = re.compile(r"\\n(?=\\t|\\n|\s|$|Traceback|Missing|Unexpected|size mismatch|The above|During)")
_SHOWN_TAB = re.compile(r"(?<=[\n:])\\t")
_BAR = re.compile(r"[^\n%]{0,200}\d{1,3}%\|[^|\n]{0,300}\|\s*[\d.?]+\w?/[\d.?]+\w?(?:\s*\[[^\]\n]{0,100}\])?")

# What loggers, launchers, mail programs and test runners put in front of a line.
_LEVEL = r"(?:ERROR|WARNING|WARN|INFO|DEBUG|CRITICAL|FATAL)"
_DAY = r"(?:\d{4}[-/]\d\d[-/]\d\d|\d\d[-/]\d\d(?:[-/]\d\d(?:\d\d)?)?)"
_FRONT = re.compile(
    rf"""
      {_LEVEL}?[ ]?\[{_DAY}[ ]\d\d:\d\d:\d\d[ ][\w.]+\]:?[ ]  # detectron2, SGLang
    | \[{_LEVEL}\|[\w.]+:\d+\][ ]  # transformers
    | {_LEVEL}[ ]{_DAY}[ ]\d\d:\d\d:\d\d[ ]\[[\w./]+:\d+\][ ]  # vLLM
    | {_LEVEL}\s+\|[ ][\w.]+:\w+:\d+[ ]-[ ]  # loguru
    | \[{_LEVEL}\][ ]\[(?:[\w.]+:\d+:\w+|RANK[ ]\d+)\][ ]  # DeepSpeed
    | [\w.]+\s-\s{_LEVEL}\s-\s  # mmengine, after the time
    | {_LEVEL}\s-\s[\w.]+\s-\s
    | \[?{_DAY}[T\s_]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?[ :|\->]*
    | \[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?[ :|\-]+
    | [A-Z][a-z]{{2}}\s+\d{{1,2}}\s\d\d:\d\d:\d\d\s\S+\s\S+?(?:\[\d+\])?:[ ]
    | \[?[EWIF]\d{{3,4}}\s\d\d:\d\d:\d\d\.\d+\s+(?:\d+\s)?\S+\][ ]
    | \[?{_LEVEL}\]?(?::[\w.]*:|[ ]?[:|\-][ ]*|\s+(?=\S+(?:Error|Exception):))
    | \#\#\[error\]
    | \[(?:rank[ ]?|default)\d+\]:?[ ]?
    | (?:rank[ ]?|(?:worker|node|gpu)[\w\-]{{0,40}}?)\d+:[ ]
    | [ ]{{0,3}}\d{{1,4}}:(?:[ ]|$)  # srun
    | \[(?:\d+,)?\d+\](?:<\w+>)?:[ ]?
    | \(\w+\s(?:pid=)?\d+(?:,\sip=[\d.]+)?\)[ ]
    | [\w.\-]+[_\-]\d+\s*\|[ ]
    | (?:>{{1,3}}[ ]?)+
    | [│|┃]\s
    | E[ ]{{2,}}
    """,
    re.VERBOSE,
)
_TAIL = re.compile(r"(?<!\s)\s*[│┃]$")
_RULE = re.compile(r"[\s╭╮╰╯─━=\-_~^*+`]*")

_NAME = r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*"
_EXCEPTION = re.compile(rf"\s?{_NAME}(?:Error|Exception|Interrupt|Fault|Failure|Warning|RaisedError)\w*(?::|$)")
_RAISE = re.compile(r"\s+raise \w")  # a line of source code, with the message's template
_HEADER = re.compile(r"^.*Traceback \(most recent call last\).*$", re.MULTILINE)


# The beginnings of messages that may be longer than the examined end of a log.
_BEGINNINGS = (
    "Error(s) in loading state_dict for",
    "Missing key(s) in state_dict: ",
    "Unexpected key(s) in state_dict: ",
)


class Relation(Enum):
    """How an exception is related to the one before it."""

    FIRST = "first"
    CAUSED = "raised from it"
    WHILE_HANDLING = "raised while it was handled"
    SEPARATE = "separate"


_LINKS = re.compile(
    r"The above exception was the (?P<cause>direct) cause of the following exception:?"
    r"|During handling of the above exception, (?P<context>another) exception occurred:?",
)


class Message(Struct, frozen=True, dict=True):
    """One exception in a text, or a text without one: its lines without noise, and its relation to the one before."""

    lines: tuple[str, ...]
    relation: Relation = Relation.FIRST

    @cached_property
    def readings(self) -> tuple[str, ...]:
        """The message as one line, with line breaks as spaces and with none, since terminals break within words."""
        spaced, joined = _one_space("\n".join(self.lines)), _one_space("".join(self.lines))
        return (spaced,) if spaced == joined else (spaced, joined)

    @property
    def headline(self) -> str:
        """The first line of the message that is not blank."""
        return next((line.strip() for line in self.lines if line.strip()), "")


def clean(text: str) -> str:
    """Return the text without colours, progress bars and the prefixes of loggers."""
    text = text[-LONGEST:].replace("\ufeff", "").replace("\r\n", "\n")
    text = _SHOWN_ESCAPE.sub("", _ESCAPE.sub("", text))
    # Each state of a line that was overwritten, such as a progress bar, becomes a line.
    text = text.replace("\r", "\n").replace("\u2018", "'").replace("\u2019", "'")
    if '\\"' in text:
        text = text.replace('\\"', '"')
    text = _SHOWN_TAB.sub("\t", _SHOWN_BREAK.sub("\n", text))
    return "\n".join(_cleaned_line(line) for line in text.split("\n"))


def messages(text: str) -> list[Message]:
    """Return the messages of a text in order, cleaned; a text without a traceback is one message."""
    found: list[Message] = []
    for part, relation in _parts(clean(text)):
        is_about_error = _HEADER.search(part) is not None or _EXCEPTION.match(part.lstrip()) is not None
        part = part[:LONGEST_MESSAGE] if is_about_error else _end(part)
        lines = tuple(line for line in _message_lines(part) if line.strip() and not _RULE.fullmatch(line))
        if lines:
            found.append(Message(lines, relation if found else Relation.FIRST))
    return found


def _parts(text: str) -> Iterator[tuple[str, Relation]]:
    """Yield the text split at the phrases between chained exceptions and at the heads of tracebacks."""
    relation, start = Relation.FIRST, 0
    for link in _LINKS.finditer(text):
        yield from _tracebacks(text[start : link.start()], relation)
        relation, start = Relation.CAUSED if link["cause"] else Relation.WHILE_HANDLING, link.end()
    yield from _tracebacks(text[start:], relation)


def _tracebacks(text: str, relation: Relation) -> Iterator[tuple[str, Relation]]:
    heads = [match.start() for match in _HEADER.finditer(text)]
    if not heads:
        yield text, relation
        return
    if text[: heads[0]].strip():
        # What matters may be logged before the traceback, as CUDA kernels do.
        yield text[: heads[0]], relation
        relation = Relation.SEPARATE if relation is Relation.FIRST else relation
    for begin, end in zip(heads, [*heads[1:], len(text)], strict=True):
        yield text[begin:end], relation
        relation = Relation.SEPARATE


def _end(log: str) -> str:
    """Return the end of a log without a traceback, or more if a long message begins before that."""
    begins = [begin for begin in map(log.rfind, _BEGINNINGS) if begin >= 0]
    start = min([*begins, max(len(log) - _LONGEST_LOG, 0)])
    return log[start : start + LONGEST_MESSAGE] if begins else log[start:]


def _message_lines(part: str) -> list[str]:
    """Return the lines from the exception on; without a traceback, all lines except ``raise`` statements."""
    lines = part.split("\n")
    if not _HEADER.search(part):
        return [line for line in lines if not _RAISE.match(line)]
    later = list(enumerate(lines))[1:]
    begins = [number for number, line in later if _EXCEPTION.match(line)]
    # An exception with an unusual class name is on the first line that is not indented.
    begins = begins or [n for n, line in later if line.strip() and not line[0].isspace() and not _HEADER.match(line)]
    return lines[begins[0] :] if begins else lines


def _cleaned_line(line: str) -> str:
    if "%|" in line:
        line = _BAR.sub("", line)
    for _ in range(6):
        front = _FRONT.match(line)
        if front is None:
            break
        line = line[front.end() :]
    return _TAIL.sub("", line).rstrip()


def _one_space(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


_SUFFIXES = "pth|pt|ckpt|safetensors|bin|pyth|th|t7|pkl|pickle|model|tar|pth\\.tar|pt\\.gz|weights|mdl"
_RECORDS = ("constants.pkl", "data.pkl", "tensors.pkl")  # members of an archive, not files of the user
_QUOTED_FILE = re.compile(rf"""(["'])((?:(?!\1)[^\n\r]){{1,300}}\.(?:{_SUFFIXES}))\1""", re.IGNORECASE)
_QUOTED_FOLDER = re.compile(r"""Is a directory: (["'])([^\n\r]{1,300}?)\1""", re.IGNORECASE)
_BARE_FILE = re.compile(
    rf"(?<![^\s'\"`(\[{{<=:,;|])([\w./\\~\-][\w./\\~:\-]{{0,300}}\.(?:{_SUFFIXES}))(?![\w\-]|\.\w)", re.IGNORECASE
)
_IS_NO_FILE = re.compile(r"://|[{*]|\\d")  # a URL, a template, a pattern of names
_OF_CODE = re.compile(r"\w+\.(?:model|weights)", re.IGNORECASE)  # `self.model` in a line of a traceback


def file_name(text: str) -> str | None:
    """Return the checkpoint that a text names, a file or a folder taken for one; None unless it is exactly one."""
    text = clean(text)
    quoted = {match[2] for pattern in (_QUOTED_FILE, _QUOTED_FOLDER) for match in pattern.finditer(text)}
    bare = {match[1] for match in _BARE_FILE.finditer(text)}
    for found in (quoted, bare):
        names = {name for name in found if not (_IS_NO_FILE.search(name) or name.endswith(_RECORDS))}
        if found is bare:
            names = {name for name in names if _OF_CODE.fullmatch(name) is None}
        if names:
            return names.pop() if len(names) == 1 else None
    return None


# Quoted words, in which repr() escapes a quotation mark; a tag of DeepSpeed is no path.
_QUOTED = re.compile(r"""(?<![\w=])(["'`])((?:\\(?=['"])['"]|(?!\1)[^\n\r]){1,300})\1(?!\w)""")
_BARE = re.compile(r"[^\s'\"`()\[\]{}<>,;|=]{1,300}")
_SAVE = re.compile(r"global_?step_?\d+|checkpoint-\d+|iter_\d{7}|step-\d+")  # the names that programs give to a save
_MOST_FOLDERS = 10  # of one save, with those around it
_OF_DCP = re.compile(r"__\d+_\d+\.distcp|\.metadata")
_OF_SAVES = re.compile(r".*\.(?:pth?|bin|ckpt|safetensors|distcp|metadata)")  # no logs and scripts with a rank's number


def folder_name(text: str) -> str | None:
    """Return the folder of a save that a text names, or that has the rank's file which it names; None unless it is
    exactly one. Of a folder and one inside it, the inner one is returned."""
    quoted = [match[2].replace("\\'", "'") for match in _QUOTED.finditer(text)]
    bare = [match[0].rstrip(".:") for match in _BARE.finditer(_QUOTED.sub(" ", text))]
    paths = {path for path in (*quoted, *bare) if not _IS_NO_FILE.search(path)}
    found = {folder for path in paths if (folder := _folder_of_save(path))}
    if len(found) > _MOST_FOLDERS:
        return None
    inner = [one for one in found if not any(other.startswith(f"{one}/") for other in found)]
    return inner[0] if len(inner) == 1 and not _is_absent(inner[0], text) else None


def _is_absent(folder: str, text: str) -> bool:
    """Return whether the text says that there is no such folder."""
    word, end = re.escape(folder), r"[/\\]?['\"]?(?![\w/\\])"
    before, after = r"(?:not found at|no such file or directory:) ['\"]?", r" (?:does not|doesn't) exist"
    return re.search(rf"{before}{word}{end}|{word}{end}{after}", text, re.IGNORECASE) is not None


def _folder_of_save(path: str) -> str | None:
    """Return the folder of a path to it, to a file of a rank or to a file that names a save; None if it is neither.
    It may also be an existing folder with a file that names a save. A single word may be a tag or a name, and is not
    taken for a path."""
    parts = re.split(r"[/\\]", path.rstrip("/\\"))
    name = parts[-1]
    depth = 0 if _SAVE.fullmatch(name) else None
    if name in POINTERS or _OF_DCP.fullmatch(name):
        depth = 1
    elif _OF_SAVES.fullmatch(name):
        for kind in RANK_NAMES:
            if kind.files.fullmatch("/".join(parts[-kind.depth :])):
                depth = kind.depth
                break
    if depth is None and len(parts) > 1 and any(map(os.path.isfile, (f"{path}/{latest}" for latest in POINTERS))):
        depth = 0  # os.path.isfile raises for no name
    if depth is None or len(parts) <= max(depth, 1):
        return None
    return path.rstrip("/\\")[: len("/".join(parts[: len(parts) - depth]))] or None
