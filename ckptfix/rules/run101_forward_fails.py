"""RUN101 forward-fails: the model does not run on the file.

## What it finds
The forward test starts a separate process, builds the model with the factory, reads the new file, loads it with
`strict=True`, and calls the model once in eval mode, on CUDA if available, otherwise on the CPU. All parameters are
filled with NaN before the load, so a parameter that the load skipped shows. This finding reports an error, a crash by a
signal, a timeout or a lack of memory, and what is at fault:

- *environment*: the device cannot even multiply two small matrices, memory ran out, an operator does not exist there;
- *input*: the model does not accept the input given with `--input`, or that input has NaN or infinities;
- *model*: the model's own code raised, crashed or hung, or mixes dtypes or devices;
- *checkpoint*: the strict load failed, a parameter did not come from the file, or non-finite values made the model
  raise.

Failures that may be the environment's fault are retried, and the report says what helped: out of memory, with half the
batch down to 1 and then in reduced precision; after a cuDNN error, without cuDNN; if Double or Half meets Float, in the
model's widest dtype. After an illegal access or an assert on the GPU, a second process runs with
`CUDA_LAUNCH_BLOCKING=1` to get the true line.

A failure with a derived input proves nothing. If the model rejects it with its own error, other numbers of the same
shape are tried. If none works, there is no verdict: the finding is a warning that asks for `--input` and says whether
the model runs with its own initial weights.

## Why it matters
Matching names and shapes do not make a model run. A file is delivered as repaired only if it ran.

## Fix safety
There is no fix: the finding is about the result. No file is written if the test failed. If the test could not run, the
file is written, because the strict load was proven. `--no-smoke` skips the test.

## Example
A model for images of 3 channels, given `--input 2x1x64x64`:

    the forward test failed in the forward pass, the input does not fit the model: RuntimeError: Given groups=1,
    weight of size [8, 3, 3, 3], expected input[2, 1, 64, 64] to have 3 channels, but got 1 channels instead in conv1
    (Conv2d), at model.py:12 in forward.

## Sources
- `torch.nn.Module.load_state_dict`:
  https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict
- `strict=False` that hid a full mismatch: https://github.com/torchgeo/torchgeo/issues/4036,
  https://github.com/CSAILVision/places365/issues/53"""
