"""The role of a tensor in its model: from the target if there is one, else from its name.

Names are matched by segment, with tables of names in use; without a match, a tensor counts as a parameter."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from ckptfix.core.buffers import NUM_BATCHES_TRACKED, RUNNING_STATISTICS, is_buffer_name, split_key
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.spec import TensorSpec, TensorStatistics
from ckptfix.core.target import BUFFER, Target

# Parts of the names of buffers that every release saves, so that `core.buffers` does not list them.
_SCRATCH = re.compile(r"(mask(?!_token)|cache|freqs|anchors|embed_avg|cluster_size|_integer)")

_MASK = r"(^|\.)[^.]*(mask|causal|tril|triu|alibi|attn_bias|attention_bias|relative_bias)[^.]*$"

# Observers of torch.ao.quantization start at +Inf and -Inf, and so do torchmetrics' MinMetric and MaxMetric and a best
# result so far. GPyTorch's constraints may keep infinite bounds.
_RANGE = r"(^|[._])((min|max)(_vals?|_values?)?|value|best(_[^.]*)?|(lower|upper)_bound)$"

# Tables of diffusion models; 1 / alpha is +Inf at the last step of a schedule that ends in pure noise.
_SCHEDULE = r"(^|[._])(alphas|snr)(_|$)"

_EMBEDDING = r"(?i)(^|[._])(\w*emb(ed)?(ding)?s?|wte|wpe|tokens?|codebook|lut|pos|shared(?=\.weight))(_|\.|$)"

# Layers that start at zero so that a block starts as the identity, and other tensors that start at zero.
_ZERO_BY_DESIGN = r"""(?ix)(?<![a-z])(
      \w*lora_(embedding_)?b | lora_up | low_?rank\w* | hada_w2 | lokr_w\d   # adapters: arXiv:2106.09685, LyCORIS
    | b?oft_r | miss_block | \w*_lambda
    | zero_(conv|proj|linear|module)s? | controlnet\w* | input_hint_block | middle_block_out   # arXiv:2302.05543
    | conv_out | proj_out | out_layers | out(?=\.\d)        # zero_module in the UNet of guided-diffusion
    | ada_?ln\w* | adaptive\w* | \w*modulation | norm_out | final_layer | norm\d*(?=\.linear)  # arXiv 2212.09748
    | re_?zero | skip_init | fixup | alpha | gat(e|ing)s?(?!_proj) | layer_?scale   # closed residual branches
    | adapters? | prompts? | prefix
    | pos(ition)?(al)?_?emb\w* | rel(ative)?_?pos\w* | \w*_token       # learned positions and tokens
    | \w*offsets?\w* | attention_weights | \w*bbox_(embed|head|predictor)  # deformable ops, boxes of DETR
    | fc_loc | theta | flow                                           # spatial transformers
    | (mup?_?)?readout\w* | codebook\w* | out_embed\w* | modulator\w* | stn | locali[sz]ation
    | dynamic_(alpha|beta)_fn | [ifzo]gate                            # hyper-connections, xLSTM
    )(?![a-z])"""


# The last layer of a classifier, which some models start at zero or at a thousandth of the others.
_HEAD = r"(?i)(?<![a-z_])(heads?|classifier|logits|score|fc)(?![a-z_])|(^|\.)(\w+_head|output)\.weight$"

# The direction of weight_norm and the matrix of spectral_norm: both are divided by their own norm before use.
_SCALE_FREE = r"(^|\.)(weight_v|weight_orig|parametrizations\.\w+\.original1?)$"

# The last segment of a matrix that is a parameter of torch's own layers, or of layers like them.
_LAYERS_OWN = re.compile(r"(^|_)(weights?|kernel)(_(ih|hh|hr|v|orig|raw))?(_l\d+)?(_reverse)?$|^original\d?$")

# Parts of such a segment: noise that is drawn for each pass, or the prior of a Bayesian layer.
_NOISE = re.compile(r"(^|_)(eps|epsilon|noise|prior)(_|$)")
_FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})  # the dtypes in which weights are trained
_OF_NORM = RUNNING_STATISTICS | {"weight", "bias"}


def is_float32_in_t5(key: str) -> bool:
    """Return whether transformers loads a weight of T5 and its variants as float32 even for float16."""
    return key.endswith("DenseReluDense.wo.weight")


def is_buffer(key: str, spec: TensorSpec, target: Target | None) -> bool:
    """Return whether a tensor is a buffer. Only a module knows for certain; for a file, the name decides."""
    if target and target.modules is not None and key in target.slots:
        return target.slots[key].kind == BUFFER
    return is_buffer_name(key, spec.shape) or bool(_SCRATCH.search(split_key(key)[1]))


def is_running_statistic(key: str) -> bool:
    """Return whether a key names a running statistic of a batch or instance norm."""
    return split_key(key)[1] in RUNNING_STATISTICS


def may_be_infinite(key: str, spec: TensorSpec, target: Target | None) -> bool:
    """Return whether infinities are legitimate: attention masks hold -Inf, and unused range observers hold both."""
    if is_running_statistic(key):
        return False
    # Some models keep a mask as a frozen parameter.
    if target and target.modules is not None and key in target.slots and key not in target.frozen:
        return target.slots[key].kind == BUFFER
    # The bias of a Linear or a convolution is a vector; one of more dimensions is added to attention scores.
    bias_matrix = split_key(key)[1] == "bias" and len(spec.shape) > 1
    is_table = len(spec.shape) == 1 and bool(re.search(_SCHEDULE, split_key(key)[1]))
    return bias_matrix or is_table or bool(re.search(_MASK, key) or re.search(_RANGE, key))


def is_zero_by_design(key: str) -> bool:
    """Return whether matrices with this name are commonly initialised with zeros."""
    return bool(re.search(_ZERO_BY_DESIGN, key))


def is_head(key: str) -> bool:
    """Return whether a key is named like a last layer."""
    return bool(re.search(_HEAD, key))


def is_scale_free(key: str) -> bool:
    """Return whether the layer divides this matrix by its norm, so that its scale does not matter."""
    return bool(re.search(_SCALE_FREE, key))


def is_matrix(key: str, spec: TensorSpec, target: Target | None) -> bool:
    """Return whether a tensor is a weight matrix or kernel: a float parameter with two dimensions above 1, or the
    weight of a layer with one output or input."""
    shape = spec.shape
    if len(shape) < 2 or spec.numel < 2:
        return False
    if len([size for size in shape if size > 1]) < 2:
        is_column = shape[0] > 1 and "bias" not in key  # biases of users and items are tables of one column
        if not is_layers_own(key) or not (is_column or shape[1] > 1):
            return False
    if spec.layout != "strided" or spec.dtype not in _FLOATING or "bias" in split_key(key)[1]:
        return False
    return not is_buffer(key, spec, target)


def is_layers_own(key: str) -> bool:
    """Return whether a key is named like a layer's weight; any other may be a buffer or a parameter."""
    leaf = split_key(key)[1]
    return bool(_LAYERS_OWN.search(leaf)) and not _NOISE.search(leaf)


