"""A whole torch.save file inside a pickle, as ``pickle.dump`` of a tensor writes it
(``torch.storage._load_from_bytes``).
"""

from __future__ import annotations

from typing import Any

from ckptfix.bytes.limits import Bounds
from ckptfix.bytes.sources import Content
from ckptfix.core.facts import Kind
from ckptfix.errors import UnreadableError
from ckptfix.reading.sniffing import is_zip
from ckptfix.reading.torch_files import torch_legacy, torch_zip


def read_nested(data: bytes, path: str, nesting: int, account: Bounds) -> tuple[Any, set[str]]:
    """The root object of the inner file and the globals that its pickles name. It spends from the outer account."""
    content = Content(path, data, account=account)
    reader = torch_zip.read if is_zip(content) else torch_legacy.read
    document = reader(content, nesting)
    if any(remark.kind is Kind.TRAILING_BYTES for remark in document.remarks):
        raise UnreadableError(
            f"{path}: a file of torch in its pickle has more bytes than its storages take: the file is damaged; fetch "
            "it again"
        )
    return document.root, document.names
