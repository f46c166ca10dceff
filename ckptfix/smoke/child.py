"""What the other process executes: ``python -m ckptfix.smoke.child``, the job as JSON on stdin, the answer as JSON
lines in a private file.

Neither stdout nor stderr is used for the answer: they belong to the user's model, which may print what it likes."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from msgspec import Struct, convert, to_builtins

from ckptfix.smoke.launch import DONE, die_with

_GRACE = 30.0  # seconds after the time limit at which the child ends by itself, should the parent be gone


def main() -> None:
    """Read the job, do it, answer."""
    order: dict[str, Any] = json.load(sys.stdin)
    die_with(order["parent"])
    with (
        Path(order["answer"]).open("w", encoding="utf-8") as answer,
        Path(order["stack"]).open("w", encoding="utf-8") as stack,
    ):
        # On a crash the Python stack goes to a file, and no core is written: it would be as large as the model.
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(order["timeout"] + _GRACE, exit=True, file=stack)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        gc.disable()  # looking for garbage while torch is imported takes a fifth of that time
        import torch  # noqa: F401  before the user's folder can be imported from: a file random.py there is none of torch's business

        gc.freeze()
        gc.enable()
        os.chdir(order["cwd"])
        sys.path[0] = order["cwd"]  # the process was started in an empty folder, which is this entry

        def tell(stage: str, outcome: Struct) -> None:
            answer.write(json.dumps({"stage": stage, "outcome": to_builtins(outcome)}) + "\n")
            answer.flush()

        if "twins" in order["job"]:
            from ckptfix.smoke.equivalence import compare_twins

            tell(DONE, compare_twins(order["job"]))
        else:
            from ckptfix.smoke.exam import Exam, examine

            tell(DONE, examine(convert(order["job"], Exam), tell))
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
    os._exit(0)  # Python would wait for the threads and processes that the model has left running
