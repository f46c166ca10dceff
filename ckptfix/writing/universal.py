"""Writes a universal checkpoint of DeepSpeed, from which a run resumes under any stage of ZeRO on any number of ranks.

``<output>/latest_universal`` names the tag. ``<output>/<tag>/zero/<name>/`` has the fp32 master and the moments of a
parameter, one file each. The model states beside it have the names, the groups and the untrained tensors. They are
written twice, because stage 3 looks for them under another name, and without the trained weights, which DeepSpeed takes
from the masters (``DeepSpeedEngine._load_checkpoint``).

The folder is created under a temporary name, and renamed when it is complete and flushed to disk."""

import contextlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.files import small_text
from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.facts import Kind
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.core.wording import first_names
from ckptfix.errors import Opt, WriteError
from ckptfix.maps.optimizer_states import optimizer_of
from ckptfix.maps.recipes import number_of
from ckptfix.reading.folders.ranks.names import LATEST, LATEST_UNIVERSAL, OF_DEEPSPEED
from ckptfix.reading.folders.ranks.universal import GROUPS, MASTER, PARAMETERS
from ckptfix.reading.folders.ranks.zero import beside
from ckptfix.writing.atomic import temporary_folder_beside, unwritten
from ckptfix.writing.output import Written, without_state_dict, write_to
from ckptfix.writing.torch_files import write_zip

# The names under which stages 1 and 2, and stage 3, look for the model states.
MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")

# The release of DeepSpeed to name for a source that is not DeepSpeed's, because it refuses states without one.
RELEASE = "0.19.8"

_MODULE = "module"


