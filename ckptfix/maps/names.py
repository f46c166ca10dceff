"""What the names of layers mean: splits segments into words, and maps words to the concepts of the field.

Two libraries write ``blocks.3.attn.qkv.weight`` and ``encoder.layer.3.attention.self.query.weight``. The table
``CONCEPTS`` has a line for each concept, or several concepts of a fused layer, with the words that libraries use for
it. A word that is not in the table is its own concept."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from ckptfix.core.buffers import MOVING_STATISTICS

CONCEPTS = """
attention: attn attention selfattn selfattention selfattns mha mhsa msa
cross: cross crossattn crossattention encdec encoderattn
mlp: mlp mlps ffn ff feedforward
norm: norm ln lns layernorm layrnorm batchnorm bn gn groupnorm rmsnorm normalization norms
query: q query queries wq qproj toq linearq
key: k key keys wk kproj tok_ tok linearK
value: v value values wv vproj tov critic vf
policy: policy actor pi action
out: o out output wo oproj outproj
gate: gate wgate
up: up wup
down: down wdown
proj: proj projection dense linear lin fc projections
layer: layer layers block blocks resblocks resblock h
stage: stage stages
encoder: encoder enc
decoder: decoder dec
embed: embed embeds embedding embeddings emb
position: pos position positions positional
word: word words
segment: seg segment segments
patch: patch patches patchify
class: cls class
head: head heads classifier classif predictions score unembed unembedding
image: vision visual image img
text: text language txt textual
audio: audio aud speech
averaged: ema momentum target teacher averaged shadow
trained: online student base
conv: conv convs convolution cnv
downsample: downsample downsampling downsampler
upsample: upsample upsampling upsampler upscale
shortcut: shortcut skip identity
scale: scale scaling gamma lambda lambdas
bias: bias beta biases b
weight: weight w kernel
mean: mean mu
variance: var variance logvar
distill: dist distill distillation distilled
stem: stem
pool: pool pooler pooling pooled
mask: mask
passage: passage ctx document doc
intermediate: intermediate
temperature: temperature logit tau
final: final last post
first: pre before input initial macaron
second: after
reduce: reduction reduce squeeze sr
relative: relative rel
depthwise: dw depthwise
pointwise: pw pointwise
modulation: modulation mod adaln ada film
query key value: qkv wqkv
key value: kv wkv
query key: qk
gate query key value: gqkv
"""

# Whole segments in lower case, perhaps without leading and trailing digits, after the concepts that they mean together.
PHRASES = """
word embed: wte tok_embeddings tok_embedding embed_tokens token_embedding token_embeddings token_embd tok
position embed: wpe
segment embed: token_type_embeddings token_type_embedding
class token: cls_token class_token class_embedding
query key value: in_proj c_attn
gate: w1 fc12
down: w2
up: w3 fc11
gate up: w12 w13
mlp up: c_fc fc1 linear1 lin1 intermediate dense_h_to_4h wi
mlp down: fc2 linear2 lin2 dense_4h_to_h
norm attention: input_layernorm layernorm_before norm_before before_norm attention_norm attn_norm attn_ln norm_attn
norm attention: self_attn_layer_norm sa_norm ln_1 ln1 norm1 norm_1 layer_norm1 layer_norm_1 layernorm1
norm after attention: post_attention_layernorm
norm mlp: layernorm_after norm_after after_norm ffn_norm mlp_norm mlp_ln ln_2 ln2 norm2 norm_2 layer_norm2 layer_norm_2
norm mlp: layernorm2 norm_mlp
norm cross: norm_cross encoder_attn_layer_norm
cross attention: encoder_attn multihead_attn context_attn src_attn enc_attn
norm final: ln_f ln_post
norm first: ln_pre pre_layrnorm
temperature: logit_scale
text layer: context_block
text embed: context_embedder
text query: add_q_proj
text key: add_k_proj
text value: add_v_proj
text out: to_add_out
text norm query: norm_added_q
text norm key: norm_added_k
text norm attention: norm1_context
text norm mlp: norm2_context
text mlp: ff_context
image layer: x_block
encoder trained: encoder_q
question encoder: query_encoder query_tower
passage encoder: context_encoder
encoder averaged: encoder_k
mlp first: feed_forward1 ffn1 ff1
"""

ROLES = frozenset({"query", "key", "value", "gate", "up"})  # concepts whose layers may be fused into one tensor

GATED = {"fc1": "w1", "fc2": "w2", "fc3": "w3"}  # all three in one module have the order of Meta's Llama

# The roles of the layers in attention and in an MLP.
PLACES = (frozenset({"query", "key", "value", "out"}), frozenset({"gate", "up", "down"}))

# Concepts that exclude each other: `q_proj` is never `out_proj`.
EXCLUSIVE = (
    *PLACES,
    frozenset({"image", "text"}),
    frozenset({"weight", "bias"}),
    frozenset({"encoder", "decoder"}),
    frozenset({"first", "final"}),
    frozenset({"mean", "variance"}),
)

# Concepts of the layers in the upsampling path of a U-Net, a pyramid or a generator.
BACKWARD = frozenset("decoder up upsample upconv deconv lateral fpn pyramid fusion refine refinenet synthesis".split())
FROM_THE_TOP = "refinenet"  # MiDaS runs the last of them first; other libraries number them in the order of execution

STATISTICS = {"running_mean": "mean", "running_var": "variance"}


def _meanings(table: str) -> dict[str, tuple[str, ...]]:
    lines = (line.partition(":") for line in table.strip().splitlines())
    return {word: tuple(meant.split()) for meant, _, words in lines for word in words.split()}


_OF_WORDS, _OF_PHRASES = _meanings(CONCEPTS), _meanings(PHRASES)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


@lru_cache(maxsize=65536)
def segments(key: str) -> tuple[str, ...]:
    """Split a key at its dots, and ``in_proj_weight`` into ``in_proj`` and ``weight``."""
    *front, last = key.split(".")
    for kind in ("weight", "bias"):
        if last.endswith("_" + kind) and len(last) > len(kind) + 1:
            return (*front, last[: -len(kind) - 1], kind)
    return (*front, last)


@lru_cache(maxsize=65536)
def concepts(segment: str) -> tuple[str, ...]:
    """Return the concepts that a segment of a key names, ignoring numbers."""
    phrase = _OF_PHRASES.get(segment.lower()) or _OF_PHRASES.get(segment.lower().strip("_0123456789"))
    if phrase:
        return phrase
    words = [word.lower() for word in _WORD.findall(segment) if not word.isdigit()]
    return tuple(concept for word in words for concept in _OF_WORDS.get(word, (word,)))


def roles(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the roles (query, key, value; gate, up) in a module's name, in order; several if it is fused."""
    return tuple(concept for concept in concepts(module(path)) if concept in ROLES)


