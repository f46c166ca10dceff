"""The options that commands share, each declared once. None means: not given, so the configuration file may speak."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

OutputFormat = Literal["full", "concise", "json", "github"]

Model = Annotated[
    str | None,
    typer.Option(
        metavar="PKG.MOD:FACTORY",
        help="The model that the checkpoint has to fit. This runs your code: the module is imported and the factory is"
        " called. The current directory is importable.",
    ),
]
ModelArgs = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="Arguments of the factory: an object of keyword arguments, or an array."),
]
Like = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Another checkpoint that this one has to fit. This runs no code."),
]
Select = Annotated[
    list[str] | None,
    typer.Option(metavar="CODES", help="Run these rules only: codes or their beginnings, such as KEY,BUF101."),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="CODES", help="Leave these rules out."),
]
UnsafeFixes = Annotated[
    bool | None,
    typer.Option(
        "--unsafe-fixes/--no-unsafe-fixes",
        help="Also apply the fixes that invent, drop or change a value, or that nothing confirms.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Which state_dict of the file, by the name that `ckptfix inspect` shows; or the prefix of one of several "
        "sets of keys in it (teacher).",
    ),
]
Member = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Which file of an archive (.zip, .tar.gz) that holds several."),
]
Salvage = Annotated[
    bool | None,
    typer.Option("--salvage", help="Open a damaged file, and take the tensors of which every byte is there."),
]
ForTorch = Annotated[
    str | None,
    typer.Option(metavar="VERSION", help="The release of torch that is to load the result, such as 0.4.0."),
]
NoValues = Annotated[
    bool | None,
    typer.Option("--no-values/--values", help="Look at names and shapes only, and read no tensor."),
]
Fill = Annotated[
    str | None,
    typer.Option(
        metavar="target|FILE|twin",
        help="Supply missing tensors from the model's initial values (untrained), or from another checkpoint; with"
        " --replace broken ones too, and those from the file's other set of weights (twin).",
    ),
]
DropMismatched = Annotated[
    bool | None,
    typer.Option(
        "--drop-mismatched/--keep-mismatched", help="Treat tensors of another shape as missing, so that --fill fills."
    ),
]
Replace = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CODES|KEYS",
        help="Replace broken values by those of --fill: of the findings of these rules, or of these keys (layer4.*).",
    ),
]
ResetRunningStats = Annotated[
    bool | None,
    typer.Option(
        "--reset-running-stats/--keep-running-stats",
        help="Set broken running statistics of norms to those of a fresh layer.",
    ),
]
Recalibrate = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Measure broken running statistics anew on this data (.npy, .pt, .safetensors; samples first dimension).",
    ),
]
ZeroNonFinite = Annotated[
    bool | None,
    typer.Option("--zero-non-finite/--keep-non-finite", help="Set NaN and infinite weights to zero: the last resort."),
]
FlushSubnormals = Annotated[
    bool | None,
    typer.Option("--flush-subnormals/--keep-subnormals", help="Set subnormal values, which are slow, to zero."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Cast floats to float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, but for tensors that overflow.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", help="Seed of initial values and derived inputs.  [default: 0]"),
]
ReportFormat = Annotated[
    OutputFormat | None,
    typer.Option("--output-format", help="How the report is written.  [default: full]"),
]
ReportFile = Annotated[
    str | None,
    typer.Option("--report", metavar="FILE", help="Also write the report as one HTML page that loads nothing."),
]
Quiet = Annotated[
    bool | None,
    typer.Option("--quiet", "-q", help="No notes, no progress, nothing about clean files."),
]
Verbose = Annotated[
    bool | None,
    typer.Option("--verbose", "-v", help="Every key and all evidence; the traceback of an internal error."),
]
