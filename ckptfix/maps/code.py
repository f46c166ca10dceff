"""Generates a Python function ``convert(state_dict)`` from a map; it only needs torch."""

import re
from collections.abc import Iterator, Sequence

from ckptfix.core.rename_map import AMBIGUOUS, RenameMap
from ckptfix.errors import UsageError
from ckptfix.maps.layout import Cut, Rearrange, Steps
from ckptfix.maps.patterns import Pattern, Variable
from ckptfix.maps.resolving import ParsedRule, parsed

_HEAD = '''\
"""Made by ckptfix map. Needs torch and nothing else."""

import re

import torch
'''

_REARRANGE = '''

def rearrange(tensor, pattern, **sizes):
    """Return the tensor with its axes in another order, as einops does: "(h d t) ... -> (h t d) ..."."""
    before, after = (re.findall(r"\\([^()]*\\)|[^\\s()]+", side) for side in pattern.split("->"))
    rest = tensor.shape[len(before) - 1 :] if "..." in before else ()
    names = []
    for group, size in zip(before, tensor.shape):
        group = [name for name in group.strip("()").split() if name not in ("1", "...")]
        unknown = [name for name in group if name not in sizes]
        for name in group:
            sizes[name] = int(name) if name.isdigit() else sizes.get(name, 0)
        for name in unknown:
            others = [sizes[other] for other in group if other != name]
            sizes[name] = size // torch.Size(others).numel()
        names += group
    order = [name for group in after for name in group.strip("()").split() if name in names]
    axes = [names.index(name) for name in order] + list(range(len(names), len(names) + len(rest)))
    tensor = tensor.reshape([sizes[name] for name in names] + list(rest)).permute(axes)
    shape = []
    for group in after:
        known = [sizes.get(name, 1) for name in group.strip("()").split()]
        shape += list(rest) if group == "..." else [torch.Size(known).numel()]
    return tensor.reshape(shape)
'''

_CONVERT = '''

def convert(state_dict):
    """Return the tensors under the names and in the layout of the other implementation. What no rule names stays."""
    left, result = dict(state_dict), {}

    def found(pattern):
        """Return what the groups of a pattern hold, once for each key."""
        matches = [re.fullmatch(pattern, key) for key in left]
        return list(dict.fromkeys(match.groups() for match in matches if match))
'''

_END = """
    assert not left.keys() & result.keys(), "a key would be overwritten"
    return {**left, **result}
"""


def python_code(rename_map: RenameMap) -> str:
    """Return the source of ``convert``. Raises ``UsageError`` if a rule depends on more than the keys of the file."""
    lines = [line for line in parsed(rename_map) if line.rule.label != AMBIGUOUS]
    body = [_HEAD]
    orders = [line.steps.rearrange for line in lines]
    if any(each and each.text != "a b -> b a" for each in orders) or any(line.steps.some for line in lines):
        body.append(_REARRANGE)
    body.append(_CONVERT)
    for line in sorted(lines, key=lambda line: line.width):  # a rule with fewer variables comes first
        body.append(f"\n    # {line.rule}\n")
        body += [f"    {text}\n" for text in _loop(line)]
    return "".join([*body, _END])


def _loop(line: ParsedRule) -> Iterator[str]:
    """Yield the lines of code for a rule: a loop over the keys that it matches."""
    source = {each.name: each for each in line.source.variables}
    loops = [each for each in source.values() if each not in (line.joined, line.stacked)]
    known = {*source, *(each.name for each in (line.parted, line.unstacked) if each)}
    if unknown := line.target.names - known:
        raise UsageError(f"{line.rule}: {{{min(unknown)}}} depends on the target; use the map in a repair instead")
    names = {each.name: each.name if each.is_number else f"v{at}" for at, each in enumerate(loops)}
    into = dict(names)
    indent = ""
    if loops:
        order = ", ".join(names[each.name] for each in loops) + "," * (len(loops) == 1)
        yield f"for {order} in found({_regex(line, names)}):"
        indent = "    "
    for each in loops:
        name = names[each.name]
        if each.is_number and (each.scale, each.offset) != (1, 0):
            yield f"{indent}{name}, rest = divmod(int({name}) - {each.offset}, {each.scale})"
            yield f"{indent}if rest or {name} < 0:"
            yield f"{indent}    continue"
        other = next((own for own in line.target.variables if own.name == each.name), each)
        if other.options != each.options:  # {weight,bias} → {gamma,beta}
            into[each.name] = f"{name}_new"
            yield f"{indent}{name}_new = {dict(zip(each.options, other.options, strict=True))!r}[{name}]"
    if line.rule.optional and not loops:
        yield f"if {_key(line.source, names)} in left:"
        indent = "    "
    if line.steps == Steps():
        yield f"{indent}result[{_key(line.target, into)}] = {_joined(line, names)}"
        return
    yield f"{indent}tensor = {_joined(line, names)}"
    yield from (indent + text for text in _parted(line, into))


