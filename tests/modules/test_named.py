"""Models by name: what a name means, the error for a wrong one, and one repair for each row of docs/models.md."""

import json
import logging
import os
import re
import sys
import types
import warnings
from importlib.metadata import EntryPoint, EntryPoints
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptfix.core.options import OPTIONS
from ckptfix.core.target import target_from_module
from ckptfix.errors import TargetError
from ckptfix.modules import named
from ckptfix.modules.factory import build_module, resolve, target_from_factory
from ckptfix.modules.named import Name
from ckptfix.smoke.exam import Exam, examine
from tests.cli.programs import run_here

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("timm:resnet50", "resnet50", {}),
        ("timm:resnet50.a1_in1k", "resnet50.a1_in1k", {}),
        ("timm:resnet50()", "resnet50", {}),
        ("timm:resnet50[num_classes=10]", "resnet50", {"num_classes": 10}),
        ("timm:resnet50( num_classes = 10 , drop=1e-3 )", "resnet50", {"num_classes": 10, "drop": 1e-3}),
        ("smp:Unet(encoder_name=resnet34)", "Unet", {"encoder_name": "resnet34"}),
        ("smp:Unet(encoder_name='resnet34')", "Unet", {"encoder_name": "resnet34"}),
        ("smp:Unet[channels=[16, 8],size=(1,2)]", "Unet", {"channels": [16, 8], "size": (1, 2)}),
        ("a:b(x='1,2',y={'k': [1, 2]})", "b", {"x": "1,2", "y": {"k": [1, 2]}}),
        ("a:b(x=true,y=None,z=null,w=-1)", "b", {"x": True, "y": None, "z": None, "w": -1}),
        ("transformers:Bert(config=./a-b/c.d)", "Bert", {"config": "./a-b/c.d"}),
        ("detectron2:a/b.yaml[MODEL.ROI_HEADS.NUM_CLASSES=3]", "a/b.yaml", {"MODEL.ROI_HEADS.NUM_CLASSES": 3}),
        ("transformers:./model(1)", "./model(1)", {}),
        ("lightning:pkg.mod:Class(lr=1)", "pkg.mod:Class", {"lr": 1}),
        pytest.param("a:b(x=__import__('os'))", "b", {"x": "__import__('os')"}, id="no expression is evaluated"),
    ],
)
def test_the_parts_of_a_name(text, name, arguments):
    found = Name.of(text)
    assert found is not None
    assert (found.scheme, found.name, found.arguments) == (text.partition(":")[0], name, arguments)


@pytest.mark.parametrize("text", ["pkg.mod:build", "timm", "timm:", ":x"])
def test_invalid_names(text):
    assert Name.of(text) is None


SENTENCES = {
    "timm:resnet81": "timm has no model resnet81; did you mean resnet18",
    "timm:resnet18[num_classes=10": "write arguments as NAME[key=value,key=value]",
    "timm:resnet18[num_clases=10]": "unexpected keyword argument 'num_clases'",
    "timm:resnet18(a=[3)": "'a=[3' does not end; write timm:NAME[key=value,key=value]",
    "timm:resnet18[num_classes=-1]": "num_classes has to be an integer of at least 0, not -1",
    "torchvision:resnet18[num_classes=ten]": "num_classes has to be an integer of at least 0, not 'ten'",
    "torchvision:vit_b_16[image_size=big]": "image_size has to be an integer of at least 1, not 'big'",
    "smp:Unet(encoder_name=resnet18,classes='4')": "classes has to be an integer of at least 0, not '4'",
    "transformers:BertModel(hidden_size=big)": "'hidden_size': TypeError: Field 'hidden_size' expected int, got str",
    "tim:resnet18": "did you mean timm:resnet18?",
    "torchvision:resnet50x": "did you mean resnet50",
    "torchvision:resnet18(classes=1)": "unexpected keyword argument 'classes'",
    "transformers:BertForMaskedLN": "no such folder with a config.json; did you mean BertForMaskedLM",
    "transformers:BertModel(hidden_siz=8)": "BertConfig has no field hidden_siz",
    "transformers:BertModel(config=nowhere)": "config=nowhere: there is no such folder with a config.json",
    "transformers:AutoTokenizer": "AutoTokenizer of transformers is not a model",
    "transformers:AutoModel": "AutoModel takes any architecture: add config=FOLDER",
    "diffusers:UNet2DConditionalModel": "did you mean UNet2DConditionModel",
    "diffusers:DDPMScheduler": "DDPMScheduler of diffusers is not a model",
    "open_clip:ViT-B-31": "did you mean ViT-B-3",
    "open_clip:roberta-ViT-B-32": "connect to 'https://huggingface.co'",
    "smp:Unot": "did you mean Unet",
    "smp:Unet(encoder_name=resnet19)": "has no encoder resnet19; did you mean resnet1",
}


