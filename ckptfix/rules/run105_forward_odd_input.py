"""RUN105 forward-odd-input: the input given with `--input` is not scaled like what the model was trained on.

## What it finds
Two problems of an input given by the user (a derived one is random noise anyway):

- A constant channel while others vary: scaled with the wrong numbers, or never filled.
- Values on another scale than in training. The mean square of the first BatchNorm's input is compared with its running
  statistics, and reported if it is 20 times too large or too small, as for an image of 0 … 255 in a model that was
  trained on 0 … 1. A model without a trained BatchNorm does not show this.

NaN and infinities in the input stop the test before it judges the model, and so does a channel that is NaN throughout,
as after a division by a range of 0. -Inf among zeros is a mask, and allowed.

## Why it matters
A good model gives nonsense, or overflows, on an input with the wrong scale, and the checkpoint gets the blame.

## Fix safety
There is no fix: the finding is a note about the input, not the file.

## Example
    the values of the input are 0 … 255: what reaches bn1 (BatchNorm2d) is 58 times as large as what it saw in
    training; divide an image of 0 … 255 by 255, and normalise it as in training

## Sources
- The scale that torchvision's models expect: https://docs.pytorch.org/vision/stable/models.html"""
