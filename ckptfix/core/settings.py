"""The settings of a check or a repair: as the code reads them, and as the library's functions take them.

``Settings`` holds the rows of the table of options that are settings. ``CheckSettings``, ``LoadSettings`` and
``RepairSettings`` repeat the names for editors and type checkers; ``tests/core/test_options.py`` checks that they
agree."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.option import CHECK, DIFF, EXPLAIN, INSPECT, MAP, READS, REPAIR, REPAIRS, WRITES, Option, Scope, Type
from ckptfix.core.rename_map import RenameMap
from ckptfix.errors import Opt, UsageError

_SIZE = r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]I?)?B?\s*"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


FORMATS = PTH, SAFETENSORS, UNIVERSAL = "pth", "safetensors", "universal"  # what `--format` takes

# What `--dtype` takes, by torch's names.
CAST_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")

_SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}

SOURCE = "source"  # what `--compare` calls the file that is repaired


def parse_size(option: str, text: str | None) -> int | None:
    """Return a size like ``5GB`` or ``500 MiB`` in bytes, None for None. Raises ``UsageError`` if the text is not a
    size."""
    if text is None:
        return None
    match = re.fullmatch(_SIZE, str(text).upper())  # a script may pass a number of bytes
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size <= 0:
        raise UsageError(Opt(option, text), ": not a size; write it like 5GB or 500MB")
    return size


class CheckSettings(TypedDict, total=False):
    """The settings of ``ckptfix.check``: the options of ``ckptfix check`` with underscores in their names."""

    weights: str | None
    member: str | None
    salvage: bool
    select: str | Sequence[str]
    ignore: str | Sequence[str]
    unsafe_fixes: bool
    rename_layers: bool
    source_model: Any
    rename_map: RenameMap | str | os.PathLike[str] | None
    rename: str | Sequence[str]
    fill: str | os.PathLike[str] | None
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    unmerge: bool
    drop_mismatched: bool
    adapt: str | Sequence[str] | Mapping[str, str]
    replace: str | Sequence[str]
    reset_running_stats: bool
    zero_non_finite: bool
    flush_subnormals: bool
    dtype: str | None
    for_torch: str | None
    values: bool
    optimizer_positions: bool
    seed: int
    timeout: float
    format: str | None


class LoadSettings(CheckSettings, total=False):
    """The settings of ``ckptfix.load`` and ``repair_optimizer_state``, which write no file."""

    disarm: bool
    drop_optimizer: bool
    keep_optimizer: bool
    accept: str | Sequence[str]
    allow_untrained: bool
    recalibrate: str | None


class RepairSettings(LoadSettings, total=False):
    """The settings of ``ckptfix.repair`` and ``repair_state_dict``: the options of ``ckptfix repair``."""

    force: bool
    untie: bool
    shard_size: str | None
    smoke: bool | None
    input: str | Sequence[str]
    device: str
    train_mode: bool
    backward: bool
    compare: str | None


def _row(kind: Type, commands: tuple[str, ...], **rest: Any) -> Option:
    """Return the option of a setting; its name, that of the field, is filled in later."""
    return Option("", kind, commands, **{"scope": Scope.REPAIR, "is_setting": True, **rest})


# fmt: off
class Settings(Struct, frozen=True):
    """What the user asked for.

    Each field is annotated with its type in the code, its group in the help, and its row in the table of options. None
    means that the option was not given: ``format`` is then that of the source, and ``smoke`` runs the forward test if
    there is a factory. ``source_model`` may be an ``nn.Module``, and ``rename_map`` a ``RenameMap``."""

    weights: Annotated[str | None, "Reading", _row(Type.TEXT, (*READS, MAP, EXPLAIN), metavar="NAME",
        help="Which state_dict of the file, by its name in `ckptfix inspect`; or the prefix of one of several sets of "
        "keys (teacher).")] = None
    member: Annotated[str | None, "Reading", _row(Type.TEXT, (*REPAIRS, INSPECT, EXPLAIN), metavar="NAME",
        scope=Scope.ONE_FILE,
        help="Which checkpoint to read from an archive (.zip, .tar.gz) with several.")] = None
    salvage: Annotated[bool, "Reading", _row(Type.SWITCH, READS, scope=Scope.ONE_FILE,
        help="Open a damaged file and use the complete tensors.")] = False
    values: Annotated[bool, "Reading", _row(Type.SWITCH, (*REPAIRS, DIFF, EXPLAIN), default="values",
        no="--no-values",
        help="Read the tensors' values; --no-values checks only names and shapes.")] = True
    select: Annotated[tuple[str, ...], "Rules", _row(Type.NAMES, REPAIRS, metavar="CODES",
        help="Run only these rules: codes or their prefixes, for example KEY,BUF101.")] = ()
    ignore: Annotated[tuple[str, ...], "Rules", _row(Type.NAMES, REPAIRS, metavar="CODES",
        help="Skip these rules.")] = ()
    accept: Annotated[tuple[str, ...], "Rules", _row(Type.NAMES, WRITES, metavar="CODES", scope=Scope.ONE_FILE,
        help="Accept the findings of these rules; they stay in the report.")] = ()
    unsafe_fixes: Annotated[bool, "Repairs", _row(Type.SWITCH, REPAIRS, no="--no-unsafe-fixes",
        help="Also apply fixes that invent, drop or change a value, or that nothing confirms.")] = False
    rename_layers: Annotated[bool, "Repairs", _row(Type.SWITCH, REPAIRS,
        help="Rename the layers of another implementation by the inferred map, even if it is not certain.")] = False
    source_model: Annotated[Any, "Repairs", _row(Type.TEXT, REPAIRS, metavar="LIBRARY:NAME|PKG.MOD:FACTORY",
        needs_model=True,
        help="The model that the file was saved from. Copies of it and of --model run with the same random weights, "
        "and a map that gives equal outputs is applied.")] = None
    rename_map: Annotated[RenameMap | str | None, "Repairs", _row(Type.FILE, REPAIRS, metavar="FILE",
        help="Rename, split and fuse tensors by this map; `ckptfix map A B` infers one.")] = None
    rename: Annotated[tuple[str, ...], "Repairs", _row(Type.INPUTS, REPAIRS, metavar="OLD=NEW",
        help="Rename keys by patterns: 'encoder.*=backbone.*', 'blocks.{n}.ln.*=layer.{n}.norm.*'.")] = ()
    fill: Annotated[str | None, "Repairs", _row(Type.FILE, REPAIRS, metavar="target|FILE|twin",
        words=("target", "twin"),
        help="Fill missing tensors from the model's initial values (untrained), or from another checkpoint; with"
        " --replace broken ones too, also from the file's other set of weights (twin).")] = None
    adapter: Annotated[tuple[str, ...], "Repairs", _row(Type.FILES, REPAIRS, metavar="PATH[=WEIGHT]",
        help="Merge an adapter (LoRA, DoRA, IA3) into the weights, as peft's merge_and_unload() does: its folder,"
        " its file, or the adapter_config.json of one inside the checkpoint. Several are merged in order.")] = ()
    unmerge: Annotated[bool, "Repairs", _row(Type.SWITCH, REPAIRS, no="--no-unmerge",
        help="Remove a merged adapter, up to the rounding of the stored sum.")] = False
    drop_mismatched: Annotated[bool, "Repairs", _row(Type.SWITCH, REPAIRS, no="--keep-mismatched",
        help="Treat tensors of the wrong shape as missing, so --fill fills them.")] = False
    adapt: Annotated[tuple[str, ...], "Repairs", _row(Type.PAIRS, REPAIRS, metavar="NAME=RECIPE",
        help="Resize tensors to the model's shapes by a library's formula: pos_embed=timm,"
        " window_bias=swin, patch_embed=timm, in_chans=timm, vocab=pad:mean, inflate=mean, head=MAP.txt,"
        " depth=0-5. FIT103 names the ones that fit.")] = ()
    allow_untrained: Annotated[bool, "Repairs", _row(Type.SWITCH, WRITES, scope=Scope.ONE_FILE,
        help="Write the result even if most parameters were filled and are untrained.")] = False
    replace: Annotated[tuple[str, ...], "Repairs", _row(Type.NAMES, REPAIRS, metavar="CODES|KEYS",
        help="Replace broken values with those of --fill, for these rules' findings or these keys (layer4.*).")] = ()
    reset_running_stats: Annotated[bool, "Repairs", _row(Type.SWITCH, REPAIRS, no="--keep-running-stats",
        help="Set broken running statistics of norms to those of a fresh layer.")] = False
    recalibrate: Annotated[str | None, "Repairs", _row(Type.FILE, WRITES, metavar="FILE", needs_model=True,
        help="Measure broken running statistics again on this data (.npy, .pt, .safetensors; samples first).")] = None
    zero_non_finite: Annotated[bool, "Repairs", _row(Type.SWITCH, REPAIRS, no="--keep-non-finite",
        help="Set NaN and infinite weights to zero. A last resort.")] = False
    flush_subnormals: Annotated[bool, "Repairs", _row(Type.SWITCH, REPAIRS, no="--keep-subnormals",
        help="Set subnormal values, which are slow, to zero.")] = False
    optimizer_positions: Annotated[bool, "Repairs", _row(Type.SWITCH, (CHECK, REPAIR), flag="--optimizer",
        scope=Scope.RUN, is_for_once=True,
        help="Show which state of the optimizer belongs to which parameter, and how certain that is.")] = False
    drop_optimizer: Annotated[bool, "Repairs", _row(Type.SWITCH, WRITES,
        help="Drop the optimizer: training continues from the weights, with new moments and step counts.")] = False
    keep_optimizer: Annotated[bool, "Repairs", _row(Type.SWITCH, WRITES,
        help="Keep the optimizer unchanged, even if it no longer fits the weights.")] = False
    dtype: Annotated[str | None, "Repairs", _row(Type.TEXT, REPAIRS, metavar="DTYPE",
        words=CAST_DTYPES,
        help="Cast floats to float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, except tensors that"
        " overflow.")] = None
    for_torch: Annotated[str | None, "Repairs", _row(Type.TEXT, REPAIRS, metavar="VERSION",
        help="Write a file that this release of torch can load, for example 0.4.0.")] = None
    disarm: Annotated[bool, "Repairs", _row(Type.SWITCH, WRITES, scope=Scope.ONE_FILE,
        help="For a file built to run code: write only the tensors of its state_dict.")] = False
    seed: Annotated[int, "Repairs", _row(Type.WHOLE, REPAIRS, metavar="N", default="0",
        help="Seed of initial values and derived inputs.")] = 0
    smoke: Annotated[bool | None, "Forward test", _row(Type.SWITCH, WRITES, default="with --model", no="--no-smoke",
        needs_model=True,
        help="Load the result into the model and run a forward pass, in a separate process.")] = None
    input: Annotated[tuple[str, ...], "Forward test", _row(Type.INPUTS, (*WRITES, MAP), metavar="SPEC",
        default="derived from the model", needs_model=True,
        help="Input of the forward test, once for each argument: 2x3x224x224, input_ids=2x16:int:0:1000, or a file"
        " (.npy, .pt, .safetensors).")] = ()
    device: Annotated[str, "Forward test", _row(Type.TEXT, WRITES, metavar="auto|cpu|cuda|cuda:1|mps", default="auto",
        needs_model=True, words=("auto", "cpu", "cuda", "mps"),
        help="The device for the forward test.")] = "auto"
    timeout: Annotated[float, "Forward test", _row(Type.NUMBER, (*REPAIRS, MAP), metavar="SECONDS", default="300",
        needs_model=True,
        help="Time limit of the forward test, and of the proof of a map.")] = 300.0
    train_mode: Annotated[bool, "Forward test", _row(Type.SWITCH, WRITES, needs_model=True,
        help="Also run the model in training mode, with a batch of at least 2.")] = False
    backward: Annotated[bool, "Forward test", _row(Type.SWITCH, WRITES, needs_model=True,
        help="Also run it in training mode with a backward pass, and check the gradients.")] = False
    compare: Annotated[str | None, "Forward test", _row(Type.FILE, WRITES, metavar="FILE|source", words=(SOURCE,),
        needs_model=True,
        help="Also run it with another checkpoint's weights, or the source's, and report how far apart the outputs "
        "are.")] = None
    force: Annotated[bool, "Output", _row(Type.SWITCH, (REPAIR,), scope=Scope.RUN,
        help="Replace a file that is already at OUT.")] = False
    format: Annotated[str | None, "Output", _row(Type.TEXT, REPAIRS,
        default="that of the output's suffix, else of the source", choices=FORMATS,
        help="The format to write; `universal` is a folder that DeepSpeed resumes from on any number of GPUs."
    )] = None
    shard_size: Annotated[str | None, "Output", _row(Type.TEXT, WRITES, metavar="SIZE", default="one file",
        help="Write numbered shards of at most this size (5GB, 500MB) with an index.")] = None
    untie: Annotated[bool, "Output", _row(Type.SWITCH, WRITES, no="--no-untie",
        help="In safetensors, write a tied tensor under each of its keys, for plain load_file.")] = False
    # fmt: on

    def selects(self, code: str) -> bool:
        """Return whether to run the rule with this code."""
        chosen = not self.select or any(code.startswith(start) for start in self.select)
        return chosen and not any(code.startswith(start) for start in self.ignore)

    @property
    def fill_file(self) -> str | None:
        """The donor file, None if ``fill`` does not name one."""
        return None if self.fill in ("target", "twin") else self.fill

    @property
    def compare_file(self) -> str | None:
        """The other file whose outputs are compared, None if there is none."""
        return None if self.compare == SOURCE else self.compare

    @property
    def cast_dtype(self) -> str | None:
        """The dtype to cast floats to, by torch's name. Raises ``UsageError`` if ``dtype`` is not a known float."""
        if self.dtype is None:
            return None
        name = _SHORT_DTYPES.get(self.dtype, self.dtype)
        if name not in CAST_DTYPES:
            raise UsageError(Opt("dtype", self.dtype), f": unknown dtype; give one of {', '.join(CAST_DTYPES)}")
        return name

    @property
    def shard_bytes(self) -> int | None:
        """The maximum bytes of tensors per file, None for one file of any size.

        Raises ``UsageError`` if ``shard_size`` is not a size."""
        return parse_size("shard_size", self.shard_size)

    def is_for_torch_before(self, release: str) -> bool:
        """Return whether the result has to load in a torch older than ``release``.

        Raises ``UsageError`` if ``for_torch`` is not a version."""
        if self.for_torch is None:
            return False
        from packaging.version import InvalidVersion, Version

        try:
            return Version(self.for_torch) < Version(release)
        except InvalidVersion as error:
            raise UsageError(Opt("for_torch", self.for_torch), ": not a version; write it like 0.4.0") from error


# Each setting as an option, with its group.
SETTINGS: tuple[tuple[str, Option], ...] = tuple(
    (form.__metadata__[0], replace(form.__metadata__[1], name=name)) for name, form in Settings.__annotations__.items()
)
