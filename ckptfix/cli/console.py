"""Writes to the two streams, and turns exceptions into messages and exit codes.

The report goes to stdout, everything else to stderr. An error is one line, and the exit code is 2."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click
from msgspec import Struct, field

from ckptfix.core.progress import SMALL, Task, watched_by
from ckptfix.errors import CkptfixError, HostileError, TargetError, UnreadableError, UsageError, WriteError
from ckptfix.report.style import Line, Span, TextFormat, size

QUIET = 2.0  # seconds before any progress is shown: most work is done by then

# Seconds between two updates: on a terminal, where a line replaces the last one, and elsewhere.
LIVE, SELDOM = 0.2, 10.0
_SETTLED = 1.0  # seconds after which the rate of a task can predict the rest


class Meter(Struct):
    """Watches the work on one file, and passes its progress to ``show`` every ``every`` seconds of ``clock``."""

    show: Callable[[str], None]
    every: float = LIVE
    clock: Callable[[], float] = time.monotonic
    _shown: float = 0.0
    _began: dict[int, tuple[Task, float, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shown = self.clock() + max(QUIET, self.every) - self.every

    def advanced(self, task: Task) -> None:
        """Show the progress of the task, if it is time to."""
        now = self.clock()
        # The task itself is kept too, so that its id is not reused.
        _, began, before = self._began.setdefault(id(task), (task, now, task.done))
        if now - self._shown < self.every or task.total < SMALL:
            return
        self._shown = now
        done = min(task.done, task.total)  # a tensor may be read twice, so more than the total can pass
        share = 100 * done // max(task.total, 1)
        text = f"{task.name}: {share} %, {size(done)} of {size(task.total)}"
        if now - began >= _SETTLED and task.done > before:
            rate = (task.done - before) / (now - began)
            text += f", {size(round(rate))}/s, {time_text((task.total - done) / rate)} left"
        self.show(text)

    def waits(self, reason: str, seconds: float) -> None:
        """Show at once why the work pauses, unless the pause is short."""
        if seconds >= QUIET:
            self.show(f"{reason}: next try in {time_text(seconds)}")


def time_text(seconds: float) -> str:
    """Return a duration in words: ``4 s``, ``2 min``, ``30 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.0f} h"


FAILED = 2  # exit code after an error: unreadable or hostile file, wrong usage, our bug
_BY_SIGNAL, _PIPE_CLOSED = 128, 141  # shells use 128 + the number of the signal; SIGPIPE is 13


class Stopped(KeyboardInterrupt):
    """A signal asks the program to end. Handled like Ctrl-C: unfinished files are removed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def open_streams() -> None:
    """Open /dev/null for each standard stream that the caller closed. Otherwise a file opened later would get its
    descriptor, and with it the output meant for the stream."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest free number
        name = ("stdin", "stdout", "stderr")[descriptor]
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", encoding="utf-8"))
    os.close(descriptor)


def handle_signals() -> None:
    """Make SIGTERM and SIGHUP raise ``Stopped``, so that unfinished files are removed."""

    def stop(number: int, _frame: object) -> None:
        raise Stopped(number)

    def insist(ignored: Any) -> None:
        """Raise the exception again a little later: Python drops those that are raised in a finalizer."""
        if not issubclass(ignored.exc_type, KeyboardInterrupt) or not hasattr(signal, "setitimer"):
            sys.__unraisablehook__(ignored)
            return
        number = getattr(ignored.exc_value, "number", signal.SIGINT)
        signal.signal(signal.SIGALRM, lambda *_: stop(number, None))
        signal.setitimer(signal.ITIMER_REAL, 0.001)

    sys.unraisablehook = insist
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # What the parent ignores, as nohup does, stays ignored.
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, stop)


class ShownError(Struct, frozen=True):
    """An error that was shown: its message, whether the file is built to run code, and the data of an
    ``UnreadableError``."""

    message: str
    runs_code: bool = False
    data: Mapping[str, Any] | None = None


