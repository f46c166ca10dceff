"""Handmade reports on a ResNet saved under DataParallel, before and after its repair."""

from ckptfix.core.coverage import Coverage
from ckptfix.core.edits import Drop, Fill, Rename
from ckptfix.core.finding import Applicability, Finding, Fix, Level, Remedy
from ckptfix.core.report import Report
from ckptfix.core.smoke_result import SmokeResult

WRAPPED = tuple(f"module.layer{stage}.{block}.conv1.weight" for stage in (1, 2, 3) for block in (0, 1))
COUNTERS = tuple(f"layer{stage}.0.bn1.num_batches_tracked" for stage in (1, 2, 3))

PREFIX = Finding(
    "KEY102",
    "wrapper-prefix",
    Level.ERROR,
    "6 keys begin with `module.`",
    keys=WRAPPED,
    evidence={"prefix": "module", "share": 1.0},
    fix=Fix(tuple(Rename(key, key.removeprefix("module.")) for key in WRAPPED), Applicability.SAFE),
)
COUNTER = Finding(
    "BUF101",
    "missing-num-batches-tracked",
    Level.WARNING,
    "BatchNorm has no counter",
    keys=COUNTERS,
    fix=Fix(tuple(Fill(key, "int64", (), "zeros") for key in COUNTERS), Applicability.SAFE),
)
EXTRA = Finding(
    "FIT102",
    "unexpected-key",
    Level.ERROR,
    "the target has no such key",
    keys=("head.weight",),
    fix=Fix((Drop("head.weight"),), Applicability.UNSAFE),
)
MISSING = Finding(
    "FIT101",
    "missing-key",
    Level.ERROR,
    "the file lacks keys of the target",
    keys=("fc.weight", "fc.bias"),
    fix=Fix((), Applicability.UNSAFE),
    remedies=(Remedy((("fill", "target"),), "takes the initial values", (("fc.weight", 512_000), ("fc.bias", 1000))),),
)
MISMATCH = Finding("FIT103", "shape-mismatch", Level.ERROR, "another shape", keys=("fc.weight",))
NOTE = Finding("FIL103", "foreign-class", Level.NOTE, "an object of a class is inside", evidence={"class": "Namespace"})


def report(*findings: Finding, **rest: object) -> Report:
    """Return a report on ``resnet.pth`` with these findings."""
    facts = {
        "source": "resnet.pth",
        "format": "torch-zip",
        "container": "state_dict",
        "tensors": 9,
        "numel": 11_689_512,
    }
    return Report(**{**facts, "findings": findings, **rest})  # type: ignore[arg-type]  # a dict of mixed values


def repaired() -> Report:
    """Return the report after both defects were repaired."""
    edits = tuple(edit for finding in (PREFIX, COUNTER) if finding.fix for edit in finding.fix.edits)
    return report(
        PREFIX,
        COUNTER,
        fixed=(PREFIX, COUNTER),
        edits=edits,
        target="zoo:resnet18",
        coverage=Coverage(11_689_512, 11_689_512, 9600, 9597),
        smoke=SmokeResult(True, "cpu", "no CUDA device", ("float32[2, 3, 8, 8]",), ("float32[2, 10]",), 0.012),
        output="resnet.fixed.pth",
        remarks=("built on the meta device",),
    )
