"""The callback for the Trainer of transformers.

Trainer(..., callbacks=[CheckCheckpoints(stop=True)])"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ckptfix.callbacks.watch import Watch

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptfix.core.settings import CheckSettings


class CheckCheckpoints(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Checks every checkpoint that the trainer saves, in the background, and logs a warning for each defect.

    ``stop`` ends the training when a defect has been found; with several processes, at the next step that logs or
    saves. ``watch.defects`` of the main process holds the defects; ``settings`` are those of ``ckptfix.check``."""

    def __init__(self, stop: bool = False, **settings: Unpack[CheckSettings]) -> None:
        self.stop, self.watch = stop, Watch(**settings)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Check what was saved."""
        if state.is_world_process_zero:
            self.watch.check(Path(args.output_dir, f"checkpoint-{state.global_step}"))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop the training if a defect was found and ``stop`` is set."""
        found = [bool(self.watch.defects)]
        if not self.stop or (args.world_size > 1 and not (control.should_log or control.should_save)):
            return
        broadcast_object_list(found)  # all processes have to stop at the same step; a no-op for one process
        control.should_training_stop |= found[0]

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait for the last check."""
        self.watch.wait()
