"""The callback for the Trainer of transformers.

Trainer(..., callbacks=[CheckCheckpoints(stop=True)])
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ckptfix.callbacks.watch import Watch

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptfix.core.settings import CheckSettings


class CheckCheckpoints(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Checks every checkpoint that the trainer saves, beside the training, and logs a warning for each defect.

    ``stop`` ends a training in one process when one has been found. ``watch.defects`` has them; ``settings`` are those
    of ``ckptfix.check``."""

    def __init__(self, stop: bool = False, **settings: Unpack[CheckSettings]) -> None:
        self.stop, self.watch = stop, Watch(**settings)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Check what was saved."""
        if state.is_world_process_zero:
            self.watch.check(Path(args.output_dir, f"checkpoint-{state.global_step}"))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End the training if that was asked for."""
        if self.stop and self.watch.defects and args.world_size == 1:
            control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait for the last check."""
        self.watch.wait()
