"""Messages about a file that is damaged, not there, or no checkpoint."""

from __future__ import annotations

import pickletools

from ckptfix.explain.record import Advice, Record

_LOOK = Advice("says what the file is, how large it should be, and what of it is whole", "ckptfix check {FILE}")
_SALVAGE = Advice("writes what is whole of it, and lists the rest", "ckptfix repair {FILE} --salvage")
_AGAIN = Advice(
    "Download or copy the file again and compare its size with the source's: most often this is all it takes."
)
_SERIALIZATION = "https://github.com/pytorch/pytorch/blob/main/torch/serialization.py"
_PICKLE = "https://docs.python.org/3/library/pickle.html"
_INSTRUCTIONS = "|".join(str(ord(instruction.code)) for instruction in pickletools.opcodes)
"""What a pickle may hold: an operand that is none of them shows that the file is no pickle."""

_SAFETENSORS = "https://github.com/huggingface/safetensors#format"

FILES = (
    Record(
        name="git-lfs-pointer",
        example="_pickle.UnpicklingError: invalid load key, 'v'.",
        patterns=(
            r"invalid load key, '?v'",
            r"Unsupported operand 118\b",
            r"have cloned a repository without having git-lfs",
        ),
        cause="The file begins with the letter v, as a git-lfs pointer does: three lines of text that stand for the"
        " real file, which was never fetched.",
        advice=(
            Advice("Run `git lfs install` and `git lfs pull` in the repository, or download the file itself."),
            _LOOK,
        ),
        source="https://git-lfs.com",
    ),
    Record(
        name="web-page",
        example="_pickle.UnpicklingError: invalid load key, '<'.",
        patterns=(r"invalid load key, '<'", r"Unsupported operand 60\b"),
        cause="The file begins with <, so it is a web page (an error, a login or a confirmation page) that was saved"
        " under the name of a checkpoint.",
        advice=(
            Advice(
                "Download it again: open the link in a browser first. Google Drive wants a confirmation for large files"
                " (gdown does that), GitHub wants the raw link."
            ),
            _LOOK,
        ),
        source="https://github.com/wkentaro/gdown",
    ),
    Record(
        name="compressed",
        example="_pickle.UnpicklingError: invalid load key, '\\x1f'.",
        patterns=(r"invalid load key, '\\x1f'", r"Unsupported operand 31\b"),
        cause="The file is compressed with gzip, and torch.load reads what is inside of it only once it is unpacked.",
        advice=(
            Advice("writes the checkpoint that is inside", "ckptfix repair {FILE} --format pth -o unpacked.pth"),
            Advice("opens it unpacked", code='torch.load(gzip.open({path}, "rb"))'),
        ),
        source="https://docs.python.org/3/library/gzip.html",
    ),
    Record(
        name="no-pickle",
        example="_pickle.UnpicklingError: invalid load key, '{'.",
        patterns=(
            r"invalid load key, (?!'?v'|'<'|'\\x1f')(?P<first>'[^']+'|'''|\"'\")",
            r"filename 'storages' not found",
            rf"Unsupported operand (?!(?:31|60|118|{_INSTRUCTIONS})(?!\d))\d+",
        ),
        cause="The file does not begin as a checkpoint does (first byte: {first}). Often it is JSON such as an index of"
        " shards ({), text (a letter or a line break), a safetensors file, HDF5 (\\x89), or zeros (\\x00) of a"
        " download that never arrived. A torch file with damage inside of it can say the same.",
        advice=(_LOOK, _AGAIN),
        source=_PICKLE,
        unknown={"first": "not in this message"},
    ),
    Record(
        name="empty-file",
        example="EOFError: Ran out of input",
        patterns=(r"Ran out of input", r"^EOFError:?$"),
        cause="There was nothing to read: the file is empty (a save that was killed, a full disk), or an open file was"
        " read to its end before and handed over once more.",
        advice=(
            _LOOK,
            Advice("goes back to the start of an open file before the second load", code="file.seek(0)"),
        ),
        source=_SERIALIZATION,
    ),
    Record(
        name="damaged-archive",
        example="RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        patterns=(
            r"failed finding central directory",
            r"failed reading zip archive",
            r"invalid header or archive is corrupted",
            r"failed reading file [\w./\-]+: (?!.*not found)",
            r"crc-?32 check failed",
            r"BadZipFile: (?:File is not a zip file|Bad|Truncated)",
        ),
        cause="The file is a torch archive (a zip) that is cut short or damaged. The table of contents is at its end,"
        " so a download or a save that stopped early loses it, while most of the weights may still be there.",
        advice=(_AGAIN, _LOOK, _SALVAGE),
        source="https://github.com/pytorch/pytorch/issues/31620",
        codes=("FIL2",),
    ),
    Record(
        name="truncated-file",
        example="RuntimeError: unexpected EOF, expected 1024 more bytes. The file might be corrupted.",
        patterns=(
            r"unexpected EOF(?:, expected (?P<lacking>\d+) more bytes)?\. The file might be corrupted",
            r"storage has wrong (?:byte )?size",
            r"pickle data was truncated",
            r"unpickling stack underflow|could not find MARK",
        ),
        frames=(
            r"_weights_only_unpickler\.py.{0,600}(?:IndexError|UnicodeDecodeError|KeyError: '\d+'|struct\.error)",
            r"_rebuild_tensor.{0,600}Trying to resize storage that is not resizable",
            r"serialization\.py.{0,600}(?:storage key '\d+' not found in|Memo value not found at)",
        ),
        cause="The file ends too early ({lacking} more bytes were expected) or was changed on the way, as by a"
        " transfer in text mode.",
        advice=(_AGAIN, _LOOK, _SALVAGE),
        source=_SERIALIZATION,
        codes=("FIL2",),
        unknown={"lacking": "some"},
    ),
    Record(
        name="foreign-pickle",
        example="RuntimeError: Invalid magic number; corrupt file?",
        patterns=(r"invalid magic number; corrupt file", r"Invalid protocol version: "),
        cause="The file is a pickle, but not one of torch.save: pickle.dump or another library wrote it (Detectron's"
        " .pkl does), or it is damaged.",
        advice=(
            Advice("shows what it holds, without running anything in it", "ckptfix inspect {FILE}"),
            Advice(
                "writes its arrays as a state_dict that torch.load reads",
                "ckptfix repair {FILE} --format pth -o weights.pth",
            ),
        ),
        source=_SERIALIZATION,
    ),
    Record(
        name="plain-pickle-load",
        example="_pickle.UnpicklingError: A load persistent id instruction was encountered, but no persistent_load"
        " function was specified.",
        patterns=(r"load persistent id instruction was encountered",),
        cause="A file of torch.save was opened with pickle.load, which cannot find the tensors' bytes.",
        advice=(Advice("reads it", code='torch.load({path}, map_location="cpu", weights_only=True)'),),
        source=_PICKLE,
    ),
    Record(
        name="safetensors-cut",
        example="safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        patterns=(
            r"MetadataIncompleteBuffer",
            r"incomplete metadata, file not fully covered",
            r"InvalidOffset\b|invalid offset for tensor",
        ),
        cause="The header of this safetensors file tells of more bytes, or of fewer, than the file has: it is cut"
        " short, or something was appended.",
        advice=(_AGAIN, _LOOK, _SALVAGE),
        source=_SAFETENSORS,
        codes=("FIL2",),
    ),
    Record(
        name="no-safetensors",
        example="safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        patterns=(
            r"\bHeaderToo(?:Large|Small)|\bInvalidHeader(?:Length|Start|Deserialization)\b",
            r"Error while deserializing(?: header)?: (?:header too|invalid (?:header|UTF-8|JSON))",
            r"invalid (?:UTF-8|JSON) in header",
        ),
        cause="The file is called safetensors and is none: often a torch file under that name, a git-lfs pointer, or"
        " a web page.",
        advice=(
            _LOOK,
            Advice(
                "writes a real safetensors file, if it is a torch file",
                "ckptfix repair {FILE} --format safetensors -o weights.safetensors",
            ),
        ),
        source=_SAFETENSORS,
    ),
    Record(
        name="no-such-file",
        example="FileNotFoundError: [Errno 2] No such file or directory: 'model.pth'",
        patterns=(
            r"No such file or directory: ['\"](?P<missing>[^'\"]+\.(?!h\b|cuh\b|so)\w+)['\"]",
            r"No such file or directory: (?P<missing>[^'\"\s]+\.(?:safetensors|pth|pt|ckpt|bin))",
            r"No such file or directory, file path: (?P<missing>\S+)",
            r"(?:Error )?no file named (?P<missing>[\w.\-]+)",
            r"does not appear to have a file named (?P<missing>[\w.\-]+)",
            r"No checkpoint found at ['\"]?(?P<missing>[^'\"\s]+)",
            r"is not a local folder and is not a valid model identifier",
            r"file ['\"]?(?P<missing>[^'\"\s]+\.\w+)['\"]? cannot be opened",
            r"\[(?:Errno|WinError) [23]\] [^'\"\n]{1,200}: ['\"](?P<missing>[^'\"]+\.(?!h\b|cuh\b|so)\w+)['\"]",
        ),
        cause="The file ({missing}) is not where the program looks: another folder, another name, or it was not"
        " downloaded. A relative path counts from the folder that the program was started in.",
        advice=(
            Advice("prints what the path means", code="print(os.path.abspath({path}))"),
            Advice(
                "If your folder has the weights under another name (consolidated.00.pth, adapter_model.safetensors),"
                " point the loader at that file."
            ),
        ),
        source="https://docs.python.org/3/library/exceptions.html#FileNotFoundError",
        unknown={"missing": "its name is not in this message"},
    ),
    Record(
        name="no-such-folder",
        example="RuntimeError: Parent directory /runs/exp1 does not exist.",
        patterns=(
            r"Parent directory (?P<folder>.{1,400}?) does not exist",
            r"open file failed with strerror: No such file or directory",
        ),
        cause="torch.save does not make folders, and {folder} is not there.",
        advice=(Advice("makes it first", code="os.makedirs(os.path.dirname({path}), exist_ok=True)"),),
        unknown={"folder": "that of the path"},
        source="https://pytorch.org/docs/stable/generated/torch.save.html",
    ),
    Record(
        name="disk-full",
        example="OSError: [Errno 28] No space left on device",
        patterns=(
            r"^(?!.*/torch_).*No space left on device",
            r"PytorchStreamWriter failed writing",
            r"unexpected pos \d+ vs\.? \d+",
            r"Disk quota exceeded",
        ),
        cause="The disk or the quota is full. A checkpoint that was being written is cut short, and the older one of"
        " the same name is gone.",
        advice=(
            Advice("Free space and save again; until then keep what is there."),
            Advice("writes what is whole of the file that was left", "ckptfix repair {FILE} --salvage"),
        ),
        source="https://github.com/pytorch/pytorch/blob/main/caffe2/serialize/inline_container.cc",
        codes=("FIL2",),
    ),
    Record(
        name="not-seekable",
        example="AttributeError: 'str' object has no attribute 'seek'. You can only torch.load from a file that is"
        " seekable.",
        patterns=(r"only torch\.load from a file that is seekable",),
        cause="torch.load got something that it cannot move about in: a stream of the network, or an object that is"
        " no file.",
        advice=(Advice("reads it into memory first", code="torch.load(io.BytesIO(stream.read()))"),),
        source=_SERIALIZATION,
    ),
    Record(
        name="opened-as-text",
        example="UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",
        patterns=(r"'utf-?8' codec can't decode byte 0x80 in position (?:0|64)\b",),
        cause="A checkpoint was opened as text; it begins with the byte 0x80, which no text does.",
        advice=(Advice("opens it as bytes, or gives the path itself", code='torch.load(open({path}, "rb"))'),),
        source=_PICKLE,
        general=True,
    ),
    Record(
        name="wrong-hash",
        example='RuntimeError: invalid hash value (expected "5c106cde", got "aa34f1b2")',
        patterns=(r"invalid hash value \(expected ['\"](?P<expected>\w+)['\"], got ['\"](?P<got>\w+)['\"]",),
        cause="The download is not the file that its name promises: the hash should begin with {expected} and is"
        " {got}. It was cut short or altered, or the publisher replaced it under the old name.",
        advice=(
            Advice("Delete the file from the cache (~/.cache/torch/hub/checkpoints) and download it again."),
            Advice("says whether the file is whole", "ckptfix check {FILE}"),
        ),
        source="https://github.com/pytorch/vision/issues/7744",
    ),
    Record(
        name="no-permission",
        example="PermissionError: [Errno 13] Permission denied: 'model.pth'",
        patterns=(
            r"Permission denied: ['\"](?P<place>[^'\"]+\.(?:pth|pt|ckpt|bin|safetensors|tar|pkl))['\"]",
            r"Is a directory: ['\"](?P<place>[^'\"]+)['\"]",
        ),
        cause="{place} is a folder, or a file that you may not open.",
        advice=(
            Advice(
                "says what is there; folders of shards and of torch.distributed are read too", "ckptfix inspect {FILE}"
            ),
        ),
        source="https://docs.python.org/3/library/exceptions.html#PermissionError",
    ),
)
