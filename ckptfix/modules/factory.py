"""Builds the target from the user's factory, ``--model pkg.mod:factory``. This runs the user's code."""

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
from ckptfix.reading.configs import head_sizes, model_config
from ckptfix.reading.opening import open_file

ModelArguments = Mapping[str, Any] | Sequence[Any]  # the value of `--model-args`: keyword or positional arguments


def target_of(
    model: nn.Module | str | None, like: str | os.PathLike[str] | None, arguments: ModelArguments = (), seed: int = 0
) -> Target:
    """Return the target for a model or a factory (``pkg.mod:factory``), else for ``like``: a reference file or a known
    architecture (``known:timm/resnet50``)."""
    if isinstance(model, str):
        return target_from_factory(model, arguments, seed)
    if model is not None:
        if not hasattr(model, "named_modules") or isinstance(model, type):
            given = repr(model) if isinstance(model, type) else f"of type {type(model).__name__}"
            raise UsageError(f"model is {given}; pass a torch.nn.Module or the string pkg.mod:factory")
        return _target(model)
    assert like is not None, "nothing to fit"
    if (text := os.fspath(like)).startswith(KNOWN):
        from ckptfix.known.table import known_target

        return known_target(text.removeprefix(KNOWN))
    reference = open_file(text)
    return target_from_checkpoint(reference, model_config(reference), head_sizes(reference))


def target_from_factory(spec: str, arguments: ModelArguments = (), seed: int = 0) -> Target:
    """Return the target for the model of a factory.

    ``spec`` is ``pkg.mod:factory``: a function, a class or an ``nn.Module`` instance; modules are also found in the
    working directory. The model is built on the meta device, where weights cost nothing; a factory that needs real
    tensors runs again without it, and a remark says so. ``initial`` builds the real model on first use, from ``seed``.
    torch's random state is preserved.

    Raises ``TargetError``, a line that says what to do, with the user's traceback if the user's code raised."""
    made = resolve(spec, seed)
    if isinstance(made, torch.nn.Module):
        return _target(_build(spec, made, arguments, seed), spec)

    build = cache(lambda: _build(spec, made, arguments, seed))
    initial = cache(lambda: _values(build(), spec))
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # torch warns that loading into a meta tensor does nothing
            model = _build(spec, made, arguments, seed)
    except TargetError as error:
        if error.__cause__ is None:  # the factory returned something other than a model
            raise
        reason = str(error.__cause__).partition("\n")[0]
    else:
        return replace(_target(model, spec), initial=initial, is_deferred=True, remarks=remarks_on(arguments))
    remark = f"{spec} cannot be built on the meta device ({reason}), so it was built with real weights"
    return replace(_target(build(), spec), remarks=(remark, *remarks_on(arguments)))


def _target(model: nn.Module, label: str | None = None) -> Target:
    from ckptfix.modules.converting import converter_of

    return replace(target_from_module(model, label), converts=converter_of(model))


def build_module(spec: str, arguments: ModelArguments = (), seed: int = 0) -> torch.nn.Module:
    """Return the model of a factory with real weights, from ``seed``; otherwise like ``target_from_factory``."""
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
    """Return the builder of the model that ``spec`` names: the object ``pkg.mod:name``, or a model of a library
    (``timm:resnet50``). Raises ``TargetError`` if it does not exist."""
    try:
        with user_code(spec, seed):
            if spec.startswith(PREFIX) and (name := Name.of(spec)) is not None and ":" in name.name:
                return partial(build_class, _object(name.name, seed), name.arguments)
            made = named_builder(spec)
    except TargetError:
        with contextlib.suppress(TargetError):  # pkg.mod:factory if the package has the name of a scheme
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
            raise  # the module exists, but one of its own imports is missing
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
    """Return the model that the factory builds from its arguments, or the factory itself if it is a model."""
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
    """Run the user's code.

    The working directory is importable, random numbers come from ``seed``, and anything printed goes to stderr, because
    stdout is for the report. Errors become a ``TargetError`` with the user's part of the traceback."""
    import torch  # first, so that its own imports cannot find files in the user's folder

    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        # Seeds only the CPU's generator: manual_seed also seeds the GPUs', and restoring those would initialise CUDA.
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(sys.stderr):
            torch.default_generator.manual_seed(seed)
            yield
    except CkptfixError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise _error_of_user(spec, error) from error
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have removed it
            sys.path.remove(folder)


def _error_of_user(spec: str, error: BaseException) -> TargetError:
    what = traceback.format_exception_only(error)[-1].strip()
    frames = error.__traceback__
    while frames is not None and _leads_to_user(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next  # skip frames of ckptfix and of Python's import machinery
    if frames is None and not isinstance(error, SyntaxError):  # the call failed before entering the user's code
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
