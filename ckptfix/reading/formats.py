"""The formats of a single file, recognised by content and never by extension.

To add one, write a module with ``read(content)``, and add its line to ``FORMATS``."""

from collections.abc import Callable, Iterator
from importlib import import_module

from msgspec import Struct

from ckptfix.bytes.sources import Content
from ckptfix.core.facts import WRONG_BYTES, Fact, Kind, clause, clauses
from ckptfix.core.objects import tensors_in
from ckptfix.errors import UnreadableError
from ckptfix.reading import sniffing
from ckptfix.reading.archives.zip_directory import is_torch_export, is_torch_package, is_torch_save, member_names
from ckptfix.reading.pickles.payload import refusing_payload
from ckptfix.reading.weights.document import Document

# Readers, and modules that only damaged files need, are imported when they are used, so that the first answer is quick.


class Format(Struct, frozen=True):
    """A format: its name, the module that reads it, and the test that recognises its first bytes."""

    name: str
    module: str
    sniff: Callable[[Content], bool]

    def read(self, content: Content) -> Document:
        """Return the document of a content of this format."""
        document: Document = import_module(self.module).read(content)
        return document


# All formats, in the order in which they are tried.
FORMATS = (
    Format("torch-package", "ckptfix.reading.torch_files.torch_package", sniffing.zip_of(is_torch_package)),
    Format("torchscript", "ckptfix.reading.torch_files.torchscript", sniffing.is_torchscript_zip),
    Format("torch-export", "ckptfix.reading.torch_files.torch_export", sniffing.zip_of(is_torch_export)),
    Format("torch-zip", "ckptfix.reading.torch_files.torch_zip", sniffing.is_zip),
    Format("safetensors", "ckptfix.reading.safetensors", sniffing.is_safetensors),
    Format("torch-tar", "ckptfix.reading.torch_files.torch_tar", sniffing.is_torch_tar),
    Format("torch-legacy", "ckptfix.reading.torch_files.torch_legacy", sniffing.is_pickle),
)


_OF_TORCH = (".pth", ".pt", ".ckpt", ".bin", ".pkl")


def open_content(path: str, member: str | None = None) -> Content:
    """Return the bytes of the checkpoint in a file, unpacked from archives and compressed streams around it; ``member``
    picks one of several files in an archive."""
    content = Content.of_file(path)
    if sniffing.is_zip(content):
        # The last format accepts any zip archive, without looking at the names in it.
        known = any(form.sniff(content) for form in FORMATS if form.sniff is not sniffing.is_zip)
        may_be_wrapped = not known and not is_torch_save(member_names(content))
    else:
        may_be_wrapped = sniffing.may_be_packed(content)
    if member is None and not may_be_wrapped:
        return content
    from ckptfix.reading.archives.wrapped import unwrap

    return unwrap(content, member)


def read_document(content: Content) -> Document:
    """Return the document of a file's content, whose damage begins with that of the archive or stream around it.

    Raises ``UnreadableError`` if no format reads it, with what the file is instead if that can be told."""
    try:
        document = _read_or_undo(content)
    except UnreadableError as error:
        if not content.damage:
            raise
        inner = error.without(f"{content.path}: ")
        raise UnreadableError(f"{content.path}: {clauses(content.damage)}; its content: ", *inner) from error
    document.damage[:0] = content.damage
    document.remarks += _other_suffix(content, document.format)
    # If an archive or stream around the file fails its checksum, the tensors may be wrong.
    document.remarks += [
        Fact.of(Kind.DOUBTFUL_VALUES, cause=fact) for fact in content.damage if fact.kind in WRONG_BYTES
    ]
    return document


def _other_suffix(content: Content, form: str) -> Iterator[Fact]:
    """Yield a remark if other programs would choose a reader by the file's suffix that refuses it."""
    file = content.path.lower().partition("!")[0]  # the name in an archive follows
    is_safetensors = file.endswith(".safetensors")
    if not is_safetensors and not file.endswith(_OF_TORCH) and not (content.wrapper and file.endswith(".pth.tar")):
        return
    if content.wrapper or is_safetensors != (form == "safetensors"):
        reader = "safetensors" if is_safetensors else "torch.load"
        yield Fact.of(Kind.OTHER_SUFFIX, packed=content.wrapper, reader=reader)


def _read_or_undo(content: Content) -> Document:
    """Return the document of a content, or of the content with its damage undone if that has more tensors."""
    with refusing_payload(content.path, content.bounds.names):
        try:
            document = _read(content)
        except UnreadableError as error:
            undone = _read_undone(content)
            # In a damaged plain pickle, each tensor is a torch file inside it, which does not have the tensor's name.
            if undone is not None and (_tensors(undone) or not sniffing.is_pickle(content)):
                return undone
            from ckptfix.reading.foreign.files import name_foreign_file

            if (foreign := name_foreign_file(content)) is not None:
                raise UnreadableError(foreign) from error
            raise
        if not document.damage:
            return document
        undone = _read_undone(content)
        if undone is not None and _tensors(undone) >= _tensors(document):
            return undone  # with fewer, it is a torch file inside a plain pickle: each tensor of one is such a file
        from ckptfix.reading.foreign.files import name_joblib, name_mangled

        if (named := name_mangled(content) or name_joblib(content)) is not None:
            raise UnreadableError(f"{content.path}: {named}")
        return document


def _read(content: Content) -> Document:
    for form in FORMATS:
        if form.sniff(content):
            return form.read(content)
    from ckptfix.reading.foreign.files import describe_unknown

    raise UnreadableError(f"{content.path}: {describe_unknown(content)}")


def _read_undone(content: Content) -> Document | None:
    """Return the document of a file whose damage (bytes before it, a transfer as text) can be undone, else None."""
    from ckptfix.reading.foreign.files import READ, as_text, undo

    undone = undo(content)
    if undone is None:
        return None
    document = None
    try:
        with refusing_payload(content.path, undone.content.bounds.names):
            document = _read(undone.content)
    except UnreadableError:
        pass
    if undone.exact and (document is None or document.damage):
        if as_text(content[:READ]) is not None:
            return None  # a text file, whose lines may end in CR LF
        raise UnreadableError(
            f"{content.path}: {clause(undone.cause)} only if no byte is missing; transfer it again in binary mode"
        )
    if document is not None:
        document.damage.insert(0, undone.cause)
    return document


def _tensors(document: Document) -> int:
    from ckptfix.reading.pickles.arrays import arrays_in

    return sum(1 for _ in tensors_in(document.root)) + sum(1 for _ in arrays_in(document.root))
