"""Messages about the input of a model, or the code around it, for which the checkpoint is blamed wrongly."""

from __future__ import annotations

from ckptfix.explain.record import Advice, Record

_FORWARD = Advice(
    "runs the model on an input that is made for it: if that passes, your input is at fault",
    "ckptfix repair {FILE} --model {MODEL}",
)

INPUTS = (
    Record(
        name="batchnorm-one-value",
        example="ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 512,"
        " 1, 1])",
        patterns=(
            r"Expected more than 1 (?:value per channel|spatial element) when training(?:, got input size"
            r" (?:torch\.Size\()?(?P<size>\[[\d, ]*\]))?",
        ),
        cause="The model is in training mode, and BatchNorm cannot take the mean of one value (input {size}). The"
        " checkpoint is not concerned.",
        advice=(
            Advice("switches to the stored statistics, for inference", code="model.eval()"),
            Advice("drops a last batch of one, for training", code="DataLoader(..., drop_last=True)"),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html",
        unknown={"size": "of one value per channel"},
    ),
    Record(
        name="input-channels",
        example="RuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected input[1, 1, 224, 224] to have 3"
        " channels, but got 1 channels instead",
        patterns=(
            r"Given groups=\d+, weight (?:of size )?(?P<weight>\[[\d, ]+\]), (?:so )?expected"
            r" input\s?(?P<input>\[[\d, ]+\]) to have"
            r" (?P<wanted>\d+) channels, but got (?P<got>\d+)",
            r"Given groups=\d+, weight\[(?P<weight>[\d, ]+)\], so expected input\[(?P<input>[\d, ]+)\] to have"
            r" (?P<wanted>\d+)",
        ),
        cause="The first layer that complains wants {wanted} channels (weight {weight}) and the input has another"
        " number (shape {input}): a grey image, an alpha channel, or channels last as numpy and OpenCV keep them.",
        advice=(
            Advice("puts the channels first", code="x = x.permute(0, 3, 1, 2)"),
            Advice("makes three of a grey image", code='image = image.convert("RGB")'),
            _FORWARD,
        ),
        source="https://pytorch.org/docs/stable/generated/torch.nn.Conv2d.html",
        unknown={"got": "another number of"},
    ),
    Record(
        name="input-dimensions",
        example="RuntimeError: Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: [224,"
        " 224]",
        patterns=(
            r"Expected \d+D \(unbatched\) or \d+D \(batched\) input to \w+, but got input of size:"
            r" (?P<input>\[[\d, ]*\])",
            r"Expected \d-dimensional input for \d-dimensional weight",
            r"expected \d+D or \d+D input \(got \d+D input\)",
            r"expected \d+D input \(got \d+D input\)",
        ),
        cause="The input has another number of dimensions than the layer takes ({input}): mostly the dimension of the"
        " batch is missing.",
        advice=(Advice("adds a batch of one", code="x = x.unsqueeze(0)"), _FORWARD),
        source="https://pytorch.org/docs/stable/generated/torch.unsqueeze.html",
        unknown={"input": "its shape is in the message or not told"},
    ),
    Record(
        name="input-size",
        example="RuntimeError: Calculated padded input size per channel: (2 x 2). Kernel size: (3 x 3). Kernel size"
        " can't be greater than actual input size",
        patterns=(
            r"Kernel size can't be greater than actual input size",
            r"Sizes of tensors must match except in dimension \d+",
        ),
        cause="The input has a height or width that the layers do not take: too small for a kernel, or no multiple of"
        " what the model divides it by (32 in many), so that two branches of it come out unequal. The checkpoint is"
        " seldom concerned.",
        advice=(
            Advice("has a size that most models take", code="x = torch.nn.functional.interpolate(x, size=(224, 224))"),
            _FORWARD,
        ),
        source="https://pytorch.org/docs/stable/generated/torch.nn.functional.interpolate.html",
    ),
    Record(
        name="unequal-sizes",
        example="RuntimeError: The size of tensor a (50) must match the size of tensor b (64) at non-singleton"
        " dimension 1",
        patterns=(
            r"size of tensor a \((?P<one>\d+)\) must match the size of tensor b \((?P<other>\d+)\)"
            r"(?: at non-singleton dimension (?P<dimension>\d+))?",
            r"The expanded size of the tensor \((?P<one>\d+)\) must match the existing size \((?P<other>\d+)\)"
            r"(?: at non-singleton dimension (?P<dimension>\d+))?",
        ),
        cause="Two tensors that are added or multiplied element by element have {one} and {other} elements along"
        " dimension {dimension}. Mostly the input is longer or larger than what the model was made for (a table of"
        " positions has a fixed length), or two branches of the model came out unequal. A strict load checks the"
        " shapes of all weights, so the checkpoint is seldom concerned once it went through.",
        advice=(
            Advice("Give the input the length or size that the model was trained with: crop, pad or resize it."),
            Advice("shows the sizes of the weights, the table of positions among them", "ckptfix inspect {FILE} -v"),
            _FORWARD,
        ),
        source="https://pytorch.org/docs/stable/notes/broadcasting.html",
        unknown={"dimension": "that the message does not tell"},
        general=True,  # in a step of an optimizer it is the state of another model
    ),
    Record(
        name="forward-arguments",
        example="TypeError: Net.forward() missing 1 required positional argument: 'mask'",
        patterns=(
            r"forward\(\) missing \d+ required (?:positional|keyword-only) arguments?: (?P<arguments>'\w+'"
            r"(?:,? (?:and )?'\w+')*)",
            r"forward\(\) got an unexpected keyword argument (?P<arguments>'\w+')",
            r"forward\(\) got multiple values for argument (?P<arguments>'\w+')",
            r"forward\(\) takes (?:from )?\d+ (?:to \d+ )?positional arguments? but \d+ (?:was|were) given",
        ),
        cause="The model is called with other arguments than its forward takes ({arguments}): it wants several inputs,"
        " or the code that calls it was written for another model or release. The checkpoint is not concerned.",
        advice=(
            Advice("shows what it takes", code="import inspect; print(inspect.signature(model.forward))"),
            Advice(
                "runs the model with one --input for each argument, by name",
                "ckptfix repair {FILE} --model {MODEL} --input x=2x3x224x224 --input ids=2x16:int:0:1000",
            ),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.forward",
        unknown={"arguments": "their number differs"},
    ),
    Record(
        name="matrix-shapes",
        example="RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x2048 and 512x10)",
        patterns=(
            r"mat1 and mat2 shapes cannot be multiplied \((?P<one>\d+x\d+) and (?P<other>\d+x\d+)\)",
            r"size mismatch, m1: (?P<one>\[[^\]]+\]), m2: (?P<other>\[[^\]]+\])",
            r"mat1 dim 1 must match mat2 dim 0",
        ),
        cause="A linear layer got features of another number than it has weights for ({one} and {other}): the input"
        " has another size than the model was made for, or the layers before it are of another variant.",
        advice=(
            Advice("Resize the input to what the model was trained with (224 x 224 for most of ImageNet's)."),
            _FORWARD,
        ),
        source="https://pytorch.org/docs/stable/generated/torch.nn.Linear.html",
        unknown={"one": "the input", "other": "the weight"},
    ),
    Record(
        name="index-out-of-range",
        example="IndexError: index out of range in self",
        patterns=(r"index out of range in self", r"index out of range at .{0,80}TH"),
        cause="A token id is not below the size of the embedding: the tokenizer is not the one of this checkpoint,"
        " tokens were added without resizing, or the text is longer than there are positions.",
        advice=(
            Advice("shows the size of the embedding in the file", "ckptfix inspect {FILE} --verbose"),
            Advice("shows what to compare", code="print(input_ids.max(), model.get_input_embeddings().weight.shape)"),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.nn.Embedding.html",
    ),
    Record(
        name="label-out-of-range",
        example="IndexError: Target 10 is out of bounds.",
        patterns=(r"Target (?P<target>-?\d+) is out of bounds",),
        cause="The label {target} is not one of the classes that the model puts out: labels count from 0, and the head,"
        " or the checkpoint that it came from, may have another number of classes than the data.",
        advice=(
            Advice("shows what to compare", code="print(labels.min(), labels.max(), model(x).shape)"),
            Advice("shows the shape of the head in the file", "ckptfix inspect {FILE}"),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
        codes=("FIT103",),
    ),
    Record(
        name="negative-strides",
        example="ValueError: At least one stride in the given numpy array is negative, and tensors with negative"
        " strides are not currently supported.",
        patterns=(
            r"stride in the given numpy array is negative",
            r"some of the strides of a given numpy array are negative",
            r"tensors with negative strides are not",
        ),
        cause="A numpy array that was flipped or read backwards (image[:, :, ::-1], np.flip) cannot become a tensor"
        " without a copy. The checkpoint is not concerned.",
        advice=(Advice("copies it", code="torch.from_numpy(array.copy())"),),
        source="https://pytorch.org/docs/stable/generated/torch.from_numpy.html",
    ),
    Record(
        name="view-of-strided",
        example="RuntimeError: view size is not compatible with input tensor's size and stride (at least one"
        " dimension spans across two contiguous subspaces). Use .reshape(...) instead.",
        patterns=(
            r"view size is not compatible with input tensor'?s size and stride",
            r"input is not contiguous(?! at)",
        ),
        cause="view needs a tensor whose elements lie in order, and this one was transposed or sliced. Code of"
        " another release may meet it where a layer's output lies in another order now. The checkpoint is not"
        " concerned.",
        advice=(
            Advice(
                "copies where it must", code="x.reshape(...)  # in place of x.view(...), or x.contiguous().view(...)"
            ),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.Tensor.view.html",
    ),
)
