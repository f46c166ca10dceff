"""Sets of files in a folder that are numbered by rank, as far as their names say: the model's, and others beside it.

Names of files: verl, dinov2, fvcore, accelerate, torch_checkpointing, Composer."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from ckptfix.bytes.files import small_text
from ckptfix.bytes.listing import list_folder, stamp_of
from ckptfix.core.wording import first_names
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.ranks.files import add_rank
from ckptfix.reading.folders.ranks.names import ITEM, ITEM_METADATA, NUMBERED

# Prefixes of a trainer's files beside those of the model (verl, accelerate).
_OPTIMIZERS = "optim"
_BESIDE = (_OPTIMIZERS, "extra_state", "rng", "random", "scheduler", "lr_scheduler", "dataloader", "train_state")


class RankSet(Struct, frozen=True):
    """The files of one save by rank, and the common parts of their names; ``world`` is 0 if not in the names."""

    stem: str
    world: int
    suffix: str
    files: Mapping[int, Path]

    @property
    def count(self) -> int:
        """The number of ranks, as far as files and names say."""
        return max(len(self.files), self.world)

    @property
    def pattern(self) -> str:
        """The name of a file with a placeholder for the rank."""
        first, path = next(iter(self.files.items()))
        return re.sub(rf"((?:rank|shard)[._=-]?|_)0*{first}(?={re.escape(self.suffix)}$)", r"\g<1>{}", path.name)

    @property
    def is_beside(self) -> bool:
        """Whether a trainer saves such files beside those of a model."""
        return self.stem.startswith(_BESIDE)

    @property
    def is_optimizer(self) -> bool:
        return self.stem.startswith(_OPTIMIZERS)


_SetKey = tuple[str, int, str]  # identifies a set in a folder: stem, world and suffix


def rank_sets(folder: Path) -> Mapping[_SetKey, RankSet]:
    """Return the sets of files in a folder that are numbered by rank, as far as their names say."""
    stamp = stamp_of(folder)
    return _sets_of(folder) if stamp is None else _known_sets(folder, stamp)


@lru_cache(maxsize=1)  # called for every file of a folder, of which there may be thousands
def _known_sets(folder: Path, stamp: int) -> Mapping[_SetKey, RankSet]:
    return _sets_of(folder)


def _sets_of(folder: Path) -> Mapping[_SetKey, RankSet]:
    found: dict[_SetKey, dict[int, Path]] = {}
    numbered = _names(folder)
    for match in filter(None, map(numbered.fullmatch, list_folder(folder).files)):
        add_rank(found.setdefault(_key(match), {}), int(match["rank"]), folder / match[0])
    return {key: RankSet(*key, dict(sorted(files.items()))) for key, files in found.items()}


def set_of(file: Path) -> RankSet | None:
    """Return the set of a file; None if its name has no number of a rank."""
    match = _names(file.parent).fullmatch(file.name)
    return rank_sets(file.parent).get(_key(match)) if match else None


def _names(folder: Path) -> re.Pattern[str]:
    return ITEM if (folder / ITEM_METADATA).is_file() else NUMBERED


def _key(match: re.Match[str]) -> _SetKey:
    return match["stem"], int(match["world"] or 0), match["suffix"]


def chosen_set(folder: Path) -> RankSet | None:
    """Return the set of files in a folder; of several, that of the model. Raises ``UnreadableError`` if that is none or
    several."""
    models = latest_sets(folder)
    if len(models) > 1:
        names = first_names([next(iter(found.files.values())).name for found in models])
        raise UnreadableError(
            f"{folder}: holds {len(models)} sets of files that ranks wrote ({names}); name one of the files"
        )
    return models[0] if models else None


def model_sets(folder: Path) -> list[RankSet]:
    """Return the sets of files that may be those of the model, of one save or several, as far as their names say."""
    return sets_of_models(rank_sets(folder).values())


def sets_of_models(sets: Iterable[RankSet]) -> list[RankSet]:
    """Return those of the sets in a folder that may be of the model."""
    sets = [found for found in sets if found.count > 1]
    sets = [found for found in sets if not found.is_beside] or sets
    return [found for found in sets if found.stem.startswith("model")] or sets


def latest_sets(folder: Path) -> list[RankSet]:
    """Return the sets of the model that are marked as the latest; all of them if none is."""
    sets = model_sets(folder)
    if len(sets) < 2:
        return sets
    # Links to one of several sets mark the latest, such as `latest-rank0.pt` of Composer.
    links = {path.resolve().name for found in sets for path in found.files.values() if path.is_symlink()}
    # So do the files of dinov2, one for each rank.
    links |= {small_text(file).strip() for file in folder.glob("last_checkpoint.rank_*")}
    return [each for each in sets if any(path.name in links for path in each.files.values())] or sets
