"""The callback for Lightning.

Trainer(callbacks=[CheckCheckpoints(stop=True)])"""

from __future__ import annotations

import functools
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptfix.callbacks.watch import Watch

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from typing_extensions import Unpack

    from ckptfix.core.settings import CheckSettings
else:  # the package has two names, and each Trainer accepts only its own Callback
    Callback = import_module(
        "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
    ).Callback


class CheckCheckpoints(Callback):  # type: ignore[misc]  # Lightning is not typed here
    """Checks every checkpoint that the trainer saves, in the background, and logs a warning for each defect.

    ``stop`` ends the training when a defect has been found; several processes agree on that as often as they log.
    ``watch.defects`` of the main process holds the defects; ``settings`` are those of ``ckptfix.check``."""

    def __init__(self, stop: bool = False, **settings: Unpack[CheckSettings]) -> None:
        self.stop, self.watch = stop, Watch(**settings)
        self._wrapper: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wrap ``trainer.save_checkpoint``: Lightning has no hook that runs after a checkpoint is saved."""
        if (save := trainer.save_checkpoint) is self._wrapper:
            return  # left by a fit that raised, after which Lightning does not call teardown

        @functools.wraps(save)
        def save_checkpoint(filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
            save(filepath, *args, **kwargs)
            if trainer.is_global_zero:
                self.watch.check(filepath)

        trainer.save_checkpoint = self._wrapper = save_checkpoint

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, number: int) -> None:
        """Stop the training if a defect was found and ``stop`` is set."""
        if not self.stop or (trainer.world_size > 1 and number % trainer.log_every_n_steps):
            return
        if trainer.strategy.reduce_boolean_decision(bool(self.watch.defects), all=False):
            trainer.should_stop = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Unwrap ``save_checkpoint``, and wait for the last check."""
        vars(trainer).pop("save_checkpoint", None)  # another callback of this class may have done it
        self.watch.wait()
