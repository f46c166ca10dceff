"""RUN102 forward-non-finite: the model runs on the file and gives NaN or infinities.

## What it finds
Floating outputs of the forward test that hold NaN, +Inf or -Inf, in nested tuples, dicts and dataclasses too: which
output, how many of each, and the first module that made such a value out of finite ones, with its class, the range of
its input and the figures of its weights. A module whose weights are finite points to an overflow or to an input that
the model was not made for. What else is known is said:

- in float16 and bfloat16 the pass is run again in float32: where that is finite, it is a limit of the dtype (a
  warning);
- with `--train-mode`: where training mode gives finite values, the running statistics are at fault;
- where no weight shows a defect, the model runs with its own initial weights: if these give such values too, the input
  or the code is at fault (a warning), and -Inf without NaN is then a mask of the model and no finding;
- a derived input of normal random numbers is replaced by numbers from 0 to 1 where only the former fail, as in a model
  that takes a root of its input.

## Why it matters
A file can load strictly and be worthless: NaN in one `running_var` makes every output NaN in eval mode, though training
goes on unharmed, since there the batch's own statistics are used.

## Fix safety
There is no fix: a value that was lost cannot be guessed. No file is written where this is an error. VAL101 names the
values in the file that are not finite; another copy of them (an EMA twin in the same file, `--fill FILE` of a donor) is
the cure.

## Example
A `BatchNorm2d` whose `running_var` was saved after a divergence:

    the model runs, but its output is not finite: output float32[2, 10]: 20 NaN; the first to turn finite values
    into NaN is bn1 (BatchNorm2d), whose running_var is not finite itself.

## Sources
- NaN in a published file: https://github.com/sharif-apu/BJDD_CVPR21/issues/4
- `torch.nn.BatchNorm2d`, the statistics in eval mode:
  https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html"""
