"""Writes the files that a trainer saved next to a checkpoint, its optimizer and scheduler, with the result."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Regroup
from ckptfix.core.finding import Level, Subject
from ckptfix.core.report import Report
from ckptfix.core.settings import PTH, UNIVERSAL, Settings
from ckptfix.engine.destination import Destination
from ckptfix.engine.verification import verify_tree
from ckptfix.errors import WriteError
from ckptfix.reading.opening import MODELS, OF_TRAINERS
from ckptfix.writing.atomic import flush_file, refuse_output, temporary_beside, unwritten
from ckptfix.writing.output import flushing, without_state_dict, write_to, writer_for
from ckptfix.writing.plain import plain_root


@contextmanager
def trainer_files(
    result: Checkpoint, report: Report, destination: Destination, settings: Settings
) -> Iterator[dict[Path, Path]]:
    """Write the trainer's files that have to change with the checkpoint, and yield the target path of each temporary
    file.

    In another folder they keep their names; next to the source they are named like the checkpoint. A trainer resumes
    from all files of a folder, so a folder with the model gets the unchanged files too, unless an optimizer does not
    fit."""
    if destination.form == UNIVERSAL:  # contains the optimizer
        yield {}
        return
    regroups = [edit for edit in report.edits if isinstance(edit, Regroup)]
    changed = {name for name in result.beside for edit in regroups if edit.where.startswith(name)}
    source = Path(result.path)
    folder = source if source.is_dir() else source.parent
    is_elsewhere = folder.resolve() != destination.output.parent.resolve()
    if changed and (is_elsewhere or any(edit.like != tuple(range(len(edit.like))) for edit in regroups)):
        changed |= {name for name in result.beside if name.startswith("scheduler")}  # trainers load both or neither
    is_in_place = destination.like == destination.output
    with ExitStack() as stack:
        files: dict[Path, Path] = {}
        is_resumed = is_elsewhere and destination.output.name in MODELS and bool(result.beside)
        is_unfit = any(each.subject is Subject.OPTIMIZER and each.level is Level.ERROR for each in report.left)
        if is_resumed and not settings.drop_optimizer and not is_unfit:
            for old in sorted(folder.iterdir()):
                if old.name in changed or not OF_TRAINERS.fullmatch(old.name) or not old.is_file():
                    continue
                goal = destination.output.with_name(old.name)
                if goal.is_file() and filecmp.cmp(old, goal, shallow=False):
                    continue
                refuse_output(goal, settings.force)
                temporary = stack.enter_context(temporary_beside(goal, old))
                _copy(old, temporary, goal)
                files[temporary] = goal
        for name in sorted(changed):
            root = result.beside[name]
            fixed = f"{Path(name).stem}.fixed{Path(name).suffix}"
            goal = destination.output.with_name(name if is_elsewhere or is_in_place else fixed)
            if not is_in_place:
                refuse_output(goal, settings.force)
            tree = replace(without_state_dict(result, root), path=str(folder / name))
            temporary = stack.enter_context(temporary_beside(goal, folder / name))
            written = write_to(temporary, tree, writer_for(PTH, None), goal)
            with flushing([written], goal, destination.flush):
                verify_tree(temporary, plain_root(tree)[0], goal)
            files[temporary] = goal
        yield files


def _copy(old: Path, temporary: Path, goal: Path) -> None:
    try:
        shutil.copyfile(old, temporary)
        flush_file(temporary)
    except OSError as error:
        raise unwritten(goal, error) from error
    if not filecmp.cmp(old, temporary, shallow=False):
        raise WriteError(f"{goal}: differs from {old}, although it is a copy; the disk or memory is faulty")
