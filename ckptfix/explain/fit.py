"""Infers from the keys in a message why a file does not fit its model; ``shapes`` does so for mismatched keys.

The rules themselves examine the keys: missing ones as the target, unexpected ones as the checkpoint. A message gives no
shapes for them, so the findings rest on names, and only the file and the model can confirm them."""

import re
from collections.abc import Collection, Iterator, Mapping

from ckptfix.core.buffers import NUM_BATCHES_TRACKED, has_statistics, is_buffer_name, is_transient, split_key
from ckptfix.core.checkpoint import IN_MEMORY, Checkpoint
from ckptfix.core.edits import Rename
from ckptfix.core.finding import Finding, counted
from ckptfix.core.settings import Settings
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import BUFFER, PARAMETER, Slot, Target
from ckptfix.core.wording import KEEP_STATISTICS
from ckptfix.core.wrappers import MODULE, WRAPPER_SEGMENTS, WRAPPERS
from ckptfix.engine.diagnosis import diagnose
from ckptfix.explain.advice import MERGE, Advice, Cause, Requirement
from ckptfix.explain.mismatch import Mismatch, read_mismatch
from ckptfix.explain.shapes import advice_on_shapes, shape_causes
from ckptfix.explain.text import Message
from ckptfix.rules import FITTING, FOR_LOADING
from ckptfix.rules.quantised_layers import keys_of_codes

# Keys under which trainers keep the weights, beside epoch and optimizer.
_CONTAINERS = tuple("state_dict model_state_dict model net network weights module ema params teacher".split())
# Next to one of those, these identify a trainer's file if the message names no missing key (`strict=False`).
_TRAINING = frozenset({"epoch", "global_step", "iteration", "optimizer", "optimizer_states", "optimizer_state_dict"})

_FILLER = ("ckptfix_filler_0.a", "ckptfix_filler_1.b")  # stand for the keys that fit, which a message does not list


def read_fit(message: Message) -> tuple[tuple[Cause, ...], tuple[Advice, ...]]:
    """Return the causes that the keys and shapes in a message show, and the advice that follows from them."""
    mismatch = read_mismatch(message)
    if name := _container_key(mismatch):
        said = f"load_state_dict got the whole container; the weights are in it under {name!r}."
        code = f'model.load_state_dict(checkpoint["{name}"])'
        take = Advice("takes the weights out of the container", code=code, needs=Requirement.WHOLE)
        return ((said, ()),), (
            take,
            Advice("shows what the container holds, and where its weights are", "ckptfix inspect {FILE}"),
        )
    if cut := _characters_cut(mismatch):
        said = (
            f"All {len(mismatch.unexpected)} unexpected keys are the model's without their first {cut} characters: the"
            " program cuts them off, as `key[7:]` does for `module.`, but the names in the file do not begin with it."
        )
        code = 'state_dict = {key.removeprefix("module."): value for key, value in state_dict.items()}'
        check = Advice("says whether the file fits your model as it is", "ckptfix check {FILE} --model {MODEL}")
        return ((said, ()),), (
            Advice("removes the prefix only if there is one", code=code, needs=Requirement.WHOLE),
            check,
        )
    if {*mismatch.unexpected} == {"state", "param_groups"}:
        said = "load_state_dict of the model got the state of an optimizer, which has its own load_state_dict."
        return ((said, ()),), (
            Advice("shows what the file holds, and where its weights are", "ckptfix inspect {FILE}"),
        )
    if adapter := _adapter(mismatch):
        return adapter
    findings = _diagnose(mismatch)
    causes = [*_named_causes(findings, mismatch), *shape_causes(mismatch), *_left_causes(findings, mismatch)]
    if mismatch.is_cut:
        causes.append(
            ("The list of keys is cut short in this text; the complete list would give a more certain answer.", ())
        )
    if running := mismatch.running_statistics:
        said = f"{counted(len(running), 'running statistic')} of an InstanceNorm: torch before 0.4.0 saved them, and"
        causes.append((f"{said} the layer does not use them now.", running))
    return tuple(causes), tuple(_advice(findings, mismatch))


_OF_ADAPTER = re.compile(r"(?:^|[._])lora_|\.lora\.|(?:^|[._])(?:hada|lokr)_|\.base_layer\.")


