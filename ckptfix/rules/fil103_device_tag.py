"""FIL103 device-tag: the tensors were saved from a device that the reader may not have.

## What it finds
Location tags other than `cpu` on the file's storages: `cuda:3`, `mps`, `xla:0`, `npu:0`, `hpu` and the like.

## Why it matters
Without `map_location`, torch.load needs exactly that device: `Attempting to deserialize object on a CUDA device`,
`Attempting to deserialize object on CUDA device 3 but torch.cuda.device_count() is 1`,
`don't know how to restore data location … (tagged with xla:0)`. If it exists, it holds the weights twice.

## Fix safety
Safe: only the tag changes, never the bytes of a tensor. This is a note, so a healthy file never counts as broken.

## Example
Tensors tagged `cuda:3` are written with the tag `cpu`; `model.to(device)` moves them where they are used.

## Sources
`torch/serialization.py` (`validate_cuda_device`, `default_restore_location`); RoMaV2#50."""

from collections.abc import Iterator

from ckptfix.core.edits import Retag
from ckptfix.core.finding import Finding, Fix, Level
from ckptfix.rules.rule import Context, Rule


def device_tag(rule: Rule, context: Context) -> Iterator[Finding]:
    """Write the tensors for the CPU."""
    devices = context.checkpoint.devices
    if devices:
        yield rule.finding(
            Level.NOTE,
            f"the tensors are tagged {', '.join(devices)}: torch.load without map_location needs that device",
            evidence={"devices": list(devices)},
            fix=Fix.safe(map(Retag, devices)),
        )
