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
else:  # the package has two names, and its trainer takes the callbacks of its own
    Callback = import_module(
        "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
    ).Callback


class CheckCheckpoints(Callback):  # type: ignore[misc]  # Lightning is not typed here
    """Checks every checkpoint that the trainer saves, beside the training, and logs a warning for each defect.

    ``stop`` ends the training when one has been found; several processes agree on that as often as they log.
    ``watch.defects`` of the main process has them; ``settings`` are those of
    ``ckptfix.check``."""

    def __init__(self, stop: bool = False, **settings: Unpack[CheckSettings]) -> None:
        self.stop, self.watch = stop, Watch(**settings)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch what is saved: Lightning calls no hook after that."""
        save = trainer.save_checkpoint

        @functools.wraps(save)
        def save_checkpoint(filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
            save(filepath, *args, **kwargs)
            if trainer.is_global_zero:
                self.watch.check(filepath)

        trainer.save_checkpoint = save_checkpoint

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, number: int) -> None:
        """End the training if that was asked for."""
        if not self.stop or (trainer.world_size > 1 and number % trainer.log_every_n_steps):
            return
        if trainer.strategy.reduce_boolean_decision(bool(self.watch.defects), all=False):
            trainer.should_stop = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait for the last check, and watch no more."""
        del trainer.save_checkpoint
        self.watch.wait()
