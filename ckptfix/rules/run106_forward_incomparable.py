"""RUN106 forward-incomparable: the outputs cannot be compared with those of the `--compare` file.

## What it finds
With `--compare FILE`, or `--compare source` for the file that is repaired, the forward test runs the model again with
that file's weights: the same inputs, seed, device and dtype, in eval mode. The report then says how far apart the
outputs are and how often their argmax agrees, or that they are bit-equal. Names in the other file are first repaired if
that is safe, so a file with a wrapper's prefix can be compared with one without.

This finding says why there is no such answer:

- the other file does not load strictly into the model, even with its names repaired, or the model fails with its
  weights or gives outputs with different names or shapes;
- the model did not run on the result, or gave non-finite values;
- both files have the same weights, bit for bit, but the outputs differ by more than rounding explains: the model draws
  random numbers that torch's seed does not control, or keeps state between runs.

## Why it matters
Equal outputs are the final proof that a repair, cast or conversion changed nothing that matters. Without them that
proof is missing, and if the model is not deterministic, differences mean nothing.

## Fix safety
There is no fix: the finding is a note about the comparison, and the file is written. Outputs that differ because the
weights do are not a finding; the report has the figures.

## Example
A file whose classifier has another width:

    the outputs are not compared with those of imagenet.pth: the strict load found 2 size mismatches, fc.weight among
    them

## Sources
- Reproducibility in torch: https://docs.pytorch.org/docs/stable/notes/randomness.html"""
