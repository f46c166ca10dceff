"""FIL110 paddle-weights: the file was written by PaddlePaddle, for another layout of linear layers.

## What it finds
The entry `StructuredToParameterName@@`, which `paddle.save` adds to a state_dict.

## Why it matters
The weights are numpy arrays in a plain pickle, under the names that the same model often has in torch. Paddle stores
the matrix of a linear layer as [in, out], torch as [out, in]: a square one loads without an error, but is wrong.

## Fix safety
There is no fix, and nothing is written: only the model knows which matrices belong to linear layers. Embeddings and
convolutions have the same layout in both.

## Example
    FIL110 weights of PaddlePaddle, whose linear layers are transposed relative to torch's

## Sources
https://www.paddlepaddle.org.cn/documentation/docs/en/api/paddle/nn/Linear_en.html: the weight is [in_features,
out_features]."""

from collections.abc import Iterator

from ckptfix.core.finding import Blocks, Finding, Level, advise
from ckptfix.rules.rule import Context, Rule

_NAMES_OF_PARAMETERS = "StructuredToParameterName@@"


def paddle_weights(rule: Rule, context: Context) -> Iterator[Finding]:
    """Prevent writing Paddle's weights as torch's."""
    root = context.checkpoint.root
    if isinstance(root, dict) and _NAMES_OF_PARAMETERS in root:
        yield rule.finding(
            Level.ERROR,
            "weights of PaddlePaddle, whose linear layers are transposed relative to torch's: square ones load "
            "without an error and give wrong results",
            remedies=advise("convert them with the model's code, which knows its linear layers"),
            blocks=Blocks.WRITING,
        )