_SECOND = re.compile(r"(layer_?|batch_?)?(norm|ln)_?2")


# Names of a layer's tensors in JAX and TensorFlow. `gamma` is a weight only next to `beta`: it is also a layer's scale.
_TORCH_NAMES = {"kernel": "weight", **MOVING_STATISTICS}
_OF_NORMS = {"gamma": "weight", "beta": "bias"}


def crosses_first(paths: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], bool]:
    """Return the modules that have a ``cross_attn`` and another attention, and whether the cross attention is defined
    first, as in Deformable DETR: the first norm of the module then belongs to it."""
    found: dict[tuple[str, ...], dict[bool, None]] = {}
    for path in paths:
        for at, name in enumerate(path[:-1]):
            if "attention" in (named := concepts(name)) and "norm" not in named:
                found.setdefault(path[:at], {})["cross" in name.lower()] = None
    return {front: next(iter(kinds)) for front, kinds in found.items() if len(kinds) > 1}


def disambiguated(paths: Sequence[tuple[str, ...]], is_shown: bool) -> list[tuple[str, ...]]:
    """Replace ambiguous names by what the rest of the file says about them: ``kernel`` is the weight in JAX and
    TensorFlow, a ``proj`` next to ``qkv`` is the output of attention, ``downsample`` next to ``conv1`` is the shortcut,
    and ``norm2`` belongs to the MLP unless there is ``norm3`` or cross attention, as in ``nn.TransformerDecoderLayer``.
    ``is_shown`` is whether the paths are in the order of the model."""
    turned = {front for front, is_first in crosses_first(paths).items() if is_first and is_shown}
    norms = {path[:-1] for path in paths if path[-1] == "beta"}
    words = [_TORCH_NAMES | _OF_NORMS if path[:-1] in norms else _TORCH_NAMES for path in paths]
    paths = [(*path[:-1], names.get(path[-1], path[-1])) for path, names in zip(paths, words, strict=True)]
    modules = {path[:-1] for path in paths}
    attention = {parent(path) for path in paths if "query" in roles(path)}
    across = [(path[:at], concepts(name)) for path in paths for at, name in enumerate(path)]
    crossed = {front for front, words in across if "cross" in words and "norm" not in words}

    def named(path: tuple[str, ...]) -> tuple[str, ...]:
        at = path.index("downsample") if "downsample" in path else 0
        if at and (*path[:at], "conv1") in modules:  # a block of a ResNet
            path = (*path[:at], "shortcut", *path[at + 1 :])
        *front, norm = path[:-1] or ("",)
        if set(concepts(norm)) - {"c"} == {"proj"} and tuple(front) in attention:
            return (*front, "out_proj", path[-1])
        if tuple(front) in turned and norm[-1:] in ("1", "2") and _SECOND.fullmatch(f"{norm[:-1]}2"):
            return (*front, "norm_cross" if norm[-1] == "1" else "norm_attn", path[-1])
        if (*front, f"{norm[:-1]}0") in modules:  # one for each stage of a backbone
            return path
        if _SECOND.fullmatch(norm) and ((*front, f"{norm[:-1]}3") in modules or tuple(front) in crossed):
            return (*front, "norm_cross", path[-1])
        if _SECOND.fullmatch(f"{norm[:-1]}2") and norm[-1] == "3":
            return (*front, "norm_mlp", path[-1])
        if norm in GATED and modules.issuperset((*front, name) for name in GATED):
            return (*front, GATED[norm], path[-1])
        if norm in ("post_attention_layernorm", "final_layernorm") and (*front, "input_layernorm") in modules:
            if (*front, "pre_feedforward_layernorm") in modules:
                return path
            is_last = norm == "final_layernorm" or (*front, "final_layernorm") not in modules
            return (*front, "norm_mlp" if is_last else "norm_cross", path[-1])
        return path

    return list(map(named, paths))


