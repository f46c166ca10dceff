"""RUN104 forward-devices-differ: the model gives something else on the GPU than on the CPU.

## What it finds
Where the forward test ran on a GPU, the same input runs on the CPU too, and the outputs are compared: the largest
difference, as a share of the largest value, against what rounding allows in the dtype of the model (float64 1e-9,
float32 1e-3, float16 2e-2, bfloat16 1e-1). A model that draws random numbers in its forward pass is not compared, nor
is one of more than 500 M parameters, for which the CPU takes too long.

## Why it matters
The weights are the same, so that one of the two devices computes wrongly: a driver, a kernel of a library, memory that
fails. Such a device makes every other result doubtful.

## Fix safety
There is no fix, and the file is written: it is not the checkpoint's fault.

## Example
    the outputs on cuda:0 and on cpu differ by more than rounding explains: against cpu: largest difference 3.1
    (rounding explains 0.004), argmax agrees in 50 %

## Sources
- Numerical accuracy of torch: https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html"""
