"""How often a model is named right, and that none is named wrong: 200 models of the table as people save them, and 100
nets that the table does not have."""

import json
import random
import shlex
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from ckptfix.core.likeness import Fit
from ckptfix.known.recognition import recognise
from ckptfix.known.table import KnownStructures, is_of_head, is_passing, known_target, table
from tests.cli.programs import run_here

PREFIXES = ("", "module.", "model.", "_orig_mod.", "module._orig_mod.", "backbone.", "net.encoder.", "module.model.")
CHANGES = ("none", "classes", "channels", "image", "no head", "other head", "no counters")


def as_saved(chance, name, change):
    """Return the shapes of a model after a change, and the expected verdict; None if the change does not apply."""
    entry = table().find(name)
    assert entry is not None
    structure, model = entry
    sizes = dict(model.sizes)
    expected = Fit.EXACT
    if change == "classes" and sizes.get("c"):
        sizes["c"] = chance.choice((2, 10, 21, 37, 101))
    elif change == "channels" and "i" in sizes:
        sizes["i"] = chance.choice((1, 2, 4, 12))
    elif change == "image" and "s" in sizes:
        sizes["s"] = 2 * sizes["s"]
    elif change in ("no head", "other head") and sizes.get("c"):
        sizes["c"], expected = 0, Fit.HEADLESS
    elif change not in ("none", "no counters"):
        return None
    try:
        target = structure.target(name, sizes, model.sizes)
    except ValueError:  # its tables do not grow regularly with the image
        return None
    shapes = {key: slot.shape for key, slot in target.slots.items()}
    if change == "no counters":
        shapes = {key: shape for key, shape in shapes.items() if not key.endswith("num_batches_tracked")}
    if change == "other head":
        head = next(key for key, shape in structure.shapes.items() if is_of_head(shape)).rpartition(".")[0]
        shapes |= {f"{head}.1.weight": (7, 33), f"{head}.1.bias": (7,)}
        expected = Fit.OTHER_HEAD
    return shapes, expected


def has_this_structure(found, shapes, prefix):
    """Return whether another model with exactly the file's keys was named: usually a trunk that is a model itself."""
    target = known_target(found.target.removeprefix("known:"))
    saved = {f"{prefix}{key}": shape for key, shape in shapes.items()}
    own = {key.removeprefix(found.prefix): shape for key, shape in saved.items() if key.startswith(found.prefix)}
    if len(saved) - len(own) != found.outside:
        return False
    tied = {key for key, group in target.tie_of.items() if any(other in own for other in group)}
    wanted = {key: slot.shape for key, slot in target.slots.items() if key in own or key not in tied}
    known, given = (
        {key: shape for key, shape in each.items() if not is_passing(key, shape or ())} for each in (wanted, own)
    )
    return known == given


@pytest.fixture
def compared(monkeypatch):
    """Return the tensors of each structure that is compared in full, which takes most of the time."""
    counts: list[int] = []
    real = KnownStructures.structure

    def structure(self, number):
        counts.append(self.count(number))
        return real(self, number)

    monkeypatch.setattr(KnownStructures, "structure", structure)
    return counts


@pytest.mark.slow
def test_models_of_the_table_are_named(compared):
    chance = random.Random(20)
    names = list(table().names())
    results: Counter[str] = Counter()
    failed: list[tuple[object, ...]] = []
    while results.total() < 200:
        name, change, prefix = chance.choice(names), chance.choice(CHANGES), chance.choice(PREFIXES)
        saved = as_saved(chance, name, change)
        if saved is None or len(saved[0]) < 12:
            continue
        shapes, expected = saved
        compared.clear()
        found = recognise({prefix + key: shape for key, shape in shapes.items()})
        assert sum(compared) < 8_000, name
        if found is None or not found.is_named:
            results["silent"] += 1
            failed.append(("silent", name, change, prefix, found and found.names[:3]))
        elif name not in found.names and not has_this_structure(found, shapes, prefix):
            results["wrong"] += 1
            failed.append(("wrong", name, change, prefix, found.fit, found.names[:3]))
        else:
            results["right" if found.fit is expected else "right, otherwise"] += 1
    assert results["wrong"] == 0, failed
    assert results["silent"] <= 4, failed


# ---- models that are not in the table


