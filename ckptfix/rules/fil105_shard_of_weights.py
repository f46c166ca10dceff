"""FIL105 shard-of-weights: the file is one part of a checkpoint of several files.

## What it finds
An error: a file written by a single rank. It has many weights of shape `(0,)` (the model states of DeepSpeed's ZeRO
stage 3, or `save_pretrained` under it), flattened parameters (`_flat_param`) of FSDP, one rank's parts of larger
tensors (ShardedTensor, DTensor), or it is one rank of a Megatron model by its arguments, of which `repair` writes
nothing. A file of plain tensors counts if it has a rank
name of vLLM, TensorRT-LLM or NeMo and other ranks are next to it. Tensors on the meta device, which have no values, are
an error too. A single empty tensor and the empty ranges of quantisation observers are not reported.

Notes: a single file named like one of several numbered shards (`model-00002-of-00005.safetensors`), whose tensors are
intact but few; and weights next to the ranks that wrote them, as saved by the transformers Trainer under DeepSpeed
(`checkpoint-100/model.safetensors`, `checkpoint-100/global_step100`); and model states of ZeRO 1 or 2 without optimizer
states, which have the fp32 masters.

For a folder of merged ranks, notes say that the weights are fp32 masters, which copies differ between ranks, what was
computed from several ranks (biases that GPT-NeoX sums, norms that differ), and what was left out. Warnings name:

- fp32 masters that, rounded to the training's dtype, differ from its weights;
- files of two ranks with the same values, and files named after another rank: `repair` then writes nothing and `load`
  raises, because the merged weights would be wrong. With `--salvage`, these ranks count as missing if it is certain
  which they are;
- ranks from another run, whose settings, norms or biases differ from those of most ranks;
- parameters of nanotron that only one layer lacks, although it has nothing that the others do not have.

## Why it matters
The other values are in the files of the other ranks, or in the optimizer states. Such a file fails to load because of
its shapes, or with `strict=False` silently leaves the model with its initial weights. One shard of five does the same
for the layers of the other four.

## Fix safety
Data that is not in the file cannot be restored from it. Put the files of all ranks into one folder:
`ckptfix repair FOLDER -o model.pth` reads it as one checkpoint.

## Example
`{'module': {'lm_head.weight': (0,), 'norm.weight': (0,)}, 'ds_version': …}`: `ckptfix repair global_step100 -o
model.pth` with the files of all ranks in `global_step100`.

## Sources
Field reports: PhysRAG#3 (ZeRO-3), dinov2#544 (`_flat_param`). https://www.deepspeed.ai/docs/,
https://huggingface.co/docs/transformers/big_models#sharded-checkpoint,
https://pytorch.org/docs/stable/fsdp.html, https://pytorch.org/docs/stable/distributed.checkpoint.html"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptfix.bytes.sources import is_torn
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.facts import Kind, clause
from ckptfix.core.finding import FILE, MODEL, Blocks, Finding, Level, Remedy, advise, counted
from ckptfix.core.objects import Opaque
from ckptfix.core.spec import TensorSpec
from ckptfix.reading.folders.rank_shards import FLAT, FSDP, named_part, rank_shard
from ckptfix.rules.rule import Context, Rule


def shard_of_weights(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report which part of a checkpoint the file is."""
    checkpoint = context.checkpoint
    shard = rank_shard(checkpoint.root, checkpoint.entries) or named_part(Path(checkpoint.member or checkpoint.path))
    if checkpoint.format == FSDP or checkpoint.remarked(Kind.FLATTENED):
        yield from _flattened(rule, context)
    elif shard is not None:
        parts = [checkpoint.entries.get(key) for key in shard.keys]
        ranks = _sharers(parts)
        are_hollow = any(not isinstance(part, TensorSpec) or not part.numel for part in parts) or shard.is_proven
        yield rule.finding(
            Level.ERROR,
            f"the file is part of a distributed checkpoint: it {shard.what}"
            f"{f', which {ranks} ranks share' if ranks else ''}",
            keys=shard.keys,
            evidence={"tensors": len(checkpoint.entries), "parts": len(shard.keys)},
            remedies=advise(shard.remedy),
            blocks=Blocks.FILLING | (Blocks.WRITING if are_hollow else Blocks.NOTHING),
        )
    if empty := tuple(key for key, spec in checkpoint.specs.items() if not spec.has_data):
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(empty), 'tensor')} saved from the meta device: a name and a shape without values",
            keys=empty,
            remedies=advise("save the model again after its weights are loaded"),
        )
    yield from _strange_masters(rule, context)
    yield from _merged(rule, checkpoint)
    path = Path(checkpoint.path)
    is_of_zero = path.name.endswith("_model_states.pt")
    is_of_ranks = checkpoint.format in ("zero", "pipeline")
    if is_of_zero or is_of_ranks or (path / "latest").is_file() or (path.parent / "latest").is_file():
        from ckptfix.reading.folders.ranks.zero import beside, lacks_masters  # imported late: few files need it

        if (is_of_zero or is_of_ranks) and lacks_masters(path, checkpoint.root):
            yield rule.finding(
                Level.NOTE,
                "the folder has no optimizer states of ZeRO (*_optim_states.pt): the weights are the"
                " copies in the training's dtype, and the masters and the optimizer are missing",
                remedies=advise(
                    "if they exist, put them into the folder; without them, training starts with a new optimizer"
                ),
            )
        if not is_of_ranks and (found := beside(path)) is not None:
            yield rule.finding(
                Level.NOTE,
                "the ranks of this training run are next to the weights; name their folder to get the masters and the "
                f"optimizer: {found}",
            )
    name = Path(checkpoint.member or checkpoint.path).name
    if "-of-" not in name:
        return
    from ckptfix.reading.folders.shard_index import Numbering

    numbering = Numbering.of(name)
    if numbering is not None and numbering.count > 1:
        yield rule.finding(
            Level.NOTE,
            f"by its name, the file is one of {numbering.count} shards: it holds only part of the weights; name the "
            "folder that holds all of them",
            evidence={"tensors": len(checkpoint.entries), "shards": numbering.count},
            remedies=advise(f"name the folder that holds all of {numbering}, or the index next to them"),
        )


