"""The format of torch.package: named pickles, the sources of their classes, and storages.

Layout: https://pytorch.org/docs/stable/package.html. The sources are not needed, and not read."""

from functools import partial
from typing import Any

from ckptfix.bytes.sources import Content
from ckptfix.core.facts import Fact, Kind
from ckptfix.errors import UnreadableError
from ckptfix.reading.archives.zip_directory import PACKAGE_MARK
from ckptfix.reading.pickles.payload import payload_remarks
from ckptfix.reading.torch_files.torch_zip import Reading, open_archive
from ckptfix.reading.torch_files.torchscript import packaged_weights
from ckptfix.reading.weights.document import Document

NAME = "torch-package"


def read(content: Content) -> Document:
    """Return the document of a package: its pickle, or its pickles by name if it has several.

    Raises ``UnreadableError`` if it has none."""
    archive = open_archive(content, PACKAGE_MARK)
    reading = Reading(archive)
    pickles = reading.pickle(".data", suffix=".storage")
    pickles.read_script = partial(packaged_weights, reading)
    objects: dict[str, Any] = {}
    for name in reading.whole:
        if name.endswith(".pkl") and not name.startswith(".data/"):
            objects[name.removesuffix(".pkl")], _ = pickles.run(reading.member(name))
    if not objects:
        raise UnreadableError(
            f"{content.path}: a torch.package archive without a pickle, only code and other files; is it the right "
            "file?"
        )
    root = next(iter(objects.values())) if len(objects) == 1 else objects
    remarks = [Fact(Kind.TORCH_PACKAGE), *payload_remarks(pickles.names)]
    remarks += [*reading.doubts, *archive.doubts]
    damage = [*reading.damage, *archive.damage(root)]
    return Document(content.path, NAME, root, None, pickles.names, remarks, damage)
