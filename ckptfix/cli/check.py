"""``ckptfix check``: report what is wrong with checkpoints and change nothing."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.cli.output import ReportWriter
from ckptfix.cli.program import Argument, Run
from ckptfix.core.option import CHECK
from ckptfix.core.options import library_settings
from ckptfix.core.report import Report
from ckptfix.errors import CkptfixError, MissingSaveError, Opt, UnreadableError, UsageError
from ckptfix.report.advice import Presentation

if TYPE_CHECKING:
    from concurrent.futures import Future

ARGUMENTS = {"check": (Argument("paths", "PATH", "Checkpoints, or folders of checkpoints.", many=True),)}


def check(run: Run, paths: Sequence[str]) -> int:
    """Report what is wrong with checkpoints, and change nothing.

    Without --model or --like, only defects of the file itself are found. A folder that is not a checkpoint itself is
    searched for checkpoints."""
    console, choices = run.console, run.choices
    with console.exiting_on_error():
        arguments = library_settings(choices, CHECK)
        writer = ReportWriter(console, choices)
        presentation = Presentation(CHECK, console.verbose, choices)
        found = [each for path in paths for each in _checkpoints(path)]
        with _checking(found, arguments, choices.get("jobs", 1)) as reports:
            for number, (path, report) in enumerate(zip(found, reports, strict=True), 1):
                console.progress(f"checking {path}{f' ({number} of {len(found)})' if len(found) > 1 else ''}")
                writer.write_report(path, presentation, report)
                if console.is_fatal:
                    break
        writer.close()
    return writer.exit_code


def _checkpoints(path: str) -> Iterable[str]:
    """Return the checkpoints of a folder, or the path itself."""
    if not Path(path).is_dir():
        return [path]
    import ckptfix
    from ckptfix.reading.folders import dcp
    from ckptfix.reading.folders.folders import dcp_items, has_ranks, only_checkpoint, weights_file
    from ckptfix.reading.opening import OF_TRAINERS

    is_of_library = is_below = False
    lacking: list[str] = []
    try:
        # Ranks are not read twice: there may be hundreds, or a hundred thousand chunks.
        if not (dcp.looks_like(Path(path)) or has_ranks(Path(path))):
            opened = Path(ckptfix.open_checkpoint(path).path)
            is_of_library = weights_file(path) is not None
            # If it is a part of the folder, the other files are checked too.
            is_below = only_checkpoint(Path(path)) in (opened, *opened.parents) or [opened] == dcp_items(Path(path))[1]
        if not is_of_library and not is_below:
            return [path]
    except MissingSaveError:
        lacking = [path]  # its report is the error; the saves that are there are checked too
    except UnreadableError:
        pass
    except CkptfixError:  # a checkpoint; the check reports what is wrong with it
        return [path]
    from ckptfix.zoo.items import ItemKind, list_zoo
    from ckptfix.zoo.places import open_place

    kept = []
    for item in list_zoo(open_place(path)):
        # A trainer's files are read together with the weights next to them, here and in the folders of other steps.
        is_left = is_of_library and OF_TRAINERS.fullmatch(Path(item.name).name)
        if item.kind is ItemKind.OTHER or is_left or (item.tolerates and _fails_with(item.tolerates, path, item.name)):
            continue
        kept.append(item.name)
    if is_of_library and sum("/" not in name for name in kept) < 2:
        return [path]
    return [*lacking, *(str(Path(path, name)) for name in kept)] or [path]


def _fails_with(kind: type[CkptfixError], folder: str, name: str) -> bool:
    """Return whether opening a file raises an error of this class; any other error is left to the report."""
    from ckptfix.reading.opening import open_file

    try:
        open_file(str(Path(folder, name)))
    except CkptfixError as error:
        return isinstance(error, kind)
    return False


@contextmanager
def _checking(
    paths: Sequence[str], arguments: Mapping[str, Any], jobs: int
) -> Iterator[Iterable[Callable[[], Report]]]:
    """Yield a function for each path that returns its report; several of them run in ``jobs`` processes."""
    if jobs < 1:
        raise UsageError(Opt("jobs", jobs), ": give 1 or more")
    if min(jobs, len(paths)) < 2:
        yield (partial(_check, path, arguments) for path in paths)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(
        min(jobs, len(paths)),
        # No threads run yet, so forking is safe, and it saves starting Python again; on macOS it is never safe.
        multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn"),
        # Ctrl-C reaches every process of the terminal; only this one reports it.
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        futures = [pool.submit(_check, path, arguments) for path in paths]
        yield [partial(_result, future, path) for future, path in zip(futures, paths, strict=True)]
    finally:
        pool.shutdown(cancel_futures=True)


def _result(future: Future[Report], path: str) -> Report:
    from concurrent.futures.process import BrokenProcessPool

    try:
        return future.result()
    except BrokenProcessPool as error:
        raise CkptfixError(
            f"{path}: its process was killed, perhaps because it ran out of memory; use fewer jobs"
        ) from error


def _check(path: str, arguments: Mapping[str, Any]) -> Report:
    # Imported here because --help and --version do not need it.
    import ckptfix

    return ckptfix.check(path, **arguments)
