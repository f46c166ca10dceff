"""RUN103 forward-in-training: the model runs on the file in eval mode but not properly in training mode.

## What it finds
With `--train-mode`, the forward test runs the model again in training mode, with a batch of at least two, because
BatchNorm cannot train on one value per channel. An error, or a non-finite output that is finite in eval mode, is a
warning. The modes differ in the statistics (of the batch, or of the file) and dropout.

With `--backward` a backward pass follows, from a random projection of all outputs, under torch's anomaly detection.
Non-finite gradients are a warning, with the backward function that made the first one and its line in your code.
Parameters with no gradient, or one of only zeros, are a note; a warning if that is true of all parameters.

## Why it matters
A file for training has to do more than run once. One step with a NaN in a gradient destroys all weights.

## Fix safety
There is no fix, and the file is written: the pass in eval mode has proven it. RUN102 reports the reverse, NaN in eval
mode and finite values in training mode, and blames the running statistics.

## Example
A square root of values that reach zero:

    12 parameters with a non-finite gradient; the first to make one is SqrtBackward0, of model.py:31 in forward

## Sources
- Anomaly detection: https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
- `torch.nn.BatchNorm2d`, training and eval mode:
  https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html"""
