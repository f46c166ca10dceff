"""RUN104 forward-devices-differ: the model gives different outputs on the GPU and the CPU.

## What it finds
If the forward test ran on a GPU, the same input runs on the CPU too, and the outputs are compared: the largest
difference, relative to the largest value, against the rounding of the model's dtype (float64 1e-9, float32 1e-3,
float16 2e-2, bfloat16 1e-1). Models that draw random numbers in their forward pass are not compared, nor are models
with more than 500 M parameters, which take too long on the CPU.

## Why it matters
The weights are the same, so one of the two devices computes wrong results: a bad driver, library kernel or memory. Such
a device makes every other result doubtful.

## Fix safety
There is no fix, and the file is written: it is not the checkpoint's fault.

## Example
    the outputs on cuda:0 and on cpu differ by more than rounding explains: against cpu: largest difference 3.1
    (rounding explains 0.004), argmax agrees in 50 %

## Sources
- Numerical accuracy of torch: https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html"""