def _adapter(mismatch: Mismatch) -> tuple[tuple[Cause, ...], tuple[Advice, ...]] | None:
    """Return cause and advice if an adapter is on one side only: in the file, or in the model. Else None."""
    stored, wanted = (list(filter(_OF_ADAPTER.search, keys)) for keys in (mismatch.unexpected, mismatch.missing))
    lacks_base = len(wanted) < len(mismatch.missing) or any(".base_layer." in key for key in wanted)
    if mismatch.shapes or (stored and wanted and not lacks_base):
        return None
    has_base = any(".base_layer." in key for key in stored)
    if stored and not has_base and len(stored) == len(mismatch.unexpected):
        said = f"The file holds an adapter ({counted(len(stored), 'key')}), and not the weights that it changes."
        return ((said, tuple(stored)),), (
            Advice("merges it into its base", "ckptfix repair BASE --adapter {FILE} -o merged.safetensors"),
            Advice(
                "loads it into the base model as it is", code="model = PeftModel.from_pretrained(base_model, folder)"
            ),
            Advice("strict=False does not help: it loads nothing of the base, and leaves the model random."),
        )
    if has_base and not wanted:
        said = (
            "The file is a model that was saved with its adapter inside (base_layer, lora_…), which was never merged."
        )
        return ((said, tuple(stored)),), (
            Advice(
                "merges it: name the configuration of the adapter",
                "ckptfix repair {FILE} --adapter adapter_config.json",
            ),
            Advice(
                "saves it merged, where the model of peft is at hand",
                code="model.merge_and_unload().save_pretrained(folder)",
            ),
        )
    if wanted and not stored:
        said = (
            "The model has adapter layers (peft adds lora_… and renames weights to base_layer), and the file has none."
        )
        return ((said, tuple(wanted)),), (
            Advice(
                "loads the weights before the adapter is added",
                code="model.load_state_dict(state_dict); model = get_peft_model(model, config)",
                needs=Requirement.WHOLE,
            ),
            Advice("compares the file with your model without its adapter", "ckptfix check {FILE} --model {MODEL}"),
        )
    return None


def _container_key(mismatch: Mismatch) -> str | None:
    """Return the key of the weights if the unexpected keys are those of a training checkpoint, else None."""
    keys, missing = set(mismatch.unexpected), set(mismatch.missing)
    if any("." in key for key in keys) or keys & missing or not (missing or keys & _TRAINING):
        return None
    return next((name for name in _CONTAINERS if name in keys), None)


def _characters_cut(mismatch: Mismatch) -> int:
    """Return how many leading characters of the missing keys the unexpected ones lack, if that cuts within a name; 0 if
    the keys differ otherwise."""
    counters = (split_key(key)[0] + NUM_BATCHES_TRACKED for key in mismatch.missing if key.endswith("running_mean"))
    names = (*mismatch.missing, *counters)
    unexpected = set(mismatch.unexpected)
    longest = max(unexpected, key=len, default="")
    for cut in {len(key) - len(longest) for key in names if key.endswith(longest)} if len(unexpected) > 1 else ():
        is_within_name = any(key[cut - 1] != "." for key in names if len(key) > cut)
        begun = {key[cut:] for key in mismatch.missing}
        if cut and is_within_name and begun <= unexpected <= {key[cut:] for key in names}:
            return cut
    return 0


def _diagnose(mismatch: Mismatch) -> Mapping[str, Finding]:
    """Return the findings of the rules on names and fit, by the name of the rule."""
    wanted = {
        key: Slot("float32", (), BUFFER) if is_buffer_name(key, ()) else Slot("float32", None, PARAMETER)
        for key in mismatch.missing
    }
    stored = {key: TensorSpec("int64" if _is_counter(key) else "float32", ()) for key in mismatch.unexpected}
    # A BatchNorm whose counter is listed has its statistics on both sides, or they would be listed too.
    for key in filter(_is_counter, (*mismatch.missing, *mismatch.unexpected)):
        for leaf in ("running_mean", "running_var"):
            name = split_key(key)[0] + leaf
            if name not in wanted and name not in stored:
                wanted[name], stored[name] = Slot("float32", (1,), BUFFER), TensorSpec("float32", (1,), (1,))
    # Without _metadata, torch supplies the counters of a BatchNorm, and does not report them as missing.
    counters = {key for key in mismatch.unexpected if _is_counter(key)}
    for head, leaf in map(split_key, mismatch.missing):
        if leaf == "running_mean" and any(f".{key}".endswith(f".{head}{NUM_BATCHES_TRACKED}") for key in counters):
            wanted.setdefault(head + NUM_BATCHES_TRACKED, Slot("int64", (), BUFFER))
    # Before 0.4 torch stopped at the first unexpected key. If that is a counter, the keys before it did fit.
    knows_target = mismatch.knows_missing or all(map(_is_counter, mismatch.unexpected))
    if knows_target and 1 in (len(mismatch.missing), len(mismatch.unexpected)):
        # The rules would judge a file of one key by that key, but here it is one of many.
        wanted.update({key: Slot("float32", (), PARAMETER) for key in _FILLER})
        stored.update({key: TensorSpec("float32", ()) for key in _FILLER})
    checkpoint = Checkpoint("the file", IN_MEMORY, stored)
    target = Target(mismatch.model or "the model", wanted) if knows_target else None
    settings = Settings(values=False, select=FITTING, unsafe_fixes=True)
    return {finding.name: finding for finding in diagnose(checkpoint, target, settings).findings}


