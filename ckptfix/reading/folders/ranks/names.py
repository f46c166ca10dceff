"""The names of files of ranks, in one table for folders, single files and zoos.

It imports no reader, because every opened file is looked up here."""

import re
from collections.abc import Callable, Mapping

from msgspec import Struct

ZERO_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,7})_mp_rank_(\d{1,7})_?optim_states\.pt")
ZERO_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_(\d{1,7})_model_states\.pt")
ZERO_EXPERT = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_(\d{1,7})_model_states\.pt")
ZERO_EXPERT_OPTIM = re.compile(r"expp_rank_(\d{1,7})_mp_rank_(\d{1,7})_optim_states\.pt")  # in stage 0
PIPELINE_LAYER = re.compile(r"layer_(\d{2,6})(?:-model_(\d{2,6}))?-model_states\.pt")
MEGATRON_RANK = re.compile(r"[mt]p_rank_(\d{2,7})(?:_(?:pp_rank_)?(\d{3,7}))?(?:_(\d{3,7}))?")
NEMO = "model_weights.ckpt"
LLAMA_SHARD = re.compile(r"consolidated\.(\d{1,4})\.pth?")
LLAMA_PARAMS = "params.json"
NANOTRON_METADATA, NANOTRON_MODEL = "checkpoint_metadata.json", "model"
NANOTRON_PART = re.compile(
    r"model_(?P<leaf>\w+?)(?:_pp-rank-(?P<stage>\d{1,7})-of-(?P<stages>\d{1,7})_tp-rank-(?P<rank>\d{1,7})-of-(?P<ranks>\d{1,7})"
    r"(?:_exp-rank-(?P<group>\d{1,7})-of-(?P<groups>\d{1,7}))?)?\.safetensors"
)
FAIRSEQ2_RANK = re.compile(r"sdp_(\d{2,7})\.pt")
# Files with a rank's number in their names: those of FSDP, and many others.
NUMBERED = re.compile(
    r"(?P<stem>.*?)(?:_?world_size_(?P<world>\d{1,7}))?[._-]?(?:rank|shard)[._=-]?(?P<rank>\d{1,7})(?P<suffix>\.\w{1,10})"
)
# Files of `torch_checkpointing`, recognised by the metadata file beside them.
ITEM = re.compile(r"(?P<stem>.+)(?P<world>)_(?P<rank>\d{1,7})(?P<suffix>\.pt)")
ITEM_METADATA = "metadata.pkl"


_DIGITS = 64  # more than the number of an iteration has


def iteration_name(word: str) -> str:
    """Return the name of an iteration's folder for the text in ``latest_checkpointed_iteration.txt``."""
    return f"iter_{int(word):07d}" if word.isascii() and word.isdigit() and len(word) < _DIGITS else word


# The formats of DeepSpeed's folders.
OF_DEEPSPEED = frozenset(("zero", "universal", "pipeline"))

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
LATEST_MEGATRON, LATEST_NANOTRON = "latest_checkpointed_iteration.txt", "latest.txt"
POINTERS: Mapping[str, Callable[[str], str]] = {
    **dict.fromkeys((LATEST, LATEST_UNIVERSAL, LATEST_NANOTRON), str),
    LATEST_MEGATRON: iteration_name,
}
"""The text files that name the latest save next to them, each with a function from its text to that name.

``may_be_rank`` is true for them."""


class RankNames(Struct, frozen=True):
    """One kind of files of ranks, by their paths in the folder of the checkpoint.

    The groups of the pattern identify the rank. ``may_be_rank`` is true for every such file."""

    files: re.Pattern[str]
    depth: int = 1  # number of segments in the path
    beside: re.Pattern[str] | None = None  # other files in the folder that belong to them
    marks: tuple[bytes, ...] = ()  # bytes at the start of such a file, if its name is not sufficient


RANK_NAMES = (
    RankNames(ZERO_OPTIM),
    RankNames(ZERO_MODEL),
    RankNames(ZERO_EXPERT),
    RankNames(ZERO_EXPERT_OPTIM),
    RankNames(PIPELINE_LAYER),
    RankNames(re.compile(r"zero/([^/]+)/fp32\.pt"), 3, re.compile(r"zero/(?:[^/]+/)?\w+\.pt")),
    RankNames(re.compile(rf"{MEGATRON_RANK.pattern}/[^/]+"), 2),
    RankNames(LLAMA_SHARD, beside=re.compile(re.escape(LLAMA_PARAMS))),
    RankNames(re.compile(rf"model/pp_\d+/tp_\d+/{FAIRSEQ2_RANK.pattern}"), 4, re.compile(r"(?:\w+/)+\w+\.pt")),
    RankNames(NUMBERED, marks=(b"torch.distributed", b"shard_metadata")),
)
