"""The maps that ship with ckptfix, one file each; ``tests/maps/test_library.py`` proves them against the libraries.

A file is named for its two sides: ``timm-vit_transformers`` maps timm's names to those of transformers. Every map is
applied in reverse too. A file with HEAD in its name is a map for each size of attention heads, which HEAD stands for;
HALF is half of it."""

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from msgspec.structs import replace

from ckptfix.core.buffers import ROPE
from ckptfix.core.parts import Part, Shapes
from ckptfix.core.rename_map import MapRule, RenameMap, read_map
from ckptfix.core.wording import nearest
from ckptfix.errors import Opt, PlanError, UsageError
from ckptfix.maps.matches import Inference, Match
from ckptfix.maps.resolving import Move, ParsedRule, inverse, parsed, resolve
from ckptfix.maps.trees import Label

FOLDER = Path(__file__).parent

_ENDS = "{encoder,decoder}.{conv_in,conv_out}.{weight,bias}"
_QUANT = "{quant_conv,post_quant_conv}.{weight,bias}"
_PATCHES = "patch_embedding.{weight,bias}"
_PATCH_NORM = "patch_embed.norm.{weight,bias}"
_CONTEXT = "context_embedder.{weight,bias}"
_Z_IMAGE = (
    "{layers,noise_refiner,context_refiner}.{n}.{attention_norm1,attention_norm2,ffn_norm1,ffn_norm2}.weight",
    "{layers,noise_refiner,context_refiner}.{n}.feed_forward.{w1,w2,w3}.weight",
    "{layers,noise_refiner}.{n}.adaLN_modulation.0.{weight,bias}",
    "cap_embedder.{n}.{weight,bias}",
    "t_embedder.mlp.{n}.{weight,bias}",
    "{cap_pad_token,x_pad_token}",
)
# Prefixes of the source of a map in complete files of diffusion models.
_TEXT = ("cond_stage_model.model.", "conditioner.embedders.1.model.")
_SD3 = ("sd3-24_diffusers", "sd3-38_diffusers")
WITHIN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ldm-unet_diffusers", "sgm-unet_diffusers", "flux_diffusers", *_SD3), ("model.diffusion_model.",)),
    **dict.fromkeys(("wan_diffusers", "z-image_diffusers"), ("model.diffusion_model.",)),
    **dict.fromkeys(("open-clip-text_transformers", "open-clip-text_transformers-4"), _TEXT),
    "ldm-vae_diffusers": ("first_stage_model.",),
    "mmpretrain-swin_timm": ("backbone.",),
}
# Additional rules there for keys that keep their names.
_KEPT = {
    "ldm-vae_diffusers": (MapRule(_ENDS, _ENDS), MapRule(_QUANT, _QUANT, optional=True)),
    **dict.fromkeys(_SD3, (MapRule(_CONTEXT, _CONTEXT),)),
    "wan_diffusers": (MapRule(_PATCHES, _PATCHES),),
    "mmpretrain-swin_timm": (MapRule(_PATCH_NORM, _PATCH_NORM, optional=True),),
    "z-image_diffusers": tuple(MapRule(name, name, optional=True) for name in _Z_IMAGE),
}


HEAD, HALF = "HEAD", "HALF"
USUAL_HEADS = (128, 64)  # the sizes of attention heads to consider if nothing says the size
_SIZED = re.compile(r"(.+-)([1-9]\d{0,4})(_.+)")


def names(heads: Collection[int] = USUAL_HEADS) -> list[str]:
    """Return the names of the maps; those that depend on the size of attention heads are listed for these sizes."""
    return [
        name
        for stem in sorted(path.stem for path in FOLDER.glob("*.json"))
        for name in ([stem.replace(HEAD, str(size)) for size in heads] if HEAD in stem else [stem])
    ]


def is_shipped(name: str) -> bool:
    return HEAD not in name and _file_of(name)[0].is_file()


def head_of(name: str) -> int:
    """Return the size of attention heads that a shipped map is for, 0 if it is for every size."""
    return _file_of(name)[1]