def _is_counter(key: str) -> bool:
    return split_key(key)[1] == NUM_BATCHES_TRACKED


# What a finding on names means here, after the rule's own message; in the order in which causes are told.
_MEANINGS = {
    "wrapper-segment": ": the file was saved from a wrapped model ({wrappers})",
    "wrapper-prefix": ": the file was saved from a model inside DataParallel or DistributedDataParallel",
    "missing-wrapper-prefix": ": the model is wrapped ({wrappers}), and the file is not, or is wrapped differently",
    "foreign-prefix": "",
    "renamed-by-release": "",
    "missing-num-batches-tracked": ", or with a state_dict that was copied key by key",
    "unexpected-num-batches-tracked": ", because this torch is older than 0.4.1, or the BatchNorms are frozen ones",
    "transient-buffer": ". The release that saved the file kept them; nothing in them was learned",
}
_LISTED = ("renamed-by-release", "transient-buffer")


def _named_causes(findings: Mapping[str, Finding], mismatch: Mismatch) -> Iterator[Cause]:
    """Yield the causes that the rules on names recognise."""
    parts = {part for key in (*mismatch.missing, *mismatch.unexpected) for part in key.split(".")}
    known = sorted(parts & {MODULE, *WRAPPER_SEGMENTS})
    wrappers = ", ".join(f"`{part}` of {WRAPPERS.get(part, 'a wrapper')}" for part in known)
    for name, meaning in _MEANINGS.items():
        if finding := findings.get(name):
            words = f"{finding.message}{meaning.format(wrappers=wrappers)}."
            yield words[:1].upper() + words[1:], finding.keys if name in _LISTED else ()
    if mismatch.model and not mismatch.missing and not mismatch.knows_missing and "wrapper-prefix" in findings:
        yield (
            "If the whole message lists no missing key, the model has this prefix too, and these keys are left over.",
            (),
        )
    if computed := tuple(key for key in _left(findings, "missing-key") if is_transient(key, ())):
        yield (
            f"{counted(len(computed), 'buffer')} missing, which the model computes: this release keeps them,"
            " the one that saved the file did not. Nothing learned is lost.",
            computed,
        )


_OF_FSDP = re.compile("_flat_param|flat_param_")


def _left_causes(findings: Mapping[str, Finding], mismatch: Mismatch) -> Iterator[Cause]:
    """Yield what no rule on names explains."""
    unexpected = _left(findings, "unexpected-key") if mismatch.knows_missing or findings else mismatch.unexpected
    missing = tuple(key for key in _left(findings, "missing-key") if not is_transient(key, ()))
    if flat := tuple(filter(_OF_FSDP.search, (*unexpected, *mismatch.shapes))):
        yield (
            f"{counted(len(flat), 'key')} of a flat parameter of FSDP: one rank's part of the weights. No renaming"
            " makes it the model's.",
            flat,
        )
        return
    if codes := keys_of_codes(unexpected):
        yield (
            f"{counted(len(codes), 'key')} of quantised weights: the file has codes instead of weights, which have"
            " to be multiplied by their scales.",
            codes,
        )
        others = {*unexpected} - {*codes}
        unexpected = tuple(key for key in unexpected if key in others)
    elif parts := _of_other_layout(missing, unexpected):
        yield (
            f"The layout differs: `{parts[0]}` in the model and `{parts[1]}` in the file. One side fuses these layers"
            " or stacks the experts, as another library or release does (transformers 5 and 4).",
            (),
        )
    elif _is_new_head(missing, unexpected):
        yield (
            "Only the head differs: it is new in the model, and the file has what its pre-training used instead (a"
            " decoder, another head or norm). That is right before fine-tuning; until then the outputs are random.",
            (),
        )
    elif missing and {_LAYERS.sub(".#", key) for key in missing} == {_LAYERS.sub(".#", key) for key in unexpected}:
        yield (
            "The names differ only in the numbers of the layers: one side groups them (block_chunks of DINOv2, stages"
            " of a pipeline) or counts them differently.",
            (),
        )
    elif missing and unexpected and len(missing) > 3 and len(unexpected) > 3:
        yield (
            "The other names do not match: the file is for another model or another implementation of it, or the"
            " wrong one of several state_dicts was used.",
            (),
        )
    for part, reason in _PARTS_LEFT_OUT.items():
        if some := tuple(filter(part.search, (*missing, *unexpected))):
            yield f"{counted(len(some), 'key')} {reason}.", some
            missing, unexpected = (tuple(key for key in keys if not part.search(key)) for keys in (missing, unexpected))
    if missing:
        yield f"{counted(len(missing), 'key')} that the file does not have:", missing
    if unexpected:
        yield f"{counted(len(unexpected), 'key')} that the model has no place for:", unexpected


