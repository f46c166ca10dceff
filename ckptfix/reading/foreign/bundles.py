"""Folders and archives whose files are no checkpoint each: told by the names of what is in them.

A folder and an archive of it hold the same names, so both are looked up here."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from ckptfix.reading.foreign.pages import CORE_ML, PYTORCH, TENSORFLOW


@dataclass(frozen=True)
class Bundle:
    """What files make up together: a pattern for each that has to be there, below whatever folder."""

    what: str
    remedy: str
    names: tuple[str, ...]

    def matches(self, names: Collection[str]) -> bool:
        """Whether each pattern is the end of a name, from a slash on."""
        return all(any(re.search(rf"(^|/)({pattern})$", name) for name in names) for pattern in self.names)


_UNPACKED = "unpack it and name the folder"
_WITH_KERAS = f"load it with Keras and save its weights from there, or {PYTORCH}"
_WITH_JAX = f"load it with orbax.checkpoint and save its arrays from there, or {PYTORCH}"
_EXPORTED = "load it with torch.export.load, which needs the torch that wrote it, and save its state_dict"

OF_TORCH = (
    Bundle("a checkpoint of DeepSpeed, one file for each rank", _UNPACKED, (r"[^/]*_optim_states\.pt",)),
    Bundle(
        "a checkpoint of Megatron, one file for each rank",
        _UNPACKED,
        (r"mp_rank_00(_000)?/model_[^/]*\.pt", r"mp_rank_(?!00(_000)?/)[\d_]+/model_[^/]*\.pt"),
    ),
    Bundle(
        "a folder of torch.distributed.checkpoint",
        "unpack it and name the folder that holds .metadata",
        (r"\.metadata", r"[^/]*\.distcp"),
    ),
    Bundle(
        "a torch file that was unpacked into a folder",
        "unpack it and name the folder that holds data.pkl",
        (r"data\.pkl", r"data/\d+"),
    ),
    Bundle("a program of torch.export (.pt2)", _EXPORTED, (r"archive_format", r"models/[^/]*\.json")),
    Bundle("a program of torch.export (.pt2)", _EXPORTED, (r"serialized_exported_program\.json",)),
)
"""Archives in which single files look like checkpoints, and none of them is the whole."""

FOREIGN = (
    Bundle(
        "a cache of the Hugging Face Hub",
        "name the folder of one revision in it, snapshots/…",
        (r"blobs/[^/]*", r"snapshots/[^/]*"),
    ),
    Bundle(
        "the storages of a torch file that was unpacked into a folder, but not its data.pkl, which has their names",
        "unpack the file again",
        (r"version|byteorder|\.format_version", r"data/\d+"),
    ),
    Bundle("a Keras model", _WITH_KERAS, (r"config\.json", r"[^/]*\.weights\.h5")),
    Bundle("a SavedModel of TensorFlow", TENSORFLOW, (r"saved_model\.pb(txt)?",)),
    Bundle("a checkpoint of TensorFlow", TENSORFLOW, (r"[^/]*\.index", r"[^/]*\.data-\d{5}-of-\d{5}")),
    Bundle("a model of TensorFlow.js", TENSORFLOW, (r"model\.json", r"[^/]*shard\d+of\d+(\.bin)?")),
    Bundle("a checkpoint of Orbax (JAX)", _WITH_JAX, (r"_CHECKPOINT_METADATA|manifest\.ocdbt|\.zarray",)),
    Bundle("a Core ML package", CORE_ML, (r"Manifest\.json", r"com\.apple\.CoreML(/.*)?")),
    Bundle("a Python package", "is it the right file?", (r"[^/]*\.dist-info/(WHEEL|METADATA)",)),
    Bundle("an Android app", "is it the right file?", (r"AndroidManifest\.xml",)),
    Bundle("a Java archive", "is it the right file?", (r"META-INF/MANIFEST\.MF",)),
    Bundle("an Office document", "is it the right file?", (r"\[Content_Types\]\.xml",)),
    Bundle("source code", "name the file that holds the weights", (r"[^/]*\.py",)),
)
"""What has nothing of a checkpoint of PyTorch in it."""

_PART = re.compile(
    r"(^|/)(\.metadata|[^/]*\.distcp|[^/]*\.pkl|[^/]*(_states|_rng)\.pt|serialized_\w+\.\w+|data/.*|constants/.*|code/.*)$"
)

_NUMPY = f"load it with numpy.load and save its arrays as a state_dict, or {PYTORCH}"


def is_part(name: str) -> bool:
    """Whether a file is named like a part of one of ``OF_TORCH``, whatever its first bytes look like."""
    return _PART.search(name) is not None


def name_bundle(names: Collection[str], bundles: Collection[Bundle]) -> str | None:
    """What the files of these names are together, with the remedy, as a clause; None where no bundle matches."""
    for bundle in bundles:
        if bundle.matches(names):
            return f"{bundle.what}; {bundle.remedy}"
    if bundles is FOREIGN and names and all(name.endswith(".npy") for name in names):
        return f"NumPy arrays (.npz); {_NUMPY}"
    return None
