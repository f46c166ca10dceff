"""RUN102 forward-non-finite: the model runs on the file and gives NaN or infinities.

## What it finds
Float outputs of the forward test with NaN, +Inf or -Inf, including in nested tuples, dicts and dataclasses: which
output, how many of each, and the first module that turned finite values into such a value, with its class, the range of
its input and the statistics of its weights. If that module's weights are finite, the cause is an overflow or an
unsuitable input. The report also says what else is known:

- a float16 or bfloat16 pass is repeated in float32: if that is finite, the dtype is at fault (a warning);
- with `--train-mode`, if training mode gives finite values, the running statistics are at fault;
- if no weight shows a defect, the model runs with its own initial weights: if these give such values too, the input or
  the code is at fault (a warning), and -Inf without NaN is then a mask of the model and not reported;
- a derived input of normal random numbers is replaced by numbers from 0 to 1 if only the former fail, as in a model
  that takes a root of its input.

## Why it matters
A file can load strictly and still be worthless: NaN in one `running_var` makes every output NaN in eval mode, although
training is unaffected, because it uses the batch's own statistics.

## Fix safety
There is no fix: a lost value cannot be guessed. No file is written if this is an error. VAL101 lists the non-finite
values in the file; replace them from another copy (an EMA twin in the same file, or a donor with `--fill FILE`).

## Example
A `BatchNorm2d` whose `running_var` was saved after a divergence:

    the model runs, but its output is not finite: output float32[2, 10]: 20 NaN; the first to turn finite values
    into NaN is bn1 (BatchNorm2d), whose running_var is not finite itself.

## Sources
- NaN in a published file: https://github.com/sharif-apu/BJDD_CVPR21/issues/4
- `torch.nn.BatchNorm2d`, the statistics in eval mode:
  https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html"""
