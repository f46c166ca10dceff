"""Proves a map of names by running the source model and the target with the same random weights on the same input.

Both models are copies in float64 and eval mode. Weights and running statistics are random, so that no two layers are
alike. The source model gets them under the names of the file, the target through the edits of the map. The map is right
if the outputs are equal and, as ``observability`` checks, another map would change them."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import Assemble, Edit
from ckptfix.core.lazy import nn, torch
from ckptfix.core.parts import full
from ckptfix.core.plan import Plan, Step
from ckptfix.core.settings import Settings
from ckptfix.core.smoke_result import Equivalence
from ckptfix.core.spec import TypedShape
from ckptfix.core.target import target_from_module
from ckptfix.engine.applying import apply_plan
from ckptfix.errors import CkptfixError, Opt, TargetError
from ckptfix.modules.factory import ModelArguments, build_module, target_of
from ckptfix.reading.opening import open_state_dict
from ckptfix.rules import FOR_LOADING
from ckptfix.rules.origins import trace
from ckptfix.rules.rule import SourceModel
from ckptfix.smoke.derive import derive_inputs, is_transformers_model
from ckptfix.smoke.forward import load_strictly
from ckptfix.smoke.inputs import Arguments, Input, RandomInput, make_arguments, parse_inputs
from ckptfix.smoke.launch import death, launch
from ckptfix.smoke.observability import Unit, random_values, unobservable
from ckptfix.smoke.outcome import NotLoadedError, tensors_in

# The difference that equal models may have, relative to the largest output: in float64, rounding makes about 1e-13, and
# the smallest difference ever seen from an exchanged layer is 1e-6.
TOLERANCE = 1e-9

# The relative difference if one of the models computes in float32, whatever its input.
_FLOAT32 = 1e-6
_LARGE_INPUT = 30.0  # factor of inputs to reveal what only large values show, such as a ReLU6

# Factors of a batch of three, to reveal what only negative values, small ones, or a third sample show.
_ROWS = (1.0, -1.0, 1e-3)
_INPUTS = 3  # inputs that are tried, of those that both models accept
_EPSILON = 1e-6
_STATISTICS = ("running_mean", "running_var")
_EPSILONS = ("eps", "epsilon", "variance_epsilon", "layer_norm_eps", "layer_norm_epsilon")

TypedShapes = Mapping[str, TypedShape]
Outputs = Sequence[tuple[str, "torch.Tensor"]]
# Outputs to compare: their indices, then the side to take a slice of (0, 1, or -1 for none), the axis and the index.
Alignment = tuple[tuple[int, int, int, int, int], ...]


def twin_of(source: Any, model: Any, arguments: ModelArguments, settings: Settings) -> SourceModel:
    """Return the source model with the function that proves a map to the target: in a process of its own, or on copies
    if a model is given as an object. Raises ``TargetError`` if the model cannot be built, ``UsageError`` for invalid
    inputs."""
    parse_inputs(settings.input)
    try:
        twin = target_of(source, None, (), settings.seed)
    except TargetError as error:
        words = (Opt("source_model", word.value) if word == Opt("model", source) else word for word in error.args)
        raise TargetError(*words, traceback_text=error.traceback_text) from error
    known: dict[object, Equivalence] = {}

    def prove(checkpoint: Checkpoint, maps: Sequence[Plan]) -> Equivalence:
        asked = (tuple(checkpoint.specs), tuple(maps))
        if asked not in known:  # the engine asks twice
            known[asked] = run(checkpoint, maps)
        return known[asked]

    def run(checkpoint: Checkpoint, maps: Sequence[Plan]) -> Equivalence:
        shapes = {
            key: ("float64" if DTYPES[spec.dtype].is_float else spec.dtype, spec.shape)
            for key, spec in checkpoint.specs.items()
        }
        plans = [Plan(tuple(Step(step.rule, _in_float64(step.edits)) for step in each.steps)) for each in maps]
        job = {
            "twins": [[source, ()], [model, arguments]],
            "shapes": shapes,
            "plans": [plan.to_json() for plan in plans],
            "inputs": settings.input,
            "seed": settings.seed,
            "seconds": 0.7 * settings.timeout,
        }
        if not (isinstance(source, str) and isinstance(model, str)):
            return compare_twins(job)
        ending = launch(job, settings.timeout, kind=Equivalence)
        if not ending.answered:
            return Equivalence(doubt=death(ending, settings.timeout).error)
        proof: Equivalence = ending.outcome
        return proof

    shapes = {key: slot.shape for key, slot in twin.slots.items() if slot.shape is not None}
    return SourceModel(shapes, prove, twin.converts, twin.ties)


def _in_float64(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    return tuple(
        replace(edit, dtype="float64") if isinstance(edit, Assemble) and DTYPES[edit.dtype].is_float else edit
        for edit in edits
    )


def compare_twins(job: Mapping[str, Any]) -> Equivalence:
    """Run a job of ``twin_of``. An error of the models' own code is a ``doubt`` in the result."""
    until = time.monotonic() + job["seconds"]
    before = torch.get_default_dtype()
    try:
        models = [
            build_module(model, arguments, job["seed"]) if isinstance(model, str) else copy.deepcopy(model)
            for model, arguments in job["twins"]
        ]
        torch.set_default_dtype(torch.float64)
        plans = [Plan.from_json(plan) for plan in job["plans"]]
        shapes = {key: (dtype, tuple(shape)) for key, (dtype, shape) in job["shapes"].items()}
        pair = _ModelPair(models[0].double().eval(), models[1].double().eval(), shapes, plans, job["seed"])
        with torch.no_grad():
            return pair.examine(plans, parse_inputs(job["inputs"]), until)
    except NotLoadedError as error:
        among = f", {error.keys[0]} among them" if error.keys else ""
        return Equivalence(doubt=f"the file does not fit the source model: {error}{among}")
    except CkptfixError as doubt:
        return Equivalence(doubt=str(doubt))
    except (Exception, SystemExit) as error:  # noqa: BLE001  the models' code may raise anything
        return Equivalence(doubt=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    finally:
        torch.set_default_dtype(before)


class _DoubtError(CkptfixError):
    """Why the two models cannot be compared."""


class _ModelPair:
    """Both models in float64, and random values under the names of the file."""

    def __init__(
        self, source: nn.Module, target: nn.Module, shapes: TypedShapes, plans: Sequence[Plan], seed: int
    ) -> None:
        self.target, self.seed = target, seed
        landing = _landing(shapes, plans, target)
        self.values, self.signed = (_values(shapes, source, seed, landing, signs) for signs in (False, True))
        self.source = source
        self._fill(self.values)
        self.epsilons = _epsilons(self.source, target)

    def _fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Load the values into the source model, with safe repairs or as transformers itself does."""
        from ckptfix.engine.diagnosis import diagnose  # imports all rules, which a forward test does not need

        source, settings = self.source, Settings(select=FOR_LOADING, values=False)
        self.stored = open_state_dict(values)
        try:
            load_strictly(source, diagnose(self.stored, target_from_module(source), settings).result.state_dict())
        except NotLoadedError:
            if not (is_transformers_model(source) and hasattr(source, "from_pretrained")):
                raise
            made: Any = type(source)
            given = {"config": source.config, "state_dict": dict(values), "dtype": "float64"}
            loaded, found = made.from_pretrained(None, **given, output_loading_info=True)
            if any(found.values()):
                raise
            source.load_state_dict(loaded.state_dict())

    def examine(self, plans: Sequence[Plan], inputs: tuple[Input, ...], until: float) -> Equivalence:
        """Return the first map that gives equal outputs on one of the inputs that both models accept.

        Several inputs are tried, since the same numbers may be a sequence for one model and a batch for the other."""
        smallest, tried, missing, doubt = float("inf"), 0, list[str](), ""
        for arguments in self._arguments(inputs):
            if isinstance(arguments, str):
                doubt = doubt or arguments
                continue
            ours = self._run(self.source, arguments[0])
            if any(not bool(tensor.isfinite().all()) for _, tensor in ours):
                raise _DoubtError("with random weights, the source model gives non-finite values")
            if not ours or _difference(ours, self._run(self.source, arguments[0], 1), _alignments(ours, ours)[0]):
                raise _DoubtError("the source model draws random numbers, or gives no floats")
            for number, plan in enumerate(plans):
                if tried and time.monotonic() > until:
                    break
                missing, theirs = self._load(plan), self._run(self.target, arguments[1])
                if not (alignments := _alignments(ours, theirs)):
                    shapes = " and ".join(str([*some[0][1].shape]) if some else "none" for some in (ours, theirs))
                    doubt = f"the outputs share no shape ({shapes})"
                    break
                tried = max(tried, number + 1)
                best, how = min((_difference(ours, theirs, each), each) for each in alignments)
                if best <= TOLERANCE:
                    best = max(best, self._difference_elsewhere(plan, arguments, how))
                smallest = min(smallest, best)
                if best <= TOLERANCE:
                    return self._chosen(number, plan, best, ours, arguments, how)
        if tried and smallest <= _FLOAT32:
            doubt = f"the outputs differ by {smallest:.1g} of the largest, as if one model computed in float32"
        elif tried:
            doubt = f"{missing[0]} of the target has no source, and the outputs differ" if missing else ""
        else:
            doubt = doubt or "no input could be derived from the models' layers"
        return Equivalence(None, tried, smallest, epsilons=self.epsilons.found, doubt=doubt)

    def _chosen(
        self,
        number: int,
        plan: Plan,
        difference: float,
        ours: Outputs,
        arguments: tuple[Arguments, Arguments],
        how: Alignment,
    ) -> Equivalence:
        """Return the proof of a map with equal outputs, with the tensors that could be exchanged unnoticed."""
        own = 0.0
        if self.epsilons.found:
            self.epsilons.set(None)
            own = self._apart(arguments, how)
            self.epsilons.set(_EPSILON)
        units = _units(plan, self.stored, self.target)

        def compared() -> list[torch.Tensor]:
            theirs = self._run(self.target, arguments[1])
            return [_picked(ours, theirs, *each)[1] for each in how]

        hidden = unobservable(self.target, units, compared, self.seed)
        return Equivalence(
            number,
            number + 1,
            difference,
            tuple(dict.fromkeys(unit.key for unit in hidden)),
            tuple(dict.fromkeys(unit.key for unit in hidden if not unit.follows(units, hidden))),
            self.epsilons.found,
            own,
        )

    def _difference_elsewhere(self, plan: Plan, arguments: tuple[Arguments, Arguments], how: Alignment) -> float:
        """Return the difference of the outputs for much larger inputs, for other batches, and for vectors of both
        signs, which are otherwise positive since some may be variances; 0 if it may be rounding."""
        found = [
            self._apart((arguments[0].mapped(change), arguments[1].mapped(change)), how)
            for change in (_multiplied, _in_rows)
        ]
        self._fill(self.signed)
        self._load(plan)
        found.append(self._apart(arguments, how))
        self._fill(self.values)
        self._load(plan)
        return max(found) if max(found) > _FLOAT32 else 0.0

    def _apart(self, arguments: tuple[Arguments, Arguments], how: Alignment) -> float:
        """Return the difference of the outputs; 0 if one of the models rejects the input."""
        try:
            ours, theirs = (
                self._run(model, each) for model, each in zip((self.source, self.target), arguments, strict=True)
            )
            is_finite = all(bool(tensor.isfinite().all()) for _, tensor in ours)
            return _difference(ours, theirs, how) if is_finite else 0.0
        except (Exception, SystemExit):  # noqa: BLE001  the models' code may raise anything
            return 0.0

    def _load(self, plan: Plan) -> list[str]:
        """Load the values into the target through the edits of a map. Return its floating tensors without a source."""
        moved = apply_plan(plan, self.stored).state_dict()
        state = self.target.state_dict(keep_vars=True)
        taken = {key: value for key, value in moved.items() if key in state}
        self.target.load_state_dict(taken, strict=False)
        loaded = {id(state[key]) for key in taken}
        return [key for key, value in state.items() if _is_float(value) and id(value) not in loaded]

    def _run(self, model: nn.Module, arguments: Arguments, again: int = 0) -> Outputs:
        torch.manual_seed(self.seed + again)
        model.train()
        model.eval()  # some models cache what they computed from their weights until they are trained
        found = tensors_in(model(*arguments.args, **arguments.keywords))
        return [(name, tensor) for name, tensor in found if tensor.is_floating_point() and tensor.numel()]

    def _arguments(self, inputs: tuple[Input, ...]) -> Iterator[tuple[Arguments, Arguments] | str]:
        """Yield the same input in the form that each model accepts, or the error if one does not."""
        models = (self.source, self.target)
        own = [derive_inputs(model) for model in models]
        runs = 0
        for guess in [inputs] if inputs else dict.fromkeys((*own[1], *own[0])):
            given = make_arguments(guess, torch.float64, torch.device("cpu"), self.seed)
            found, error = [], ""
            for model, guesses in zip(models, own, strict=True):
                for form in _forms(given, guesses):
                    try:
                        self._run(model, form)
                    except (Exception, SystemExit) as raised:  # noqa: BLE001  the models' code may raise anything
                        error = (str(raised).splitlines() or [type(raised).__name__])[0]
                    else:
                        found.append(form)
                        break
            yield (found[0], found[1]) if len(found) == len(models) else f"no input works for both models ({error})"
            runs += len(found) == len(models)
            if runs == _INPUTS:
                return


def _forms(given: Arguments, guesses: Iterable[tuple[Input, ...]]) -> Iterator[Arguments]:
    """Yield the input under the given names, under those of the model's own guesses, and by position."""
    tensors = (*given.args, *given.kwargs.values())
    yield given
    for guess in guesses:
        own = [each for each in guess if isinstance(each, RandomInput)]
        if [(each.shape, each.bounds is None) for each in own] == [
            (tuple(tensor.shape), tensor.is_floating_point()) for tensor in tensors
        ]:
            pairs = list(zip(own, tensors, strict=True))
            yield Arguments(
                tuple(tensor for each, tensor in pairs if each.name is None),
                {each.name: tensor for each, tensor in pairs if each.name is not None},
            )
    if given.kwargs:
        yield Arguments(tensors)


def _multiplied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * _LARGE_INPUT if _is_float(tensor) else tensor


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a batch of three samples, one of them reversed, with floats multiplied by a different factor in each."""
    if not tensor.ndim:
        return tensor
    three = torch.cat([tensor, tensor.flip(-1), tensor])[: len(_ROWS)]
    factors = torch.tensor(_ROWS, dtype=torch.float64).view(-1, *(1,) * (tensor.ndim - 1))
    return three * factors if _is_float(tensor) else three


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _landing(shapes: TypedShapes, plans: Sequence[Plan], target: nn.Module) -> set[str]:
    """Return the keys of the file that every map moves to the target, whole or in parts."""
    sizes, places = {key: shape for key, (_, shape) in shapes.items()}, target.state_dict().keys()
    return set(shapes).intersection(
        *({source for source, key, *_ in _moved(plan, sizes) if key in places} for plan in plans)
    )


def _values(
    shapes: TypedShapes, source: nn.Module, seed: int, landing: Collection[str], signs: bool
) -> dict[str, torch.Tensor]:
    """Return values for the keys of the file. Weights, statistics and buffers that the target has too are random;
    counts and constants of only the source model are its own. With ``signs``, only variances are all positive."""
    own = source.state_dict()
    constants = {name for name, _ in source.named_buffers() if not name.endswith(_STATISTICS) and name not in landing}
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for key, (dtype, shape) in shapes.items():
        is_float = dtype == "float64"
        if key in own and tuple(own[key].shape) == shape and (key in constants or not is_float):
            values[key] = own[key].clone()
        elif is_float:
            values[key] = random_values(shape, generator)
            if signs and not key.endswith("running_var"):
                values[key] *= torch.randint(0, 2, shape, generator=generator) * 2 - 1
        else:
            values[key] = torch.zeros(shape, dtype=getattr(torch, dtype))
    return values


class _Epsilons(NamedTuple):
    """The epsilons of the norms of two models, which are made equal for the comparison."""

    places: tuple[tuple[nn.Module, str, float], ...] = ()
    found: tuple[tuple[float, ...], ...] = ()

    def set(self, common: float | None) -> None:
        """Set one epsilon for all norms; None restores their own."""
        for module, name, own in self.places:
            setattr(module, name, common or own)


def _epsilons(*models: nn.Module) -> _Epsilons:
    """Return the epsilons of the models if they differ, after making them equal; empty otherwise."""
    places = [
        [
            (module, name, value)
            for module in model.modules()
            for name in _EPSILONS
            if isinstance(value := vars(module).get(name), float) and 0 < value <= 0.01
        ]
        for model in models
    ]
    found = tuple(tuple(sorted({value for *_, value in each})) for each in places)
    if len(set(found)) == 1 or not all(found):
        return _Epsilons()
    unlike = _Epsilons(tuple(place for each in places for place in each), found)
    unlike.set(_EPSILON)
    return unlike


def _alignments(ours: Outputs, theirs: Outputs) -> list[Alignment]:
    """Return the ways to pair outputs for comparison: those of equal shape, by name or else in order. If there are
    none, an output with one that has rows and columns as separate axes, or with the first or last slice of one that has
    another axis, such as the state of the class token."""
    pairs = []
    for shape in dict.fromkeys(tensor.shape for _, tensor in ours):
        here, there = ([at for at, (_, t) in enumerate(side) if t.shape == shape] for side in (ours, theirs))
        named = {theirs[at][0]: at for at in there}
        same = [(at, named[ours[at][0]]) for at in here if ours[at][0] in named]
        rest = [
            [at for at in side if at not in taken]
            for side, taken in zip((here, there), ({at for at, _ in same}, {to for _, to in same}), strict=True)
        ]
        pairs += [(at, to, -1, 0, 0) for at, to in [*same, *zip(*rest, strict=False)]]
    if pairs:
        return [tuple(pairs)]
    grids: list[Alignment] = [
        ((at, to, -1, 0, 0),)
        for at, (_, one) in enumerate(ours)
        for to, (_, other) in enumerate(theirs)
        if one.numel() == other.numel() and one.ndim != other.ndim and min(one.ndim, other.ndim) > 1
        if one.shape[0] == other.shape[0] and one.shape[-1] == other.shape[-1]
    ]
    return grids + [
        ((at, to, side, axis, index),)
        for at, (_, one) in enumerate(ours)
        for to, (_, other) in enumerate(theirs)
        for side, (large, small) in enumerate(((one, other), (other, one)))
        for axis in range(large.ndim)
        for index in (0, -1)
        if large.select(axis, index).numel() == small.numel()
        and [*large.select(axis, index).shape] == [size for size in small.shape if size != 1 or small.ndim < large.ndim]
    ]


def _picked(
    ours: Outputs, theirs: Outputs, at: int, to: int, side: int, axis: int, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    pair = [ours[at][1], theirs[to][1]]
    if side >= 0:
        pair[side] = pair[side].select(axis, index)
        pair[1 - side] = pair[1 - side].reshape(pair[side].shape)
    return pair[0], pair[1].reshape(pair[0].shape)


def _difference(ours: Outputs, theirs: Outputs, alignment: Alignment) -> float:
    """Return the largest relative difference of the paired outputs; infinity if all are zero or any is NaN."""
    largest, is_known = 0.0, False
    for each in alignment:
        here, there = _picked(ours, theirs, *each)
        if scale := max(float(side.detach().abs().max()) for side in (here, there)):
            is_known = True
            difference = float((here - there).detach().abs().max()) / scale
            largest = max(largest, difference if difference == difference else float("inf"))
    return largest if is_known else float("inf")


def _units(plan: Plan, stored: Checkpoint, target: nn.Module) -> list[Unit]:
    """Return the tensors of the target, or parts of them, that the map fills; tied ones once."""
    state = {key: value for key, value in target.state_dict(keep_vars=True).items() if _is_float(value)}
    units: dict[tuple[Any, ...], Unit] = {}
    sizes = {key: spec.shape for key, spec in stored.specs.items()}
    for source, key, box, place in _moved(plan, sizes):
        if key in state:
            tensor = state[key]
            unit = Unit(source, sizes[source], box, key, place, tensor)
            units.setdefault((id(tensor), place), unit)
    return list(units.values())


def _moved(plan: Plan, sizes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, str, Any, Any]]:
    """Return how a map moves the tensors of the file: key, new key, box in the old tensor, box in the new one."""
    origins = trace(plan, sizes)
    parts = [(part.source, key, part.box, part.place) for key, origin in origins.items() for part in origin.parts]
    wholes = {key: (origin.key, origin.shape or sizes[origin.key]) for key, origin in origins.items() if origin.key}
    return parts + [(source, key, full(sizes[source]), full(shape)) for key, (source, shape) in wholes.items()]
