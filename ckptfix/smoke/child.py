"""The program of the child process: ``python -m ckptfix.smoke.child`` reads the job as JSON from stdin, and writes the
answer as JSON lines to a private file.

The answer does not go to stdout or stderr, because the user's model may print anything there."""

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

_GRACE = 30.0  # seconds after the time limit at which the child exits by itself, in case the parent is gone


def main() -> None:
    """Read the job, do it, and write the answer."""
    order: dict[str, Any] = json.load(sys.stdin)
    die_with(order["parent"])
    with (
        Path(order["answer"]).open("w", encoding="utf-8") as answer,
        Path(order["stack"]).open("w", encoding="utf-8") as stack,
    ):
        # A crash writes the Python stack to a file, and no core dump, which would be as large as the model.
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(order["timeout"] + _GRACE, exit=True, file=stack)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        gc.disable()  # collecting garbage takes a fifth of the import of torch
        import torch  # noqa: F401  before the working directory can be imported from: it may have a random.py

        gc.freeze()
        gc.enable()
        os.chdir(order["cwd"])
        sys.path[0] = order["cwd"]  # in place of the empty folder that the process was started in

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
    os._exit(0)  # Python would wait for threads and processes that the model left running
