"""Messages of a training that goes wrong after the checkpoint was loaded."""

from __future__ import annotations

from ckptfix.explain.record import Advice, Record

TRAINING = (
    Record(
        name="nan",
        example="Loss is nan, stopping training",
        patterns=(
            r"(?<!packet )(?<!best )\bloss(?:es)?\b[\w\s:=\-'\"()]{0,40}\b(?:nan|inf)\b(?!\w)",
            r"Function '?(?P<function>\w+)'? returned nan values in its \d+th output",
            r"probability tensor contains either `?inf`?, `?nan`?",
            r"(?:NaN|Inf) (?:or Inf )?(?:found|detected) in|nan or inf (?:found|detected)",
            r"Model diverged with loss|non-finite loss",
        ),
        cause="A value became NaN or infinite. Look first at the weights that were loaded (a file can hold NaN, or"
        " running variances that are broken), then at the input (NaN, a division by a zero standard deviation, 0 to 255"
        " in place of 0 to 1), then at half precision (beyond 65504) and the learning rate.",
        advice=(
            Advice("looks at every value of the file", "ckptfix check {FILE}"),
            Advice("runs the model on it and names what is not finite", "ckptfix repair {FILE} --model {MODEL}"),
            Advice("does the same in training, with the gradients", "ckptfix repair {FILE} --model {MODEL} --backward"),
            Advice("looks at the input", code="assert torch.isfinite(x).all(), (x.min(), x.max())"),
            Advice("names the operation of the backward pass", code="torch.autograd.set_detect_anomaly(True)"),
        ),
        source="https://pytorch.org/docs/stable/autograd.html#anomaly-detection",
        codes=("VAL", "RUN102"),
    ),
    Record(
        name="capturable",
        example="AssertionError: If capturable=False, state_steps should not be CUDA tensors",
        patterns=(r"If capturable=False, state_steps should not be CUDA tensors",),
        cause="Adam's step counter came from the file onto the GPU, where torch 1.12.0 does not want it. It is a"
        " fault of that release.",
        advice=(
            Advice("goes around it after the load", code='optimizer.param_groups[0]["capturable"] = True'),
            Advice("Or use torch 1.12.1 or later."),
        ),
        source="https://github.com/pytorch/pytorch/issues/80809",
    ),
)
