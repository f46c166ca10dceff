"""The keys and shapes that a message names."""

import pytest

from ckptfix.explain.mismatch import read_mismatch
from ckptfix.explain.text import messages

FVCORE = """WARNING:fvcore.common.checkpoint:Some model parameters or buffers are not found in the checkpoint:
backbone.stem.conv1.norm.{bias, running_mean, running_var, weight}
backbone.stem.conv1.weight
head.cls_score.{bias, weight}
"""


@pytest.mark.parametrize(
    "sentence",
    [
        "size mismatch for fc.weight: copying a param with shape torch.Size([10, 5]) from checkpoint, the shape in"
        " current model is torch.Size([2, 5]).",
        "size mismatch for fc.weight: copying a param of torch.Size([10, 5]) from checkpoint, where the shape is"
        " torch.Size([2, 5]) in current model.",
        'While copying the parameter named "fc.weight", whose dimensions in the model are torch.Size([2, 5]) and whose'
        " dimensions in the checkpoint are torch.Size([10, 5]).",
        "While copying the parameter named fc.weight, whose dimensions in the model are torch.Size([2, 5]) and whose"
        " dimensions in the checkpoint are torch.Size([10, 5]).",
        "Skip loading parameter fc.weight, required shapetorch.Size([2, 5]), loaded shapetorch.Size([10, 5]). If you"
        " see this, your model does not fully load the pre-trained weight.",
        "Skip loading parameter 'fc.weight' due to incompatible shapes: (10, 5) in the checkpoint but (2, 5) in the"
        " model!",
        "- fc.weight: found shape torch.Size([10, 5]) in the checkpoint and torch.Size([2, 5]) in the model"
        " instantiated",
        "Shape of fc.weight in checkpoint is torch.Size([10, 5]), while shape of head.fc.weight in model is"
        " torch.Size([2,"
        " 5]).",
        "The shape of the parameters of key fc.weight is not the same. Pretrained model: torch.Size([10, 5]); your"
        " network: torch.Size([2, 5]).",
        "Cannot load fc.weight because it has shape (10, 5) in the checkpoint but shape (2, 5) in the model.",
        "ValueError: Cannot load unet because fc.weight expected shape torch.Size([2, 5]), but got torch.Size([10,"
        " 5]).",
        "Cannot load unet because fc.weight expected shape tensor(..., device='meta', size=(2, 5)), but got"
        " torch.Size([10"
        ", 5]).",
        "these keys have mismatched shape:\n+-----+-----+-----+\n| key | expected shape | loaded shape |\n"
        "| fc.weight | torch.Size([2, 5]) | torch.Size([10, 5]) |",
    ],
)
def test_the_two_shapes_in_every_wording(sentence: str):
    (message,) = messages(sentence)
    assert read_mismatch(message).shapes == {"fc.weight": ((10, 5), (2, 5))}


def test_no_mismatch_of_shapes_that_agree():
    sizes = "torch.Size([5, 2]) and whose dimensions in the checkpoint are torch.Size([5, 2])"
    sentence = f'While copying the parameter named "fc.weight", whose dimensions in the model are {sizes}, an exception'
    (message,) = messages(f"{sentence} occurred : ('got mixed torch.Tensor and DTensor',).")
    assert read_mismatch(message).shapes == {}


def test_the_load_report_of_transformers_5():
    rows = """
LlamaForCausalLM LOAD REPORT from: out
Key | Status |
----+--------+-----
h.{0, 2}.mlp.up_proj.weight | MISSING |
h.{3...5}.mlp.{up, down}.weight | UNEXPECTED |
tok.weight | MISMATCH | Reinit due to size mismatch - ckpt: torch.Size([7, 32]) vs model:torch.Size([9, 32])

Notes:
- MISSING:\tthose params were newly initialized because missing from the checkpoint.
"""
    (message,) = messages(rows)
    mismatch = read_mismatch(message)
    assert mismatch.missing == ("h.0.mlp.up_proj.weight", "h.2.mlp.up_proj.weight")
    assert mismatch.unexpected == tuple(f"h.{n}.mlp.{name}.weight" for n in (3, 4, 5) for name in ("up", "down"))
    assert mismatch.shapes == {"tok.weight": ((7, 32), (9, 32))}
    assert mismatch.knows_missing


def test_a_short_name_for_a_billion_keys_takes_no_time():
    row = "x.{0...999}.y.{0...999}.{0...999}.weight | MISSING |"
    (message,) = messages(f"LlamaForCausalLM LOAD REPORT from: out\n{row}")
    mismatch = read_mismatch(message)
    assert mismatch.missing[:2] == ("x.0.y.0.0.weight", "x.0.y.0.1.weight")
    assert len(mismatch.missing) < 100_000
    assert mismatch.is_cut


@pytest.mark.parametrize(
    "sentence",
    [
        "Missing keys (2): ['a.0.weight', 'a.1.weight']\nUnexpected keys (1): ['b.weight']",
        "Missing keys: ['a.0.weight', 'a.1.weight']\nUnexpected keys: ['b.weight']",
        "Missing keys (a.0.weight, a.1.weight) discovered while loading pretrained weights.\nUnexpected keys (b.weight)"
        " found while loading pretrained weights.",
        "Found keys that are in the model state dict but not in the checkpoint: ['a.0.weight', 'a.1.weight']\nFound"
        " keys"
        " that are not in the model state dict but in the checkpoint: ['b.weight']",
        "because the following keys are missing: \n a.0.weight, a.1.weight. \n Please make sure\nSome weights of"
        " the model"
        " checkpoint were not used when initializing UNet: \n ['b.weight']",
        "2024/08/15 12:00:00 - mmengine - WARNING - The model and loaded state dict do not match exactly\n\nunexpected"
        " key in source state_dict: b.weight\n\nmissing keys in source state_dict: a.0.weight, a.1.weight",
    ],
)
def test_lists_that_a_program_prints(sentence: str):
    (message,) = messages(sentence)
    mismatch = read_mismatch(message)
    assert (mismatch.missing, mismatch.unexpected) == (("a.0.weight", "a.1.weight"), ("b.weight",))


def test_the_keys_that_esmfold_misses():
    (message,) = messages("RuntimeError: Keys 'ipa.linear_q.bias, ipa.linear_q.weight' are missing.")
    assert read_mismatch(message).missing == ("ipa.linear_q.bias", "ipa.linear_q.weight")


def test_the_lists_of_fvcore_are_read():
    """It folds the last part of the names, and also lists the keys that it skipped for their shape as missing."""
    skipped = (
        "WARNING [04/16 03:40:21 fvcore.common.checkpoint]: Skip loading parameter 'head.cls_score.weight' to the model"
        " due to incompatible shapes: (81, 1024) in the checkpoint but (4, 1024) in the model!.\n"
    )
    (message,) = messages(f"{skipped}{FVCORE}[04/16 03:40:22 d2.engine.train_loop]: Starting training from iteration 0")
    mismatch = read_mismatch(message)
    assert mismatch.shapes == {"head.cls_score.weight": ((81, 1024), (4, 1024))}
    assert mismatch.missing == (
        *(f"backbone.stem.conv1.norm.{leaf}" for leaf in ("bias", "running_mean", "running_var", "weight")),
        "backbone.stem.conv1.weight",
        "head.cls_score.bias",
    )