def sized_maps(source: Shapes, target: Shapes) -> list[str]:
    """Return the names of the maps between these sides that need the size of attention heads, with N for it."""
    found = []
    for stem in sorted(path.stem for path in FOLDER.glob(f"*{HEAD}*.json")):
        forth, back, *_ = _directions(stem.replace(HEAD, str(USUAL_HEADS[0])))
        if any(_is_for(*one, source) and _is_for(*two, target) for one, two in ((forth, back), (back, forth))):
            found.append(stem.replace(HEAD, "N"))
    return found


def _file_of(name: str) -> tuple[Path, int]:
    """Return the file of a map, and the size of attention heads that the map is for, 0 if it is for every size."""
    if (sized := _SIZED.fullmatch(name)) and int(sized[2]) % 2 == 0:
        file = FOLDER / f"{sized[1]}{HEAD}{sized[3]}.json"
        if file.is_file():
            return file, int(sized[2])
    return FOLDER / f"{name}.json", 0


@lru_cache
def shipped(name: str) -> RenameMap:
    file, head = _file_of(name)
    return RenameMap.from_json(json.loads(file.read_text(encoding="utf-8").replace(HALF, str(head // 2))), name)


def named_map(path: str | os.PathLike[str]) -> RenameMap:
    """Return the map in a file, or the shipped map of this name. Raises ``UsageError`` if neither exists."""
    name = Path(path).name  # a configuration file turns the name into a path
    if not Path(path).exists():
        if is_shipped(name):
            return shipped(name)
        if close := nearest(name, names()):
            raise UsageError(Opt("rename_map", name), f": there is no such file; did you mean the map {close}?")
    return read_map(path)


@lru_cache
def _directions(name: str) -> tuple[tuple[RenameMap, tuple[ParsedRule, ...]], ...]:
    forth = shipped(name)
    rules = (*forth.rules, *_KEPT.get(name, ()))
    within = [
        replace(forth, rules=tuple(replace(rule, source=front + rule.source) for rule in rules))
        for front in WITHIN.get(name, ())
    ]
    return tuple((each, tuple(parsed(each))) for each in (forth, inverse(forth), *within))


@lru_cache
def _forms(name: str) -> tuple[tuple[RenameMap, tuple[ParsedRule, ...]], ...]:
    """Return the directions of a map, and those for a model without a head, whose keys lack the first segment."""
    forth = shipped(name)
    body = {rule.target.partition(".")[0] for rule in forth.rules if not rule.optional}
    front = f"{body.pop()}." if len(body) == 1 and len(forth.rules) > 1 else " "
    own = [rule for rule in forth.rules if rule.target.startswith(front)]
    bare = replace(forth, rules=tuple(replace(rule, target=rule.target.removeprefix(front)) for rule in own))
    return *_directions(name), *((each, tuple(parsed(each))) for each in (bare, inverse(bare)) if own)


def fitting(rename_map: RenameMap, source: Shapes, target: Shapes) -> RenameMap:
    """Return the form of a shipped map that fits a file and a target, any other map unchanged."""
    is_ours = is_shipped(rename_map.name) and rename_map == shipped(rename_map.name)
    for each, lines in _forms(rename_map.name) if is_ours else ():
        if _is_for(each, lines, source):
            with suppress(PlanError):
                resolve(each, source, target)
                return each
    return rename_map


def look_up(
    source: Shapes, target: Shapes, tied: Collection[str] = (), heads: Collection[int] = ()
) -> Inference | None:
    """Return the match by the shipped maps that fit both sides, None if none does; keys on which they differ are
    ambiguous.

    ``tied`` are keys of the target that need no source, because they are tied to a key with one. ``heads`` are the
    sizes of attention heads that the two sides give; only the maps that depend on them are then tried. Prefixes that
    most keys of the source have (``backbone.``, ``model.encoder.``) are skipped."""
    front, below = "", source
    while (known := _explaining(below, target, tied, heads)) is None:
        firsts = Counter(key.partition(".")[0] for key in below if "." in key)
        ((first, number),) = firsts.most_common(1) or [("", 0)]
        if 2 * number <= len(source):
            return None
        front += f"{first}."
        below = {key.removeprefix(front): shape for key, shape in source.items() if key.startswith(front)}
    if not front:
        return known
    matches = {
        key: replace(match, parts=tuple(replace(part, source=front + part.source) for part in match.parts))
        for key, match in known.matches.items()
    }
    return Inference(matches, dict(source), known.target)  # without the maps, which lack the prefix


def _explaining(source: Shapes, target: Shapes, tied: Collection[str], heads: Collection[int]) -> Inference | None:
    """Return the match by the shipped maps for a source without a prefix."""
    tried = [name for name in names(heads) if head_of(name)] if heads else names()
    found = list(_fitting(source, target, tied, tried))
    # Without the size of the heads, one map that fits proves nothing: heads of another size fit as well.
    is_sure = [len(heads) == 1 or not head_of(each.name) for each, _ in found]
    if any(is_sure):
        found = [each for each, sure in zip(found, is_sure, strict=True) if sure]
    elif len(found) < 2:
        return None
    return _inference_of(found, source, target)


def aliases(source: Shapes) -> Iterator[tuple[str, Move]]:
    """Yield the tensors of a file under the names and in the layout of another library, by each shipped map."""
    heads = [2 * source[ROPE][0]] if len(source.get(ROPE, ())) == 1 else USUAL_HEADS
    for name in names(heads):
        for rename_map, lines in _directions(name):
            if _is_for(rename_map, lines, source):
                with suppress(PlanError):  # it needs a target
                    yield from resolve(rename_map, source).items()


def _is_for(rename_map: RenameMap, lines: Iterable[ParsedRule], source: Shapes) -> bool:
    """Return whether a map applies to a file: every rule that is not optional matches a key."""
    if any(source.get(key, shape) != shape for key, shape in rename_map.shapes):
        return False
    return all(line.rule.optional or any(map(line.source.matches, source)) for line in lines)


def each_of(inference: Inference, tied: Collection[str]) -> Iterator[Inference]:
    """Yield the match by each of several shipped maps separately."""
    tried = [each.name for each in inference.maps] if len(inference.maps) > 1 else []
    for found in _fitting(inference.source, inference.target, tied, tried):
        yield _inference_of([found], inference.source, inference.target)


def _inference_of(found: Sequence[tuple[RenameMap, Mapping[str, Move]]], source: Shapes, target: Shapes) -> Inference:
    matches = {}
    for key, shape in target.items():
        moves = [moves[key] for _, moves in found if key in moves]
        if not moves and key in source:
            matches[key] = Match((Part.whole(key, shape),), Label.CERTAIN)
        elif moves:
            parts = moves[0].parts
            label = Label.LIKELY if any(move.rule.label for move in moves) else Label.CERTAIN
            if len(moves) < len(found) or any(move.parts != parts for move in moves):
                label = Label.AMBIGUOUS
            matches[key] = Match(parts, label)
    return Inference(matches, dict(source), dict(target), tuple(rename_map for rename_map, _ in found))


def _fitting(
    source: Shapes, target: Shapes, tied: Collection[str], tried: Iterable[str]
) -> Iterator[tuple[RenameMap, dict[str, Move]]]:
    """Yield those of the maps that fit both sides: they move a tensor to every key of the target, or it is there
    already. Meta's frequencies need no source, because they are computed."""
    kept = {key for key, shape in target.items() if source.get(key) == shape}
    target = {key: shape for key, shape in target.items() if key != ROPE}
    for name in tried:
        for rename_map, lines in _forms(name):
            if _is_for(rename_map, lines, source):
                try:
                    moves = resolve(rename_map, source, target)
                except PlanError:
                    continue
                used = {part.source for move in moves.values() for part in move.parts}
                shapes = {key: source[key] for key in kept - used} | {key: move.shape for key, move in moves.items()}
                if all(shapes.get(key, shape if key in tied else None) == shape for key, shape in target.items()):
                    yield rename_map, moves
                    break  # a map that is its own inverse fits twice