def _unknown_nets():
    """Return 80 nets: known architectures with other widths and depths, and custom ones."""
    import timm
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        ViTConfig,
        ViTForImageClassification,
    )

    bare: dict[str, Any] = {"num_heads": 6, "weight_init": "skip"}  # drawing takes half of the time
    resnet, vit, convnext = timm.models.resnet, timm.models.vision_transformer, timm.models.convnext
    for depths in ((1, 1, 1, 1), (2, 2, 2, 1), (3, 4, 5, 3), (2, 3, 4, 3), (1, 2, 3, 1), (5, 5, 5, 5)):
        yield f"ResNet {depths}", ResNet(BasicBlock, depths)
        yield f"ResNet bottleneck {depths}", ResNet(Bottleneck, depths, num_classes=10)
    for width in (32, 48, 96):
        yield f"ResNet width {width}", ResNet(Bottleneck, (3, 4, 6, 3), width_per_group=width)
        block = resnet.Bottleneck
        yield f"timm ResNet width {width}", resnet.ResNet(block, (3, 4, 6, 3), base_width=width, cardinality=3)
    for width, depth in product((132, 204, 300, 516), (5, 11, 13)):
        yield f"ViT {width} {depth}", vit.VisionTransformer(embed_dim=width, depth=depth, **bare)
    for width, depth in product((192, 768), (7, 17)):
        yield f"ViT {width} {depth}", vit.VisionTransformer(embed_dim=width, depth=depth, **bare)
    for patch in (10, 28):
        yield f"ViT patch {patch}", vit.VisionTransformer(img_size=280, patch_size=patch, embed_dim=384, **bare)
    for widths in ((40, 80, 160, 320), (72, 144, 288, 576), (100, 200, 400, 800)):
        yield f"ConvNeXt {widths}", convnext.ConvNeXt(depths=(3, 3, 9, 3), dims=widths)
    for width, depth in product((128, 640), (2, 5, 13)):
        sizes = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": 4, "vocab_size": 99}
        wide = {**sizes, "intermediate_size": 3 * width}
        yield f"BERT {wide}", BertForSequenceClassification(BertConfig(**wide))
        yield f"LLaMA {wide}", LlamaForCausalLM(LlamaConfig(**wide))
        yield f"ViT of transformers {wide}", ViTForImageClassification(ViTConfig(**wide))
        yield f"GPT-2 {width} {depth}", GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=depth, n_head=4))
    for width, depth in product((16, 33, 70), (3, 6, 9)):
        plain = [nn.Sequential(nn.Conv2d(width, width, 3), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(depth)]
        yield f"plain {width} {depth}", nn.Sequential(*plain, nn.Linear(width, 10))
        yield f"encoder {width} {depth}", nn.TransformerEncoder(nn.TransformerEncoderLayer(2 * width, 2), depth)
        yield f"LSTM {width} {depth}", nn.LSTM(width, 2 * width, depth, bidirectional=True)


@pytest.mark.slow
def test_noop_unknown_models(compared):
    count, wrong = 0, []
    with torch.device("meta"):
        for what, net in _unknown_nets():
            count += 1
            compared.clear()
            found = recognise({key: tuple(tensor.shape) for key, tensor in net.state_dict().items()})
            assert sum(compared) < 10_000, what
            if found is not None and found.is_named:
                wrong.append((what, found.fit, found.names[:3]))
    assert count >= 80
    assert wrong == []


# ---- on the command line


@pytest.fixture
def folder(tmp_path):
    """Return a file of a squeezenet with 10 classes under DataParallel, and one that resembles no model."""
    shapes = known_target("torchvision/squeezenet1_1[num_classes=10]").slots
    state_dict = {f"module.{key}": torch.randn(slot.shape or ()) for key, slot in shapes.items()}
    torch.save({"state_dict": state_dict}, tmp_path / "squeeze.pth")
    torch.save({f"own.{number}.weight": torch.randn(3, number + 1) for number in range(20)}, tmp_path / "own.pth")
    return tmp_path


def test_a_check_names_the_model_and_the_command_that_continues(folder):
    done = run_here("check", "squeeze.pth", cwd=folder)
    said, command = done.stdout.splitlines()[-5:-3] if "or:" in done.stdout else done.stdout.splitlines()[-4:-2]
    assert said == "looks like: torchvision squeezenet1_1, 10 classes, under `module.`"
    words = shlex.split(command.partition("compare: ")[2])
    assert words[:3] == ["ckptfix", "check", "squeeze.pth"]
    compared = run_here(*words[1:], cwd=folder)
    assert "100 % of 728 k parameters" in compared.stdout
    repaired = run_here("repair", *words[2:], cwd=folder)
    assert repaired.returncode == 0
    expected = known_target(words[-1].removeprefix("known:")).slots
    written = torch.load(folder / "squeeze.fixed.pth", weights_only=True)["state_dict"]
    assert {key: tuple(tensor.shape) for key, tensor in written.items()} == {
        key: slot.shape for key, slot in expected.items()
    }


def test_noop_a_file_like_no_known_model(folder):
    done = run_here("check", "own.pth", cwd=folder)
    assert (done.returncode, "looks like" in done.stdout) == (0, False)
    (report,) = json.loads(run_here("check", "own.pth", "--output-format", "json", cwd=folder).stdout)["reports"]
    assert report["likeness"] is None


@pytest.mark.parametrize("command", ["check", "repair"])
def test_a_file_is_likened_with_the_names_of_the_map(folder, command):
    pattern = {"features.*": "body_*", "classifier.*": "top_*"}
    away = [word for old, new in pattern.items() for word in ("--rename", f"{old}={new}")]
    back = [word for old, new in pattern.items() for word in ("--rename", f"{new}={old}")]
    done = run_here("repair", "squeeze.pth", *away, "-o", f"away_{command}.pth", cwd=folder)
    assert done.returncode == 0
    assert "looks like" not in done.stdout
    assert "looks like: torchvision squeezenet1_1" in run_here(command, f"away_{command}.pth", *back, cwd=folder).stdout


def test_a_repaired_file_is_likened_with_its_new_names(folder):
    done = run_here("repair", "squeeze.pth", cwd=folder)
    assert "looks like: torchvision squeezenet1_1, 10 classes\n" in done.stdout


def test_a_likeness_is_not_a_finding(folder):
    (report,) = json.loads(run_here("check", "squeeze.pth", "--output-format", "json", cwd=folder).stdout)["reports"]
    assert report["likeness"]["target"] == "known:torchvision/squeezenet1_1[num_classes=10]"
    assert {finding["code"] for finding in report["findings"]} == {"KEY102"}
    inspected = json.loads(run_here("inspect", "squeeze.pth", "--output-format", "json", cwd=folder).stdout)
    assert inspected["likeness"] == report["likeness"]
    against = run_here("check", "squeeze.pth", "--like", report["likeness"]["target"], cwd=folder)
    assert "looks like" not in against.stdout
