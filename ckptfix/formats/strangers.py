"""Files that are no checkpoint at all, and what they are instead.

Torch's messages for these (``invalid load key, 'v'``, ``Unsupported operand 60``) name the first byte and nothing else.
"""

from __future__ import annotations

import re

from ckptfix.formats.sources import Content

_LFS = re.compile(rb"size (\d+)")


def name_stranger(content: Content) -> str | None:
    """What the file is, with the remedy, where it is a known stranger; None otherwise."""
    head = bytes(content.buffer[:1024])
    path, size = content.path, len(content)
    if head.startswith(b"version https://git-lfs.github.com/spec"):
        declared = _LFS.search(head)
        what = f" of a file of {int(declared[1])} bytes" if declared else ""
        return f"{path}: a git-lfs pointer{what}, not the file itself (it has {size} bytes); run `git lfs pull`"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] == b"<" and re.match(rb"<(!doctype|html|head|body|\?xml|!--)", text, re.IGNORECASE):
        return (
            f"{path}: a web page and not a checkpoint: the download was answered with an error or a login page;"
            " download it again"
        )
    if text[:1] == b"{" and b'"error"' in head:
        return f"{path}: the answer of a web service that reports an error, not a checkpoint; download it again"
    if head.startswith(b"version: 1\r\n") or head.startswith(b"\x80\x02\x8a\r\n"):
        return (
            f"{path}: every line feed in it was turned into CR LF by a transfer in text mode;"
            " transfer it again in binary mode"
        )
    if not head.strip(b"\0") and not bytes(content.buffer[-1024:]).strip(b"\0"):
        return (
            f"{path}: nothing but zeros at its start and end ({size} bytes): the space was reserved and the download"
            " never arrived; fetch it again"
        )
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return (
            f"{path}: an HDF5 file (Keras, h5py), not a PyTorch checkpoint; convert it with the framework that wrote it"
        )
    if head.startswith(b"GGUF"):
        return f"{path}: a GGUF file of llama.cpp, not a PyTorch checkpoint; convert it with that project's scripts"
    return None
