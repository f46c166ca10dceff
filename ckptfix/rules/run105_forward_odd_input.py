"""RUN105 forward-odd-input: the input given with `--input` is not scaled like what the model was trained on.

## What it finds
Two things about an input that the user gave; one that was derived is random noise anyway.

- A channel that holds one and the same value while others vary: scaled by the wrong figures, or never filled.
- Values of another scale than in training. The first BatchNorm that runs compares the mean square of what it gets with
  its running statistics; from 20 times as large or as small, it is reported. That is the trace of an image of
  0 … 255 in a model that saw 0 … 1. A model without a trained BatchNorm shows nothing of it.

NaN and infinities in the input end the test before anything is said of the model, and so does a channel that is NaN
throughout, as a division by a range of 0 makes it. -Inf beside zeros is a mask, and allowed.

## Why it matters
A sound model gives nonsense, or overflows, on an input of the wrong scale, and the checkpoint is blamed for it.

## Fix safety
There is no fix: the finding is a note about the input and says nothing of the file.

## Example
    the values of the input are 0 … 255: what reaches bn1 (BatchNorm2d) is 58 times as large as what it saw in
    training; divide an image of 0 … 255 by 255, and normalise it as in training

## Sources
- The scale that torchvision's models expect: https://docs.pytorch.org/vision/stable/models.html"""
