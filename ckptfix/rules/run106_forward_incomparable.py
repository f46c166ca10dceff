"""RUN106 forward-incomparable: the outputs cannot be compared with those of the file that `--compare` names.

## What it finds
With `--compare FILE`, or `--compare source` for the file that is repaired, the forward test runs the model once more
with the weights of that file: the same inputs, seed, device and dtype, in eval mode. The report then says how far the
outputs are apart and in what share their argmax agrees, or that they are bit-equal. The names in the other file are
repaired first where that is safe, so that a file with a wrapper's prefix can be compared with one without.

This finding says that there is no such answer:

- the other file does not load strictly into the model, even with its names repaired, or the model fails with its
  weights, or gives outputs of other names and shapes;
- the model did not run on the result, or gave non-finite values;
- both files hold the same weights, bit for bit, and yet the outputs differ by more than rounding explains: the model
  draws random numbers that torch's seed does not reach, or keeps a state from one run to the next.

## Why it matters
Outputs that agree are the last proof that a repair, a cast or a conversion changed nothing that counts. Without them
that proof is missing, and where the model is not repeatable, no difference of outputs means anything.

## Fix safety
There is no fix: the finding is a note about the comparison, and the file is written. Outputs that differ because the
weights do are no finding: the report has the figures.

## Example
A file whose classifier has another width:

    the outputs are not compared with those of imagenet.pth: the strict load found 2 size mismatches, fc.weight among
    them

## Sources
- Reproducibility in torch: https://docs.pytorch.org/docs/stable/notes/randomness.html"""