def is_embedding(key: str) -> bool:
    """Return whether a key is named like an embedding, a codebook, or learned positions."""
    return bool(re.search(_EMBEDDING, key))


def usual_rms(spec: TensorSpec) -> float:
    """Return the RMS of a matrix or kernel after torch's default initialisation: uniform within 1/sqrt(fan_in)."""
    return 1 / math.sqrt(3 * math.prod(spec.shape[1:]))


def kind(key: str, spec: TensorSpec) -> str:
    """Return the family within which magnitudes are comparable: ``convolution``, ``embedding`` or ``linear``."""
    if len(spec.shape) > 2:
        return "convolution"
    return "embedding" if is_embedding(key) else "linear"


class Norm(Struct, frozen=True):
    """The norm layer that follows a matrix: its keys by their last segment (``weight``, ``running_var`` …)."""

    keys: Mapping[str, str]

    def figures(self, name: str, statistics: Mapping[str, TensorStatistics]) -> TensorStatistics | None:
        """Return the statistics of its ``weight``, ``bias``, ``running_var`` …; None if the file lacks it."""
        return statistics.get(self.keys.get(name, ""))

    @property
    def vectors(self) -> tuple[str, ...]:
        """The keys of its weight and bias, if the file has them."""
        return tuple(self.keys[name] for name in ("weight", "bias") if name in self.keys)


def norms_after(checkpoint: Checkpoint, keys: Collection[str]) -> Mapping[str, Norm]:
    """Return the norm that follows each of these matrices in the file, if its vectors fit the matrix's outputs.

    State_dicts list modules in the order of their definition, which is nearly always the order of their use."""
    specs, wanted = checkpoint.specs, set(keys)
    behind: dict[str, list[str]] = defaultdict(list)  # the keys of each module, from the end of the file to here
    norms: dict[str, Norm] = {}
    following = last = None
    for key in reversed(list(specs) if wanted else []):
        module = key.rpartition(".")[0]
        if module != last:
            following, last = last, module
        if key in wanted and following is not None and (norm := _norm(specs, behind[following], specs[key].shape[:1])):
            norms[key] = norm
        behind[module].append(key)
    return norms


def _norm(specs: Mapping[str, TensorSpec], keys: list[str], shape: tuple[int, ...]) -> Norm | None:
    """Return the keys of a module as a norm, if it is one and all its vectors have this shape."""
    if len(keys) > 2 * len(_OF_NORM):  # `weight` and `.weight` both belong to the module without a name
        return None
    members = {key.rpartition(".")[2]: key for key in reversed(keys)}
    vectors = [specs[key].shape for name, key in members.items() if name != NUM_BATCHES_TRACKED]
    is_norm = bool(vectors) and all(vector == shape for vector in vectors)
    return Norm(members) if is_norm and members.keys() <= _OF_NORM else None


def median(values: Iterable[float]) -> float:
    """Return the median of some numbers. Importing ``statistics`` took a tenth of the time to the first answer."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
