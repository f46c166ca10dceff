"""The target that a factory of the user makes: ``--model pkg.mod:factory``. This runs the user's code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from ckptfix.core.lazy import nn, torch
from ckptfix.core.likeness import KNOWN
from ckptfix.core.target import Target, target_from_checkpoint, target_from_module
from ckptfix.core.wording import nearest
from ckptfix.errors import CkptfixError, Opt, TargetError, UsageError
from ckptfix.modules.lightning import PREFIX, build_class, remarks_on
from ckptfix.modules.named import SCHEMES, Name, named_builder
from ckptfix.reading.adapters import model_config
from ckptfix.reading.opening import open_file

ModelArguments = Mapping[str, Any] | Sequence[Any]  # what `--model-args` gives: keyword arguments, or positional ones


def target_of(
    model: nn.Module | str | None, like: str | os.PathLike[str] | None, arguments: ModelArguments = (), seed: int = 0
) -> Target:
    """Return what a model, a factory (``pkg.mod:factory``) or else ``like`` wants: a reference file, or a known
    architecture (``known:timm/resnet50``)."""
    if isinstance(model, str):
        return target_from_factory(model, arguments, seed)
    if model is not None:
        if not hasattr(model, "named_modules") or isinstance(model, type):
            raise UsageError(f"model is {model!r:.60}; pass a torch.nn.Module or the string pkg.mod:factory")
        return _target(model)
    assert like is not None, "nothing to fit"
    if (text := os.fspath(like)).startswith(KNOWN):
        from ckptfix.known.table import known_target

        return known_target(text.removeprefix(KNOWN))
    reference = open_file(text)
    return target_from_checkpoint(reference, model_config(reference))


def target_from_factory(spec: str, arguments: ModelArguments = (), seed: int = 0) -> Target:
    """Return what the model of a factory wants.

    ``spec`` is ``pkg.mod:factory``: a function, a class or an ``nn.Module`` instance; modules are found in the working
    directory too. The model is built on the meta device, where its weights cost nothing; a factory that needs real
    tensors is run again without it, and a remark says so. ``initial`` builds the real model on first use, from
    ``seed``. The random state of torch is left as it was.

    Raises ``TargetError``: one line that says what to do, and the user's traceback where the user's own code raised."""
    made = resolve(spec, seed)
    if isinstance(made, torch.nn.Module):
        return _target(_build(spec, made, arguments, seed), spec)

    build = cache(lambda: _build(spec, made, arguments, seed))
    initial = cache(lambda: _values(build(), spec))
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # loading into a meta tensor warns that it does nothing, as we wish
            model = _build(spec, made, arguments, seed)
    except TargetError as error:
        if error.__cause__ is None:  # the factory ran to its end, and what it made is not a model
            raise
        reason = str(error.__cause__).partition("\n")[0]
    else:
        return replace(_target(model, spec), initial=initial, remarks=remarks_on(arguments))
    remark = f"{spec} cannot be built on the meta device ({reason}), so it was built with real weights"
    return replace(_target(build(), spec), remarks=(remark, *remarks_on(arguments)))


def _target(model: nn.Module, label: str | None = None) -> Target:
    from ckptfix.modules.converting import converter_of

    return replace(target_from_module(model, label), converts=converter_of(model))


def build_module(spec: str, arguments: ModelArguments = (), seed: int = 0) -> torch.nn.Module:
    """Return the model of a factory with real weights, made from ``seed``; otherwise as ``target_from_factory``."""
    return _build(spec, resolve(spec, seed), arguments, seed)


def _values(model: torch.nn.Module, spec: str) -> Mapping[str, torch.Tensor]:
    initial = target_from_module(model, spec).initial
    if initial is None:
        raise TargetError(
            Opt("model", spec),
            " builds a model on the meta device, which has no values to fill with; use ",
            Opt("fill"),
            " with a file",
        )
    return initial()


def resolve(spec: str, seed: int) -> Any:
    """Return what builds the model that ``spec`` names: the object ``pkg.mod:name``, or the model of a library
    (``timm:resnet50``). Raises ``TargetError`` if there is none."""
    try:
        with user_code(spec, seed):
            if spec.startswith(PREFIX) and (name := Name.of(spec)) is not None and ":" in name.name:
                return partial(build_class, _object(name.name, seed), name.arguments)
            made = named_builder(spec)
    except TargetError:
        with contextlib.suppress(TargetError):  # pkg.mod:factory with a package that has the name of a scheme
            found = _object(spec, seed)
            if not isinstance(found, type) or issubclass(found, torch.nn.Module):
                return found
        raise
    return made or _object(spec, seed)


def _object(spec: str, seed: int) -> Any:
    path, colon, name = spec.partition(":")
    if not (path and colon and name):
        raise TargetError(
            Opt("model", spec),
            ": write it as pkg.mod:factory (module and name, separated by a colon) or library:model, for example "
            "timm:resnet50",
        )
    with user_code(spec, seed):
        made: Any = (module := _import(path, spec))
        for attribute in name.split("."):
            if not hasattr(made, attribute):
                close = nearest(attribute, dir(made))
                hint = f"; did you mean {close}?" if close else f"; see what {_place(module)} defines"
                raise TargetError(Opt("model", spec), f": {path} has no {name}{hint}")
            made = getattr(made, attribute)
    if not callable(made):
        raise TargetError(
            Opt("model", spec), f" is of type {type(made).__name__}; name a function, a class or a torch.nn.Module"
        )
    return made


def _import(path: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # the module is there; it is one of its own imports that is missing
        remedy = f"run from the folder that contains {path.partition('.')[0]}, or install it"
        if path.endswith(".py"):
            remedy = f"did you mean {path.removesuffix('.py').replace('/', '.')}:{spec.partition(':')[2]}?"
        elif close := nearest(path, SCHEMES):
            remedy = f"did you mean {close}:{spec.partition(':')[2]}?"
        raise TargetError(
            Opt("model", spec), f": there is no module {error.name} in {Path.cwd()} or among the installed; {remedy}"
        ) from error


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__


def _build(spec: str, factory: Callable[..., Any], arguments: ModelArguments, seed: int) -> torch.nn.Module:
    """Return the model that the factory makes of its arguments, or the factory itself where it is a model."""
    if isinstance(factory, torch.nn.Module):
        if arguments:
            raise TargetError(
                Opt("model", spec), ": this is already a model and takes no arguments; omit ", Opt("model_args")
            )
        return factory
    with user_code(spec, seed):
        model = factory(**arguments) if isinstance(arguments, Mapping) else factory(*arguments)
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise TargetError(
            Opt("model", spec), f" returned an object of type {kind}; it has to return only the torch.nn.Module"
        )
    return model


@contextlib.contextmanager
def user_code(spec: str, seed: int) -> Iterator[None]:
    """Run code of the user.

    The working directory can be imported from, random numbers come from ``seed``, and what is printed goes to stderr,
    as stdout belongs to the report. Errors become a ``TargetError`` that carries the user's part of the traceback."""
    import torch  # before its own imports could find files of the user's folder

    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        # Only the CPU's generator is seeded: manual_seed reaches the GPUs' too, and to put those back would start CUDA.
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(sys.stderr):
            torch.default_generator.manual_seed(seed)
            yield
    except CkptfixError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise _error_of_user(spec, error) from error
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have taken it out itself
            sys.path.remove(folder)


def _error_of_user(spec: str, error: BaseException) -> TargetError:
    what = traceback.format_exception_only(error)[-1].strip()
    frames = error.__traceback__
    while frames is not None and _leads_to_user(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next  # those of ckptfix, and of Python's import machinery
    if frames is None and not isinstance(error, SyntaxError):  # the call itself failed: the user's code was not entered
        return TargetError(
            Opt("model", spec), f" cannot be called like this: {error}; give its arguments with ", Opt("model_args")
        )
    return TargetError(
        Opt("model", spec),
        f" raised {what}",
        traceback_text="".join(traceback.format_exception(type(error), error, frames)),
    )


def _leads_to_user(filename: str) -> bool:
    own = filename.startswith((str(Path(__file__).parent), "<frozen importlib"))
    return own or filename in {importlib.__file__, contextlib.__file__}