@pytest.mark.slow
@pytest.mark.parametrize("spec", SENTENCES)
def test_a_wrong_name_is_one_line_that_helps(spec):
    with pytest.raises(TargetError) as caught:
        build_module(spec)
    assert SENTENCES[spec] in str(caught.value)
    assert spec in str(caught.value)
    assert caught.value.traceback_text == ""


@pytest.mark.parametrize(
    ("spec", "package"),
    [("timm:resnet18", "timm"), ("smp:Unet", "segmentation-models-pytorch"), ("open_clip:RN50", "open_clip_torch")],
)
def test_a_package_that_is_not_installed(spec, package, monkeypatch):
    module = {"smp": "segmentation_models_pytorch"}.get(spec.partition(":")[0], spec.partition(":")[0])
    monkeypatch.setattr(sys, "meta_path", [_Hiding(module), *sys.meta_path])
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(TargetError, match=f"{module} is not installed; run pip install {package}$"):
        resolve(spec, 0)


class _Hiding:
    """An importer that hides a module."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self.module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_the_shell_completes_every_scheme():
    (option,) = (option for option in OPTIONS if option.name == "model")
    assert {*option.words} == {f"{scheme}:" for scheme in (*named.SCHEMES, "lightning")}


@pytest.mark.parametrize(
    ("spec", "files"),
    [
        ("transformers:bert", ["bert", "bert/config.json"]),
        ("transformers:Bert(config=b)", ["Bert", "Bert/config.json", "b", "b/config.json"]),
        ("pkg.mod:build", []),
    ],
)
def test_configuration_files_of_models(spec, files):
    assert named.configuration_files(spec) == files


def test_arguments_by_position_are_refused():
    with pytest.raises(TargetError, match="takes arguments by name only"):
        build_module("torchvision:resnet18", [10])


def test_model_args_are_added_and_replace():
    head = target_from_factory("timm:resnet18[num_classes=10,in_chans=1]", {"num_classes": 3}).slots
    assert (head["fc.weight"].shape, head["conv1.weight"].shape) == ((3, 512), (64, 1, 7, 7))


def test_a_factory_of_a_package_with_the_name_of_a_scheme(monkeypatch):
    local = types.ModuleType("smp")
    local.build = lambda: nn.Linear(2, 3)  # type: ignore[attr-defined]  # a module that is made here
    monkeypatch.setitem(sys.modules, "smp", local)
    assert isinstance(build_module("smp:build"), nn.Linear)
    made = build_module("timm:create_model", {"model_name": "resnet18", "num_classes": 2})
    assert made.state_dict()["fc.weight"].shape == (2, 512)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "timm:resnet18[pretrained=True]",
        "torchvision:resnet18(weights=IMAGENET1K_V1)",
        "open_clip:RN50(pretrained=openai)",
        "smp:Unet(encoder_name=resnet18,encoder_weights=imagenet)",
        "smp:Unet(encoder_name=resnet18,encoder_weights=None)",
    ],
)
def test_arguments_that_ask_for_weights_fetch_none(spec):
    plain = re.sub(r",?(pretrained|weights|encoder_weights)=\w+", "", spec)
    assert target_from_factory(spec).slots.keys() == target_from_factory(plain).slots.keys()


def find_tiny(name: str):
    """Return the scheme of another package."""
    if name != "tiny":
        raise LookupError(f"there is no {name}; there is tiny")
    return lambda width=2: nn.Linear(width, width)


def test_a_scheme_of_another_package(monkeypatch):
    entry = EntryPoint(name="mylib", value=f"{__name__}:find_tiny", group="ckptfix.models")
    monkeypatch.setattr(named, "entry_points", lambda **which: EntryPoints([entry]).select(**which))
    assert target_from_factory("mylib:tiny[width=5]").slots["weight"].shape == (5, 5)
    with pytest.raises(TargetError, match="there is no huge; there is tiny"):
        resolve("mylib:huge", 0)


def test_warnings_of_a_library_are_suppressed(monkeypatch, caplog, recwarn):
    def noisy(name):
        logging.getLogger("torchao").warning("Failed to load a library")
        warnings.warn("no pretrained weights", stacklevel=1)
        return find_tiny(name)

    monkeypatch.setitem(named.SCHEMES, "noisy", (noisy, "noisy"))
    target_from_factory("noisy:tiny")
    assert (caplog.messages, list(recwarn)) == ([], [])
    logging.getLogger("torchao").warning("of the user")
    assert caplog.messages == ["of the user"]


def test_a_large_language_model_costs_no_memory():
    fields = "hidden_size=4096,intermediate_size=11008,num_hidden_layers=32,num_attention_heads=32,vocab_size=32000"
    target = target_from_factory(f"transformers:LlamaForCausalLM({fields})")
    assert target.remarks == ()
    assert sum(slot.numel for slot in target.slots.values()) > 6.7e9
    tied = target_from_factory("transformers:GPT2LMHeadModel")
    assert tied.ties == (("transformer.wte.weight", "lm_head.weight"),)


_TINY = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,vocab_size=50"
ALIKE = (
    "timm:vit_tiny_patch16_224 timm:swin_tiny_patch4_window7_224 timm:mobilenetv3_small_050 "
    "timm:eva02_tiny_patch14_224 "
    "torchvision:swin_t torchvision:quantization.mobilenet_v2 torchvision:raft_small torchvision:video.mc3_18 "
    "torchvision:detection.ssdlite320_mobilenet_v3_large torchvision:segmentation.lraspp_mobilenet_v3_large "
    "smp:Unet(encoder_name=mobilenet_v2) transformers:GPT2LMHeadModel(n_layer=1,n_embd=24,vocab_size=50) "
    "transformers:T5Model(num_layers=1,d_model=32,d_ff=32,vocab_size=50) transformers:SwinModel(embed_dim=24) "
    f"transformers:BertForMaskedLM({_TINY}) transformers:LlamaForCausalLM({_TINY},intermediate_size=32)"
).split(" ")


@pytest.mark.slow
@pytest.mark.parametrize("spec", ALIKE)
def test_a_model_on_the_meta_device_equals_the_real_one(spec):
    meta, real = target_from_factory(spec), target_from_module(build_module(spec))
    assert list(meta.slots.items()) == list(real.slots.items())
    assert (meta.transient, meta.ties, meta.entries) == (real.transient, real.ties, real.entries)


# Arguments that make a model of the table small, by its line.
SMALL = {
    "open_clip:ViT-S-32-alt": {
        "vision_cfg": {"layers": 1, "width": 64, "head_width": 32, "image_size": 64, "patch_size": 32},
        "text_cfg": {"layers": 1, "width": 32, "heads": 2, "context_length": 16, "vocab_size": 100},
    },
}
ELSEWHERE = {"--model", "lightning", "mypkg.models"}
"""What other tests are for."""

EXTRA = {"torchaudio", "ultralytics", "detectron2"}
"""Packages that are not among those of the tests; a line of one is tried where it is installed."""

ROWS = re.findall(r"^\| `(.*?)` \|", (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), re.MULTILINE)
NAMED = [
    row
    for row in ROWS
    if (library := row.partition(":")[0]) not in ELSEWHERE and (library not in EXTRA or find_spec(library))
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with the configurations that the rows of the table name."""
    import diffusers
    import transformers

    root = tmp_path_factory.mktemp("configurations")
    bert = transformers.BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    bert.architectures = ["BertForMaskedLM"]
    bert.save_pretrained(root / "bert")
    clip = transformers.CLIPTextConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    clip.architectures = ["CLIPTextModel"]
    clip.save_pretrained(root / "pipeline" / "text_encoder")
    diffusers.UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    ).save_config(root / "pipeline" / "unet")
    diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, sample_size=32).save_config(
        root / "pipeline" / "vae"
    )
    (root / "pipeline" / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("row", NAMED)
def test_a_line_of_the_table_repairs_its_file_and_the_model_runs(row, folders, tmp_path, monkeypatch):
    monkeypatch.chdir(folders)
    # This torchvision has no compiled operators; tests/peers supplies the one without a Python version.
    monkeypatch.setattr("torchvision.ops.boxes._assert_has_ops", lambda: None)
    arguments = SMALL.get(row, {})
    model = build_module(row, arguments)
    source, goal = tmp_path / "model.pth", tmp_path / "repaired.pth"
    torch.save(nn.DataParallel(model).state_dict(), source)
    given = ("--model-args", json.dumps(arguments)) if arguments else ()
    done = run_here("repair", source, "--model", row, *given, "--no-smoke", "-o", goal, cwd=folders)
    assert done.returncode == 0, done.stdout + done.stderr
    written = torch.load(goal, weights_only=True)
    assert {key: value.numpy().tobytes() for key, value in written.items()} == {
        key: value.numpy().tobytes() for key, value in model.state_dict().items()
    }
    outcome = examine(Exam(str(goal), row, arguments, device="cpu"))
    assert outcome.is_good, outcome
    assert outcome.outputs, outcome


def test_a_pipeline_names_its_models(folders, monkeypatch):
    monkeypatch.chdir(folders)
    with pytest.raises(TargetError, match=r"pipeline is a pipeline; name one of its models: pipeline/text_encoder, "):
        resolve("diffusers:pipeline", 0)


@pytest.mark.slow
def test_one_command_repairs_a_file_by_name(tmp_path):
    model = build_module("timm:mobilenetv3_small_050[num_classes=10]", seed=1)
    torch.save({"model": nn.DataParallel(model).state_dict(), "epoch": 3}, tmp_path / "model.pth")
    name = "timm:mobilenetv3_small_050[num_classes=10]"
    done = run_here("repair", "model.pth", "--model", name, cwd=tmp_path, PYTHONPATH=os.environ["PYTHONPATH"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "forward test: passed" in done.stdout
    assert "meta device" not in done.stdout
    model.load_state_dict(torch.load(tmp_path / "model.fixed.pth", weights_only=True)["model"])