def universal_form(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint in the form that the folder has when opened: weights in ``module``, and the optimizer's state
    keyed by name.

    Raises ``WriteError`` if the optimizer's state is missing or not keyed by name, or if a master is not fp32."""
    root = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    alone = {key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in root.items()}
    found = [(key, made) for key, value in alone.items() if (made := _by_name(value, checkpoint.specs)) is not None]
    if len(found) != 1:
        if not found and (ranks := beside(Path(checkpoint.path))) is not None:
            raise WriteError(
                f"{checkpoint.path}: has no optimizer, which a universal checkpoint needs; the ranks of the training "
                f"run have it: name {ranks}"
            )
        ids = {name for value in alone.values() if (other := optimizer_of(value, ())) for name in other.ids}
        if not found and ids & checkpoint.specs.keys() and (lost := sorted(ids & checkpoint.lost.keys())):
            raise WriteError(
                f"{checkpoint.path}: a universal checkpoint needs all weights of its optimizer, and "
                f"{first_names(lost)} {'is' if len(lost) == 1 else 'are'} lost; complete it from another checkpoint "
                "with ",
                Opt("fill"),
                ", or write a file with ",
                Opt("format", "pth"),
            )
        raise WriteError(
            f"{checkpoint.path}: a universal checkpoint needs one optimizer with its state keyed by parameter name, "
            f"and there {'is none' if not found else f'are {len(found)}'}; write a file with ",
            Opt("format", "pth"),
        )
    (place, optimizer), *_ = found
    if odd := [name for name in optimizer["state"] if checkpoint.specs[name].dtype != "float32"]:
        raise WriteError(
            f"{checkpoint.path}: a universal checkpoint has fp32 masters, and {first_names(odd)} would be "
            f"{checkpoint.specs[odd[0]].dtype}; write it with ",
            Opt("dtype", "float32"),
        )
    if odd := [name for name in optimizer["state"] if Path(name).name != name]:
        raise WriteError(f"{checkpoint.path}: {first_names(odd)} cannot be folder names, one per parameter")
    kept = {key: value for key, value in root.items() if key not in (place, *checkpoint.container[:1])}
    step = next((number_of(entry.get("step")) for entry in optimizer["state"].values()), None)
    around = {
        # Fields that DeepSpeed requires.
        **{"dp_world_size": 1, "mp_world_size": 1, "global_steps": 0, "global_samples": 0, "skipped_steps": 0},
        **{"lr_scheduler": None, "ds_config": {}, "ds_version": RELEASE},
        **kept,
    }
    if "global_steps" not in kept and isinstance(step, (int, float)) and math.isfinite(step):
        around["global_steps"] = int(step)
    whole = {_MODULE: dict(checkpoint.entries), **around, "optimizer": optimizer}
    return replace(checkpoint, container=(_MODULE,), root=whole)


def _by_name(value: Any, specs: Mapping[str, TensorSpec]) -> dict[str, Any] | None:
    """Return the state and groups of an optimizer whose ids are the names of weights; None for any other value.

    Flat keys have the options of each parameter; parameters with the same options become a group."""
    found = optimizer_of(value, ())
    if found is None or not found.state or not found.state.keys() <= {*found.ids} <= specs.keys():
        return None
    state = {name: found.state.get(name, {}) for name in found.ids}
    if not found.is_flat:
        return {**value, "state": state}
    groups: list[dict[str, Any]] = []
    for group in found.groups:
        same = next((one for one in groups if {**one, "params": group["params"]} == group), None)
        if same is None:
            groups.append({**group, "params": list(group["params"])})
        else:
            same["params"] += group["params"]
    return {"state": state, "param_groups": groups}


@contextlib.contextmanager
def temporary_universal(output: Path, checkpoint: Checkpoint) -> Iterator[tuple[Path, list[Written]]]:
    """Write a checkpoint in ``universal_form`` to a temporary folder; provide the folder and its files.

    The folder is removed at the end unless it was renamed."""
    root: Any = checkpoint.root
    optimizer = root["optimizer"]
    state, groups = optimizer["state"], optimizer["param_groups"]
    tag = _tag(checkpoint)
    with temporary_folder_beside(output) as around:
        folder = around / output.name
        parameters = folder / tag / PARAMETERS
        written = []

        def write(file: Path, value: Any) -> None:
            written.append(write_to(file, without_state_dict(checkpoint, value), write_zip, output))

        try:
            parameters.mkdir(parents=True)
            for name, moments in state.items():
                (parameters / name).mkdir()
                spec = checkpoint.specs[name]
                for kind, value in {MASTER: spec, **moments}.items():
                    is_like_weight = isinstance(value, TensorSpec) and value.shape == spec.shape and kind != "step"
                    write(parameters / name / f"{kind}.pt", {"param": value, "cat_dim": 0} if is_like_weight else value)
            numbered = [{**group, "params": [number]} for number, group in enumerate(groups)]
            first = next(iter(state.values()))
            inner = {"state": {number: {"step": first.get("step")} for number in range(len(groups))}}
            common = {
                "param_groups": numbered,
                "optimizer_state_dict": {**inner, "param_groups": numbered},  # where stage 3 looks for them
                "ds_version": root["ds_version"],
            }
            write(parameters / GROUPS, common)
            states = _model_states(checkpoint)
            written += [write_to(folder / tag / file, states, write_zip, output) for file in MODEL_STATES]
            (folder / LATEST_UNIVERSAL).write_text(tag, encoding="utf-8")
        except OSError as error:
            raise unwritten(output, error) from error
        yield folder, written


def _tag(checkpoint: Checkpoint) -> str:
    """Return the tag: the folder of the source if it is one of a run, because accelerate (``pytorch_model``) and
    Lightning (``checkpoint``) load only their own."""
    root: Any = checkpoint.root
    folder, steps = Path(checkpoint.folder), root["global_steps"]
    if checkpoint.format in OF_DEEPSPEED and any(
        small_text(folder.parent / name).strip() for name in (LATEST, LATEST_UNIVERSAL)
    ):
        return folder.name
    return f"global_step{steps}" if type(steps) is int else "step"


def _model_states(checkpoint: Checkpoint) -> Checkpoint:
    """Return the model states: the container with the names and shapes that DeepSpeed needs, without the optimizer, and
    with empty tensors in place of trained ones, as in stage 3. These have the dtype of the training, as in DeepSpeed's
    own universal checkpoints."""
    root: Any = checkpoint.root
    optimizer, specs = root["optimizer"], checkpoint.specs
    trained = {specs[name].view: name for name in optimizer["state"]}
    others = {key: spec for key, spec in specs.items() if key not in optimizer["state"]}
    entries = OrderedDict(checkpoint.entries)
    used = _dtypes_of_training(checkpoint)
    empty = Storage("empty", MemoryBytes(b""))
    entries.update(
        (key, TensorSpec(used.get(trained[spec.view], spec.dtype), (0,), (1,), empty))
        for key, spec in specs.items()
        if spec.view in trained
    )
    fields = {
        "buffer_names": [key for key, spec in others.items() if spec.view not in trained],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, specs[name].shape) for name in group["params"]) for group in optimizer["param_groups"]
        ],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {key: trained[spec.view] for key, spec in others.items() if spec.view in trained},
    }
    return replace(checkpoint, entries=entries, root={**root, **fields})


def _dtypes_of_training(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the dtypes in which training used the weights that are fp32 masters."""
    used: dict[str, str] = {}
    for fact in checkpoint.remarked(Kind.MASTERS):
        used.update({key: fact.data["dtype"] for key in checkpoint.specs if key not in fact.data["kept"]})
    return {**used, **{key: copy.dtype for key, copy in checkpoint.copies.items()}}
