"""torch and numpy, imported on first use.

Work on names needs neither, and importing either takes longer than reading a small file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ckptfix.errors import MissingPackageError

__all__ = ["nn", "np", "torch"]

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn
else:

    class _Lazy:
        def __init__(self, name):
            self._name, self._module = name, None

        def __getattr__(self, attribute):
            if self._module is None:
                package = self._name.partition(".")[0]
                try:
                    self._module = import_module(self._name)  # waits if another thread is importing it
                except ImportError as error:
                    raise MissingPackageError(
                        f"this needs {package}, which cannot be imported ({error}); pip install {package}"
                    ) from error
            return getattr(self._module, attribute)

    np, torch, nn = map(_Lazy, ("numpy", "torch", "torch.nn"))