# Parts of a model that inference does without.
_PARTS_LEFT_OUT = {
    re.compile(r"(?:^|\.)(?:enc_q|label_enc)\."): (
        "of a part that only training uses, so that exports leave it out: the posterior encoder of VITS (RVC,"
        " so-vits-svc, GPT-SoVITS), or the noised labels of DINO detectors"
    ),
    re.compile(r"\b_extra_state$"): (
        "of what modules keep beside their weights, such as the scales for fp8 of TransformerEngine: nothing is lost"
        " unless the model runs in fp8"
    ),
}

_LAYERS = re.compile(r"(?:\.\d+)+(?=\.|$)")  # the numbers of layers in a name

_FUSED = re.compile(
    r"\bexperts\.(?:gate_up_proj|down_proj|w(?:eight)?\d+)(?:_weight|_bias)?$"
    r"|\b(?:\w*qkv\w*|gate_up_proj|in_proj|c_attn|query_key_value|Wqkv)(?:[._](?:weight|bias))?$"
)
_PARTS = re.compile(
    r"\b(?:local_)?experts\.\d+\.|\b(?:[qkv]_?(?:proj|lin)|query|key|value|to_[qkv]|gate_proj|up_proj)(?=\.|$)"
)


def _of_other_layout(missing: Collection[str], unexpected: Collection[str]) -> tuple[str, str] | None:
    """Return a key of the model and one of the file if one is a fusion or a stack of what the other is a part of."""
    for fused, parts in ((missing, unexpected), (unexpected, missing)):
        whole = next(filter(_FUSED.search, fused), None)
        part = next(filter(_PARTS.search, parts), None)
        if whole and part:
            return (whole, part) if fused is missing else (part, whole)
    return None


_BEFORE = r"^(?:module\.|model\.|backbone\.|encoder\.)*"
_HEADS = re.compile(rf"{_BEFORE}(?:head\w*|fc_norm|fc|classifier|score|last_linear)\.")
_OF_PRETRAINING = re.compile(
    rf"{_BEFORE}(?:(?:mask_token|decoder\w*|norm|pooler|cls|lm_head|head\w*|fc_norm|fc|classifier|projector|predictor|"
    r"prototypes|projection_head)(?:\.|$))"
)


def _is_new_head(missing: Collection[str], unexpected: Collection[str]) -> bool:
    """Return whether the model only lacks a head, and the file only has what a pre-training adds to a backbone."""
    return (
        bool(missing and unexpected) and all(map(_HEADS.match, missing)) and all(map(_OF_PRETRAINING.match, unexpected))
    )


def _left(findings: Mapping[str, Finding], name: str) -> tuple[str, ...]:
    return findings[name].keys if name in findings else ()


_SURPLUS_COUNTERS = "unexpected-num-batches-tracked"


def _advice(findings: Mapping[str, Finding], mismatch: Mismatch) -> Iterator[Advice]:
    named = {name for name, finding in findings.items() if finding.code.startswith(FOR_LOADING)}
    if any(map(_OF_FSDP.search, (*mismatch.unexpected, *mismatch.shapes))) or any(
        0 in stored for stored, _ in mismatch.shapes.values()
    ):
        together = "puts the ranks together, with the files of all of them in one folder"
        with_shapes = "ckptfix repair {FOLDER} --model {MODEL} -o model.pth"
        if any(map(_OF_FSDP.search, (*mismatch.unexpected, *mismatch.shapes))):
            yield Advice(together, with_shapes, needs=Requirement.RANKS)
        else:
            yield Advice(together, MERGE)
            yield Advice("does the same for FSDP's files without whole shapes", with_shapes, needs=Requirement.RANKS)
        yield Advice(
            "The training itself can save whole weights: FULL_STATE_DICT of FSDP,"
            " stage3_gather_16bit_weights_on_model_save of ZeRO-3."
        )
        return
    yield from _commands_for_names(findings, mismatch, named)
    yield from advice_on_shapes(mismatch)
    if named == {_SURPLUS_COUNTERS}:
        yield Advice(
            "leaves the counters out",
            code='state_dict = {k: v for k, v in state_dict.items() if not k.endswith("num_batches_tracked")}',
            needs=Requirement.WHOLE,
        )
    yield from _advice_on_strict(findings, mismatch, named)
    yield from _code_for_wrappers(findings, mismatch)