def _sharers(parts: Sequence[Any]) -> int:
    """Return how many ranks share a tensor that is sharded; 0 if the file does not say."""
    from ckptfix.reading.folders.ranks.divided import divided
    from ckptfix.reading.folders.ranks.files import MALFORMED

    try:
        return max((divided(part).world for part in parts if isinstance(part, Opaque)), default=0)
    except MALFORMED:
        return 0


def _flattened(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report merged ranks without names or shapes, which only a target has (FIT106)."""
    checkpoint = context.checkpoint
    flat = tuple(key for key in checkpoint.specs if key.rpartition(".")[2] in FLAT)
    if context.target is None and (flat or checkpoint.remarked(Kind.FLATTENED)):
        lacking = "names and shapes" if flat else "shapes"
        by = "FSDP (LOCAL_STATE_DICT)" if checkpoint.format == FSDP else "ZeRO, and the model states are lost"
        yield rule.finding(
            Level.ERROR,
            f"the weights were flattened by {by}: their {lacking} are not in the files",
            keys=flat,
            remedies=(
                Remedy.of("takes them from the model", model=MODEL),
                Remedy.of("from a whole checkpoint of the same model", like=FILE),
            ),
            blocks=Blocks.FILLING,
        )


def _strange_masters(rule: Rule, context: Context) -> Iterator[Finding]:
    """Name the fp32 masters that do not round to the weights used in training."""
    specs, copies = context.checkpoint.specs, context.checkpoint.copies
    if not context.settings.values or not copies:
        return
    from ckptfix.values.casting import is_cast_of

    pairs = {key: (specs[key], copy) for key, copy in copies.items() if key in specs}
    whole = {key: pair for key, pair in pairs.items() if not any(map(is_torn, pair))}
    if odd := tuple(key for key, pair in whole.items() if not is_cast_of(*pair, context.checkpoint.path)):
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(odd), 'fp32 master')} of {len(whole)} differ from the weights that the training used by "
            "more than rounding: the files are from different saves, or something other than the optimizer changed "
            "the weights",
            keys=odd,
            evidence={"compared": len(whole), "differ": len(odd)},
            remedies=advise("compare the dates of the files; a resumed run continues from the masters"),
        )


# Why ranks that do not belong together give wrong weights.
_MIXED = {
    Kind.RANK_REPEATED: "each rank has its own part, so one file was copied over the other",
    Kind.RANK_RENAMED: "each rank has its own part, so files were renamed",
    Kind.RANK_FOREIGN: "all ranks of a save have the same, so it is from another run or step",
}


def _merged(rule: Rule, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Report the choices that were made when ranks were merged."""
    for fact in checkpoint.remarked(Kind.MASTERS):
        dtype = fact.data["dtype"]
        cast = Remedy.of("writes them as the training used them", dtype=dtype)
        yield rule.finding(Level.NOTE, clause(fact), evidence={"trained in": dtype}, remedies=(cast,))
    for fact in checkpoint.remarked(Kind.STATES_OF):
        yield rule.finding(Level.NOTE, f"{clause(fact)}, because those of the first rank are lost")
    for fact in checkpoint.remarked(Kind.EXPERTS_LACKING, Kind.EXPERTS_DAMAGED):
        yield rule.finding(
            Level.NOTE,
            f"the folder {clause(fact)}; the weights here are the masters, but DeepSpeed does not resume without them",
        )
    for kind, cause in _MIXED.items():
        if odd := [f"{fact.place} {clause(fact)}" for fact in checkpoint.remarked(kind)]:
            yield rule.finding(
                Level.WARNING,
                f"{'; '.join(odd)}: {cause}, and the merged weights are wrong",
                evidence={kind.value.removeprefix("rank-"): len(odd)},
                remedies=advise("fetch the files of these ranks again"),
                # Settings may differ for another reason, unlike the files of one rank.
                blocks=Blocks.NOTHING if kind is Kind.RANK_FOREIGN else Blocks.WRITING | Blocks.USING,
            )
    if lacking := checkpoint.remarked(Kind.LAYER_LACKING):
        yield rule.finding(
            Level.WARNING,
            f"{lacking[0].place} {clause(lacking[0])}: its files are probably missing",
            keys=tuple(fact.place for fact in lacking),
            remedies=advise("fetch the folders of these parameters, or name the model to compare with"),
        )
    for fact in checkpoint.remarked(Kind.LAYER_SKIPPED):
        yield rule.finding(
            Level.NOTE,
            f"{clause(fact)}: it is missing, unless this layer has no parameters",
            remedies=advise("compare the files with those of the run, or name the model to compare with"),
        )
    if moved := checkpoint.remarked(Kind.COPY_RENAMED):
        yield rule.finding(
            Level.WARNING,
            f"{'; '.join(f'{fact.place} {clause(fact)}' for fact in moved)}: files were renamed; the weights here are"
            " the masters, but a resumed run loads these files",
            evidence={"renamed": len(moved)},
            remedies=advise("fetch the files of these layers again before you resume"),
        )
    differing = checkpoint.remarked(Kind.RANK_COPIES)
    for drift in sorted({bool(fact.data["drift"]) for fact in differing}):
        copies = tuple(fact.place for fact in differing if fact.data["drift"] is drift)
        equal = "which training keeps equal: a rank is from another run, and the weights are wrong"
        yield rule.finding(
            Level.NOTE if drift else Level.WARNING,
            f"the ranks hold different copies of {counted(len(copies), 'tensor')}"
            f"{'; those of the first rank were used' if drift else f', {equal}'}",
            keys=copies,
            remedies=() if drift else advise("put the files of one run together"),
        )
    computed = checkpoint.remarked(Kind.RANKS_COMPUTED)
    for rule_of in sorted({fact.data["rule"] for fact in computed}):
        keys = tuple(fact.place for fact in computed if fact.data["rule"] == rule_of)
        yield rule.finding(
            Level.NOTE,
            f"{counted(len(keys), 'tensor')} computed as the {rule_of} over {computed[0].data['ranks']} ranks, as in "
            "GPT-NeoX; all others were copied bit for bit",
            keys=keys,
        )
    if left_out := checkpoint.remarked(Kind.RANK_LEFT_OUT):
        explained = [f"{fact.place} ({fact.data['why']})" for fact in left_out if fact.data.get("why")]
        others = [fact.place for fact in left_out if not fact.data.get("why")]
        clauses = [f"left out: {', '.join(explained)}"] if explained else []
        if others:
            clauses.append(f"data that belongs to single ranks cannot be merged and is left out: {', '.join(others)}")
        yield rule.finding(
            Level.NOTE,
            "; ".join(clauses),
            evidence={"left out": [fact.place for fact in left_out]},
        )