class Console(Struct):
    """The output streams of a command.

    ``failures`` has the errors that were shown. ``is_fatal`` is set after an error that all other files would have
    too."""

    quiet: bool = False
    verbose: bool = False
    failures: list[ShownError] = field(default_factory=list)
    is_fatal: bool = False
    _shows_progress: bool = False
    _begun: float = field(default_factory=time.monotonic)

    def write(self, lines: Iterable[Line], *, plain: bool = False) -> None:
        """Write lines to stdout; ``plain`` ones, for a program, without colours and without wrapping."""
        self.end_progress()
        shown = TextFormat.of(sys.stdout)
        write_output((TextFormat(encoding=shown.encoding) if plain else shown).write(lines))

    def note(self, text: str) -> None:
        """Write a line to stderr, unless ``quiet`` is set."""
        if not self.quiet:
            self.end_progress()
            _write_error([f"ckptfix: {text}"])

    def progress(self, text: str) -> None:
        """Show on a terminal what is being done, until something else is written."""
        if is_live() and not self.quiet:
            self.end_progress()
            text_format = TextFormat.of(sys.stderr)
            shown = f"{text} …"
            if text_format.width and len(shown) >= text_format.width:  # a second row could not be erased
                shown = f"{text[: max(text_format.width - 3, 1)]} …"
            _write_error_text(text_format.write([shown]).rstrip("\n"))
            self._shows_progress = True

    @contextmanager
    def showing_progress(self) -> Iterator[None]:
        """Show the progress of the work in the block: live on a terminal, otherwise as a line every ten seconds."""
        meter = Meter(self.progress) if is_live() else Meter(self.note, SELDOM)
        with watched_by(meter):
            yield

    def end_progress(self) -> None:
        """Erase the line of ``progress``."""
        if self._shows_progress:
            _write_error_text("\r\x1b[K")
            self._shows_progress = False

    @contextmanager
    def reporting_errors(self, source: str = "", *others: str) -> Iterator[None]:
        """Show an error raised in the block, with ``source`` in front, and go on. A signal or a closed pipe ends the
        program.

        ``others`` are further input files: an error about one of them names that file instead."""
        names = (source, *others)
        try:
            try:
                yield
            finally:
                self.end_progress()
        except TargetError as error:
            # The traceback of the user's code, without frames of ours.
            _write_error_text(error.traceback_text)
            self._fail(_worded(error))
            self.is_fatal = True
        except UsageError as error:
            self._fail(_worded(error))
            # An error that is not about this file would recur for all others.
            self.is_fatal = bool(source) and not _begins_with([source], str(error))
        except CkptfixError as error:
            runs_code = isinstance(error, HostileError) and error.runs_code
            self._fail(
                _naming(names, _worded(error)), runs_code, error.data if isinstance(error, UnreadableError) else None
            )
        except BrokenPipeError:
            _close_quietly(sys.stdout)
            raise click.exceptions.Exit(_PIPE_CLOSED) from None
        except OSError as error:
            # The only missing file without a name is the working directory.
            is_homeless = isinstance(error, FileNotFoundError) and error.filename is None
            place = f"{error.filename}: " if error.filename else "the working directory: " if is_homeless else ""
            self._fail(_naming(names, f"{place}{error.strerror or error}"))
        except (click.exceptions.Exit, click.ClickException):
            raise
        except KeyboardInterrupt as stop:
            raise click.exceptions.Exit(self.report_stop(stop, source)) from None
        except MemoryError:
            self._fail(_naming(names, "not enough memory for this file"))
        except Exception as error:  # noqa: BLE001 - the outermost place: what gets here is a bug of ours, and is reported as one
            if self.verbose:
                _write_error_text(traceback.format_exc())
            self._fail(_naming(names, _too_little(error) or _bug(error)))

    @contextmanager
    def exiting_on_error(self, source: str = "", form: str = "full") -> Iterator[None]:
        """Show an error raised in the block, for the format ``json`` also on stdout, and exit with code 2."""
        failed_before = len(self.failures)
        with self.reporting_errors(source):
            yield
        if len(self.failures) > failed_before:
            if form == "json":
                from ckptfix.core.report import error_to_json

                last = self.failures[-1]
                write_output(json.dumps(error_to_json(source or None, last.message, last.data), indent=2) + "\n")
            raise click.exceptions.Exit(FAILED)

    def report_stop(self, stop: KeyboardInterrupt, source: str = "") -> int:
        """Show in one line that a signal stopped the work on ``source``, and return the exit code."""
        name = signal.strsignal(number := getattr(stop, "number", signal.SIGINT))
        from ckptfix.writing.atomic import placed  # nothing else needs it

        state = "; ".join(f"{path} is complete and in place" for path in placed(self._begun)) or "no source was changed"
        self._fail(_naming([source], f"stopped ({name}): no unfinished file is left, and {state}"))
        return _BY_SIGNAL + int(number)

    def usage(self, error: click.ClickException) -> None:
        """Show what is wrong with the command line, and how to get its help."""
        context = error.ctx if isinstance(error, click.UsageError) else None
        _write_error_text(f"{context.get_usage()}\n" if context is not None else "")
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        self._fail(f"{error.format_message().rstrip('.')}{hint}")

    def _fail(self, message: str, runs_code: bool = False, data: Mapping[str, Any] | None = None) -> None:
        self.failures.append(ShownError(message, runs_code, data))
        _write_error([("ckptfix: ", Span("error: ", "error"), message)])