def _joined(line: ParsedRule, names: dict[str, str]) -> str:
    """Return the expression that concatenates and stacks the source tensors."""
    own = {**names, **{each.name: name for each, name in ((line.stacked, "number"), (line.joined, "name")) if each}}
    text = f"left.pop({_key(line.source, own)})"
    if line.joined and line.steps.concat:
        text = _some(line, text)
        text = f"torch.cat([{text} for name in {line.joined.options!r}], {line.steps.concat.axis})"
    if line.stacked:
        if (line.stacked.scale, line.stacked.offset) != (1, 0):
            raise UsageError(f"{line.rule}: {{{line.stacked.name}}} cannot be computed in a function; number from 0")
        inner = _regex(line, names, line.stacked)
        text = f"torch.stack([{text} for number in sorted(int(number) for (number,) in found({inner}))])"
    return text


def _parted(line: ParsedRule, names: dict[str, str]) -> Iterator[str]:
    steps = line.steps
    if steps.rearrange:
        yield f"tensor = {_rearranged('tensor', steps.rearrange)}"
    if steps.swap:
        yield "tensor = torch.cat(tensor.chunk(2)[::-1])"
    own, indent = dict(names), ""
    if line.unstacked:
        own[line.unstacked.name] = "number"
        yield "for number, tensor in enumerate(tensor):"
        indent = "    "
    if line.parted and steps.split:
        own[line.parted.name] = "name"
        yield f"{indent}parts = {_split(steps.split, len(line.parted.options))}"
        yield f"{indent}for name, part in zip({line.parted.options!r}, parts, strict=True):"
        yield f"{indent}    result[{_key(line.target, own)}] = {_some(line, 'part')}"
    else:
        yield f"{indent}result[{_key(line.target, own)}] = tensor"


def _rearranged(tensor: str, axes: Rearrange) -> str:
    order, _, sizes = axes.text.partition(" with ")
    more = "".join(f", {size}" for size in sizes.split())
    return f"{tensor}.t()" if order == "a b -> b a" else f"rearrange({tensor}, {order!r}{more})"


def _some(line: ParsedRule, tensor: str) -> str:
    """Return the expression for a tensor that is rearranged for some texts only."""
    some = line.steps.some
    return f"{_rearranged(tensor, some.axes)} if name in {some.names!r} else {tensor}" if some else tensor


def _split(cut: Cut, count: int) -> str:
    shares = cut.shares or (1,) * count
    size = f"tensor.shape[{cut.axis}] // {sum(shares)}"
    if len(set(shares)) == 1:
        return f"tensor.split({size}, {cut.axis})"
    return f"tensor.split([{size} * share for share in {shares!r}], {cut.axis})"


def _regex(line: ParsedRule, names: dict[str, str], stacked: Variable | None = None) -> str:
    """Return the expression for a regex with groups for the variables, or only for the stacked one."""
    pieces: list[str] = []
    groups: dict[Variable, int] = {}
    for piece in line.source.pieces:
        if isinstance(piece, str):
            pieces.append(_literal(re.escape(piece)))
        elif piece == line.joined:
            pieces.append(_literal(re.escape(piece.options[0])))
        elif piece == stacked:
            pieces.append(r"(\d+)")
        elif piece == line.stacked:
            pieces.append(r"\d+")
        elif stacked:
            pieces.append(f"{{{_value(piece, names)}}}" if piece.is_number else f"{{re.escape({names[piece.name]})}}")
        elif piece in groups:
            pieces.append(f"\\{groups[piece]}")
        else:
            groups[piece] = len(groups) + 1
            pieces.append(_literal(r"(\d+)" if piece.is_number else piece.regex))
    return _text(pieces)


def _key(pattern: Pattern, names: dict[str, str]) -> str:
    return _text(
        [_literal(piece) if isinstance(piece, str) else f"{{{_value(piece, names)}}}" for piece in pattern.pieces]
    )


def _value(variable: Variable, names: dict[str, str]) -> str:
    name = names[variable.name]
    if (variable.scale, variable.offset) == (1, 0) or not variable.is_number:
        return name
    scale = f"{variable.scale} * " * (variable.scale != 1)
    return f"{scale}int({name}) + {variable.offset}"


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _text(pieces: Sequence[str]) -> str:
    text = "".join(pieces)
    return f"f{text!r}" if "{" in text else repr(text)