def _commands_for_names(findings: Mapping[str, Finding], mismatch: Mismatch, named: set[str]) -> Iterator[Advice]:
    missing, unexpected = _left(findings, "missing-key"), _left(findings, "unexpected-key")
    is_prefix_only = named and named <= {"wrapper-segment", "wrapper-prefix"}
    if is_prefix_only and not (missing or unexpected or mismatch.shapes):
        yield Advice("writes a copy with the model's names, in _metadata too", "ckptfix repair {FILE}")
        return
    yield Advice(
        "compares names and shapes with your model, shows what can be repaired, and the command for it",
        "ckptfix check {FILE} --model {MODEL}",
    )
    if len(missing) == len(unexpected) > 3 or _of_other_layout(missing, unexpected):
        yield Advice(
            "shows which layer is which, if another library or release wrote the file",
            "ckptfix map {FILE} {MODEL}",
        )
    if named == {_SURPLUS_COUNTERS}:
        yield Advice(
            "writes a file for a torch that does not know the counters", "ckptfix repair {FILE} --for-torch 0.4.0"
        )
    elif named:
        yield Advice(
            "repairs the names and buffers, and runs the model on the result", "ckptfix repair {FILE} --model {MODEL}"
        )


def _advice_on_strict(findings: Mapping[str, Finding], mismatch: Mismatch, named: set[str]) -> Iterator[Advice]:
    """Yield what ``strict=False`` would do, which is what most users try."""
    missing = _left(findings, "missing-key")
    computed = [key for key in missing if is_transient(key, ()) or any(part.search(key) for part in _PARTS_LEFT_OUT)]
    if _is_new_head(mismatch.missing, mismatch.unexpected) and not mismatch.shapes:
        yield Advice("strict=False loads everything but the head, which has to be trained before the model is used.")
    elif mismatch.shapes and not len(missing) > len(computed):
        yield Advice("strict=False does not help: it ignores missing and unexpected keys, and still raises for shapes.")
    elif len(missing) > len(computed) or (mismatch.missing and not missing and not named):
        yield Advice(
            "strict=False does not help: parameters that do not match keep random values, as in an untrained model."
        )
    elif keys_of_codes(mismatch.unexpected):
        yield Advice("strict=False does not help: it loads the codes as if they were the weights.")
    elif has_statistics(mismatch.unexpected):
        yield Advice(f"strict=False drops keys that are needed: {KEEP_STATISTICS}.")
    elif computed and not _left(findings, "unexpected-key"):
        yield Advice("strict=False loads everything that the file has, and keeps the model's own values of these keys.")
    elif mismatch.knows_missing and mismatch.unexpected and not mismatch.missing:
        yield Advice(
            "Every key of the model is in the file, so strict=False loads all of it and ignores the rest. Look at the"
            " list first: layers that your model should have mean the wrong model."
        )


def _code_for_wrappers(findings: Mapping[str, Finding], mismatch: Mismatch) -> Iterator[Advice]:
    if finding := findings.get("wrapper-prefix"):
        renames = [edit for edit in (finding.fix.edits if finding.fix else ()) if isinstance(edit, Rename)]
        prefixes = [edit.key.removesuffix(edit.to) for edit in renames if edit.key.endswith(edit.to)]
        prefix = next(iter(prefixes), f"{MODULE}.")
        yield Advice(
            "removes the prefix before load_state_dict",
            code=f'torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, "{prefix}")',
            needs=Requirement.WHOLE,
        )
    elif any("_orig_mod" in key for key in _left(findings, "wrapper-segment")):
        yield Advice(
            "saves a compiled model without the wrapper", code="torch.save(model._orig_mod.state_dict(), path)"
        )
    elif any("_fsdp_wrapped_module" in key or _OF_FSDP.search(key) for key in mismatch.missing):
        yield Advice(
            "loads the whole weights into a model inside FSDP; or load them before it is wrapped",
            code="with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT): model.load_state_dict(state_dict)",
            needs=Requirement.WHOLE,
        )
    elif "missing-wrapper-prefix" in findings:
        inner = "_orig_mod" if any(key.startswith("_orig_mod.") for key in mismatch.missing) else MODULE
        code = f"model.{inner}.load_state_dict(state_dict)"
        yield Advice("loads into the model inside the wrapper", code=code, needs=Requirement.WHOLE)
