"""The rules, in the order in which they run. Each sees the checkpoint after the edits of those before it.

A module whose name begins with a code is that rule; the others hold what rules share."""

from ckptfix.rules.rule import Needs, Rule

# Every rule, once. What names say comes before what shapes say, and both before what values say.
RULES: tuple[Rule, ...] = (
    Rule("FIL901", "executable-payload"),
    Rule("FIL203", "damaged-file"),
    Rule("FIL201", "storage-damage", Needs.VALUES, wanted_by="salvage"),
    Rule("FIL202", "zero-run", Needs.VALUES),
    Rule("FIL204", "copied-block", Needs.VALUES),
    Rule("FIL101", "several-state-dicts", wanted_by="weights"),
    Rule("FIL105", "shard-of-weights"),
    Rule("FIL109", "other-suffix"),
    Rule("FIL110", "paddle-weights"),
    Rule("FIL102", "not-weights-only"),
    Rule("FIL103", "device-tag"),
    Rule("FIL104", "lost-extras"),
    Rule("FIL106", "unnamed-weights"),
    Rule("FIL107", "wrong-name-hash"),
    Rule("KEY101", "wrapper-segment"),
    Rule("KEY102", "wrapper-prefix"),
    Rule("KEY107", "renamed-by-map", Needs.MAP, wanted_by="rename_map"),
    Rule("KEY103", "missing-wrapper-prefix", Needs.TARGET),
    Rule("KEY104", "foreign-prefix", Needs.TARGET),
    Rule("KEY105", "renamed-by-release", Needs.TARGET),
    Rule("KEY106", "renamed-layers", Needs.TARGET),
    Rule("FIT109", "reparametrised-weight", Needs.TARGET),
    Rule(
        "FIL108",
        "unmerged-adapter",
        wanted_by="adapter",
        keys=r"lora|lycoris_|ia3|base_layer|base_model\.model\.|hada_|lokr_|oft_|vera_|token_adapter|adapter\.linear_"
        r"|prompt_embeddings|emb_params|^clip_[lg]$|^<|^\*$|\.adapters\.|^linear\.\d+\.weight$|^ip_adapter\.",
    ),
    Rule("BUF101", "missing-num-batches-tracked"),
    Rule("BUF102", "unexpected-num-batches-tracked"),
    Rule("BUF103", "malformed-num-batches-tracked"),
    Rule("BUF104", "transient-buffer", Needs.TARGET),
    Rule("FIT106", "flat-parameters", Needs.TARGET),
    Rule("FIT107", "quantised-weights", keys=r"SCB|[qQ]_?weight|W_q|weight_packed|scale|absmax|_blocks|trellis"),
    Rule("FIT108", "layer-count", Needs.TARGET, wanted_by="adapt"),
    Rule("FIT103", "shape-mismatch", Needs.TARGET, wanted_by="adapt"),
    Rule("FIT105", "tie", Needs.TARGET),
    Rule("FIT102", "unexpected-key", Needs.TARGET),
    Rule("FIT101", "missing-key", Needs.TARGET),
    Rule("FIT104", "dtype-mismatch", Needs.TARGET),
    Rule("VAL101", "non-finite", Needs.VALUES),
    Rule("VAL103", "running-stats", Needs.VALUES),
    Rule("VAL201", "decayed", Needs.VALUES),
    Rule("VAL202", "all-zero", Needs.VALUES),
    Rule("VAL203", "subnormal", Needs.VALUES),
    Rule("VAL204", "dead-channels", Needs.VALUES),
    Rule("VAL205", "constant", Needs.VALUES),
    Rule("VAL206", "outlier-scale", Needs.VALUES),
    Rule("VAL207", "huge-value", Needs.VALUES),
    Rule("VAL208", "misread-dtype", Needs.VALUES),
    Rule("VAL209", "same-matrix", Needs.VALUES),
    Rule("VAL210", "sparse-index", Needs.VALUES),
    Rule("VAL301", "twins-disagree", Needs.VALUES),
    Rule("VAL102", "half-overflow", Needs.VALUES),
    Rule("OPT101", "stale-optimizer", Needs.OPTIMIZER, wanted_by="drop_optimizer"),
    Rule("OPT102", "unreadable-optimizer-state", Needs.OPTIMIZER),
    Rule("OPT103", "non-finite-moments", Needs.OPTIMIZER),
    Rule("OPT104", "optimizer-of-another-model", Needs.OPTIMIZER),
    Rule("OPT105", "optimizer-positions", Needs.OPTIMIZER, wanted_by="optimizer_positions"),
    Rule("OPT106", "impossible-moments", Needs.OPTIMIZER),
    Rule("RUN101", "forward-fails", Needs.FORWARD_TEST),
    Rule("RUN102", "forward-non-finite", Needs.FORWARD_TEST),
    Rule("RUN103", "forward-in-training", Needs.FORWARD_TEST),
    Rule("RUN104", "forward-devices-differ", Needs.FORWARD_TEST),
    Rule("RUN105", "forward-odd-input", Needs.FORWARD_TEST),
    Rule("RUN106", "forward-incomparable", Needs.FORWARD_TEST),
)

OF_FILES = "FIL"  # the family of defects of the file and its container
OF_MISFITS = "FIT"  # the family of what the target has in another form, or not at all
FITTING = ("KEY", "BUF", OF_MISFITS)  # the families of rules that make the keys of a checkpoint those of a target
VALUES = ("VAL",)  # the rules about values

# Rules, or the beginnings of their codes, that give the keys of a checkpoint the names that a target has.
FOR_NAMES = ("KEY", "FIL102")
FOR_LOADING = (*FOR_NAMES, "BUF", "FIT105")  # the rules that make a checkpoint load without inventing a value


def named(name: str) -> Rule:
    """Return the rule with this name, for rooms that report it or look for its findings."""
    return next(rule for rule in RULES if rule.name == name)


RENAMED_LAYERS = named("renamed-layers")
