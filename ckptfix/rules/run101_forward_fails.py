"""RUN101 forward-fails: the model does not run on the file.

## What it finds
The forward test starts a process of its own, builds the model with the factory, reads the very file that is to be
delivered, loads it with `strict=True`, and calls the model once in eval mode, on CUDA where there is one, otherwise on
the CPU. All parameters are filled with NaN before the load, so that one which the load passed over cannot go unseen. An
error, a crash by a signal, a time-out and a lack of memory are this finding, with whose fault it is:

- *environment*: the device cannot even multiply two small matrices, memory ran out, an operator does not exist there;
- *input*: the model does not take the input that was given with `--input`, or that input holds NaN or infinities;
- *model*: the model's own code raised, crashed or hung, or mixes dtypes or devices;
- *checkpoint*: the strict load failed, a parameter did not come from the file, or values that are not finite made the
  model raise.

What may be the environment's fault is tried again first, and what helped is said: without memory, with half the batch
down to 1 and then in reduced precision; after an error of cuDNN, without it; where Double or Half meets Float, in the
widest dtype of the model. After an illegal access or an assert on the GPU a second process runs with
`CUDA_LAUNCH_BLOCKING=1`, so that the line is the true one.

An input that ckptfix derived from the first layers proves nothing by failing. Where a model rejects it in words of its
own, other numbers of the same shape are tried. Where none runs there is no verdict: the finding is a warning that asks
for `--input`, and it says whether the model runs with its own initial weights.

## Why it matters
Names and shapes that agree do not make a model run. A file is delivered as repaired only if it did.

## Fix safety
There is no fix: the finding is about the result. No file is written where the test failed; where it could not be run,
the file is written, since the strict load was proven. `--no-smoke` leaves the test out.

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