def write_output(text: str) -> None:
    """Write to stdout and flush, so that a closed pipe raises here. Raises ``WriteError`` if the disk is full."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _close_quietly(sys.stdout)
        raise WriteError(f"cannot write the report to stdout: {error.strerror}; redirect it elsewhere") from error


def is_live() -> bool:
    """Return whether stderr is a terminal that can erase a line."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _write_error(lines: Iterable[Line]) -> None:
    _write_error_text(TextFormat.of(sys.stderr).write(lines))


def _write_error_text(text: str) -> None:
    """Write to stderr, ignoring failures: a lost note affects neither the result nor the exit code."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _close_quietly(sys.stderr)


def _close_quietly(stream: TextIO) -> None:
    """Redirect the stream to /dev/null, so that Python's flush at exit cannot fail
    (https://docs.python.org/3/library/signal.html#note-on-sigpipe)."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())


def _worded(error: CkptfixError) -> str:
    """Return the message with its options as flags."""
    from ckptfix.core.options import flag_text

    return error.worded(flag_text)


def _naming(names: Sequence[str], message: str) -> str:
    """Return the message with the first name in front, unless it starts with one of the names already."""
    return f"{names[0]}: {message}" if names and names[0] and not _begins_with(names, message) else message


def _begins_with(names: Iterable[str], message: str) -> bool:
    return any(message.startswith((f"{name}: ", f"{name}{os.sep}")) for name in names if name)


# What torch, CUDA and the system say when memory runs out; they have no common exception for it.
_OUT_OF_MEMORY = ("not enough memory", "out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc")


def _too_little(error: Exception) -> str:
    """Return the message for an error that the machine caused, and not a bug of ckptfix; otherwise an empty text."""
    if any(words in str(error) for words in _OUT_OF_MEMORY):
        return f"not enough memory ({str(error).splitlines()[0]})"
    if isinstance(error, (ImportError, SystemError)):  # SystemError: an import in C that ran out of memory
        # If a shared library does not load, the error has no name: take the package whose import was under way.
        files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        begun = [file.parent.name for file in files if file.name == "__init__.py"]
        for part in ((getattr(error, "name", None) or "").partition(".")[0], *begun):
            if part in _PARTS:
                return f"this needs {part}, which cannot be imported ({error})"
    return ""


_PARTS = ("torch", "numpy", "safetensors", "jinja2", "fsspec", "ray")  # packages that only some commands need


def _bug(error: Exception) -> str:
    package = str(Path(__file__).parent.parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(package)]
    place = f" at ckptfix{frames[-1].filename.removeprefix(package)}:{frames[-1].lineno}" if frames else ""
    what = f"{type(error).__name__}{place}: {error}"
    return f"this is a bug of ckptfix, please report it (-v shows the traceback): {what}"
