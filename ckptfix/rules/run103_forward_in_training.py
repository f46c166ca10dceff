"""RUN103 forward-in-training: the model runs on the file in eval mode, and not as it should in training.

## What it finds
With `--train-mode` the forward test runs the model once more in training mode, with a batch of at least two, since a
BatchNorm cannot take one value per channel. An error there, and an output that is not finite where that of eval mode
is, are a warning. What differs between the modes are the statistics (of the batch, or those of the file) and dropout.

With `--backward` a backward pass follows, from a random projection of all outputs, under torch's anomaly detection.
Gradients that are not finite are a warning, with the backward function that made the first one and the line of your
code that it belongs to. Parameters whose gradient is all zeros, or that have none, are a note; where no parameter has
another, a warning.

## Why it matters
A file that is to be trained on has to do more than to run once. One step with a NaN in a gradient destroys all weights.

## Fix safety
There is no fix, and the file is written: the pass in eval mode has proven it. The reverse, NaN in eval mode and finite
values in training mode, is RUN102, where it accuses the running statistics.

## Example
A square root of values that reach zero:

    12 parameters with a non-finite gradient; the first to make one is SqrtBackward0, of model.py:31 in forward

## Sources
- Anomaly detection: https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
- `torch.nn.BatchNorm2d`, training and eval mode:
  https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html"""
