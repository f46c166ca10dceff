"""What the forward test of ckptfix itself says where the model's process gave no error, and of the strict load."""

from __future__ import annotations

from ckptfix.explain.record import Advice, Record

FORWARD_TEST = (
    Record(
        name="process-crashed",
        example="the forward test failed in the forward pass, the model's own code gave way: the process crashed with"
        " SIGSEGV at model.py:12 in forward",
        patterns=(
            r"process crashed with (?P<signal>SIG(?!KILL|TERM|INT)\w+)",
            r"Fatal Python error: (?P<signal>Segmentation fault|Aborted|Bus error|Illegal instruction)",
            r"Signal \d+ \((?P<signal>SIG(?:SEGV|ABRT|BUS|ILL|FPE))\) received by PID",
        ),
        cause="Compiled code crashed ({signal}) and took the process along, so that there is no Python error. It is"
        " mostly an extension that was built for another release of torch, or a kernel that met an index or a size it"
        " does not check; SIGBUS and SIGILL come from the machine (shared memory, a processor without these"
        " instructions). The values of a checkpoint that loads strictly rarely do that.",
        advice=(
            Advice("prints the Python line at which it crashes", code="import faulthandler; faulthandler.enable()"),
            Advice(
                "runs the model on the CPU, where kernels check more",
                "ckptfix repair {FILE} --model {MODEL} --device cpu",
            ),
            Advice("writes the file without running the model", "ckptfix repair {FILE} --model {MODEL} --no-smoke"),
        ),
        source="https://docs.python.org/3/library/faulthandler.html",
    ),
    Record(
        name="process-killed",
        example="the forward test failed in the forward pass, the environment is at fault, not the checkpoint: the"
        " process was killed by SIGKILL, most likely because it ran out of memory",
        patterns=(
            r"process was killed by SIGKILL",
            r"Signal 9 \(SIGKILL\) received by PID",
            r"\boom-kill event",
            r"Out of memory: Killed process \d+ \(python",
        ),
        cause="The system ended the process without a word, nearly always because memory ran out (of the machine, or of"
        " the container or job that it runs in). The checkpoint is not at fault.",
        advice=(
            Advice("Ask the system what it killed: dmesg has a line with 'Killed process', a job system its own."),
            Advice(
                "runs the model on a single small sample",
                "ckptfix repair {FILE} --model {MODEL} --input 1x3x64x64",
            ),
            Advice("shows how large the weights are", "ckptfix inspect {FILE}"),
        ),
        source="https://docs.kernel.org/admin-guide/mm/concepts.html#oom-killer",
    ),
    Record(
        name="no-answer",
        example="the forward test failed in the forward pass, the model is slow here, or waits for something: no answer"
        " within 300 s at model.py:12 in forward",
        patterns=(r"\bno answer within (?P<seconds>[\d.e+]+) s\b",),
        cause="The forward test of ckptfix was ended after {seconds} seconds: the model is slow on this machine with"
        " the input that it was given, or waits for something (a download, a lock, a process of its own). The"
        " checkpoint is not known to be at fault.",
        advice=(
            Advice("gives it an hour", "ckptfix repair {FILE} --model {MODEL} --timeout 3600"),
            Advice("gives it less to do", "ckptfix repair {FILE} --model {MODEL} --input 1x3x64x64"),
            Advice("writes the file without running the model", "ckptfix repair {FILE} --model {MODEL} --no-smoke"),
        ),
        source="https://docs.python.org/3/library/faulthandler.html",
    ),
    Record(
        name="strict-load-of-ckptfix",
        example="the strict load found 2 missing keys, 1 size mismatch",
        patterns=(
            r"the strict load found (?P<found>\d+ (?:missing key|unexpected key|size mismatch)\w*"
            r"(?:, \d+ (?:missing key|unexpected key|size mismatch)\w*)*)",
            r"the strict load passed over (?P<found>\d+ parameters?) that the file does not supply",
        ),
        cause="The names or shapes in the file are not those of the model ({found}), so load_state_dict with"
        " strict=True does not take it as it is.",
        advice=(
            Advice("names every key, and what would be done about it", "ckptfix check {FILE} --model {MODEL} -v"),
            Advice(
                "supplies what is missing by the model's initial values, which are untrained",
                "ckptfix repair {FILE} --model {MODEL} --fill target",
            ),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict",
        codes=("KEY", "BUF", "FIT"),
    ),
)