def kind(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the last segment of a path if it is ``weight`` or ``bias``, else an empty tuple."""
    return path[-1:] if len(path) > 1 and path[-1] in ("weight", "bias") else ()


def parent(path: tuple[str, ...]) -> tuple[str, ...]:
    return path[: -2 if kind(path) else -1]


def module(path: tuple[str, ...]) -> str:
    """Return the segment that names the module of a leaf: ``q_proj`` for ``self_attn.q_proj.weight``."""
    return path[-2] if kind(path) else path[-1]


@lru_cache(maxsize=65536)
def template(key: str) -> str:
    """Return a key with ``#`` for each number, which is equal for all layers of a stack."""
    return re.sub(r"\d+", "#", key)


def by_number(keys: Iterable[str]) -> list[str]:
    """Return keys sorted by name, with numbers in numerical order: ``layers.2`` before ``layers.10``."""
    return sorted(keys, key=lambda key: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", key)])


def bag(path: Iterable[str]) -> Counter[str]:
    """Count the concepts in a path."""
    return Counter(concept for segment in path for concept in concepts(segment))


def weights(bags: Sequence[Counter[str]], others: Sequence[Counter[str]]) -> dict[str, float]:
    """Return how well each concept distinguishes candidates: hardly at all if all of one side have it."""
    shares = [
        {concept: count / len(side) for concept, count in Counter(word for each in side for word in each).items()}
        for side in (bags, others)
    ]
    return {
        concept: 1.02 - max(side.get(concept, 0.0) for side in shares)
        for concept in shares[0].keys() | shares[1].keys()
    }


def similarity(one: Counter[str], other: Counter[str], weigh: Mapping[str, float]) -> float:
    """Return the weighted fraction of concepts in common, from 0 to 1, minus 1 for each family in which they differ."""
    size = sum(weigh[word] * count for each in (one, other) for word, count in each.items())
    score = 2 * sum(weigh[word] * count for word, count in (one & other).items()) / size if size else 0.0
    return score - conflicts(one, other, EXCLUSIVE)


def conflicts(one: Counter[str], other: Counter[str], families: Iterable[frozenset[str]] = PLACES) -> int:
    """Count the families of concepts in which two names differ."""
    shared = ((family & one.keys(), family & other.keys()) for family in families)
    return sum(bool(mine and theirs and not mine & theirs) for mine, theirs in shared)


def numbers(path: Iterable[str]) -> tuple[int, ...]:
    return tuple(int(number) for segment in path for number in re.findall(r"\d+", segment))
