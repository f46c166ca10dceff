"""A map is proved by running the file's model and the target."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ckptfix
from ckptfix.core.finding import Applicability, Finding, Level
from ckptfix.errors import TargetError, UsageError
from ckptfix.rules import key106_renamed_layers
from tests.cli.programs import run_here

WIDTH, HEADS, LAYERS = 32, 4, 2


class Attention(nn.Module):
    """Causal attention of nanoGPT, with its mask among the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias: Any
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = (each.view(batch, length, HEADS, -1).transpose(1, 2) for each in self.c_attn(x).split(WIDTH, 2))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, -torch.inf)
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    """Return the output for the last token; in training, for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        embeddings = {"wte": nn.Embedding(64, WIDTH), "wpe": nn.Embedding(16, WIDTH)}
        blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.transformer: Any = nn.ModuleDict({**embeddings, "h": blocks, "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, 64, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x)[:, [-1], :]), None


def encoder(activation: str = "gelu", norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, activation=activation, norm_first=norm_first, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def timm(name: str, **options: Any) -> Any:
    return importlib.import_module("timm").create_model(name, **options)


VIT = {"img_size": 32, "depth": LAYERS, "embed_dim": 48, "num_heads": 3}
HF_VIT = {"hidden_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 3, "image_size": 32, "patch_size": 16,
          "intermediate_size": 192, "num_labels": 5}  # fmt: skip


def hf(model: str, config: str, **fields: Any) -> Any:
    library = importlib.import_module("transformers")
    return getattr(library, model)(getattr(library, config)(**fields))


def bert(activation: str = "gelu") -> Any:
    fields = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 64}
    return hf("BertModel", "BertConfig", **fields, vocab_size=9, hidden_act=activation).encoder


def torchvision_vit() -> Any:
    return importlib.import_module("torchvision").models.VisionTransformer(32, 16, LAYERS, 3, 48, 192, num_classes=5)


PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "ViT of timm and transformers": (
        lambda: timm("vit_tiny_patch16_224", **VIT, num_classes=5),
        lambda: hf("ViTForImageClassification", "ViTConfig", **HF_VIT),
    ),
    "ViT of torchvision and timm": (torchvision_vit, lambda: timm("vit_tiny_patch16_224", **VIT, num_classes=5)),
    "ConvNeXt": (
        lambda: timm("convnext_atto", depths=(1, 1, 1, 1), dims=(4, 8, 16, 32), num_classes=5, conv_mlp=False),
        lambda: hf("ConvNextForImageClassification", "ConvNextConfig", depths=[1, 1, 1, 1],
                   hidden_sizes=[4, 8, 16, 32], num_labels=5),
    ),
    "Swin": (
        lambda: timm("swin_tiny_patch4_window7_224", img_size=56, depths=(2, 1), num_heads=(2, 4), embed_dim=8,
                     num_classes=5),
        lambda: hf("SwinForImageClassification", "SwinConfig", image_size=56, depths=[2, 1], num_heads=[2, 4],
                   embed_dim=8, num_labels=5),
    ),
    "DINOv2": (
        lambda: timm("vit_small_patch14_dinov2", **{**VIT, "img_size": 28}),
        lambda: hf("Dinov2Model", "Dinov2Config", **{**HF_VIT, "image_size": 28, "patch_size": 14},
                   use_mask_token=False),
    ),
    "nanoGPT and GPT-2": (
        NanoGPT,
        lambda: hf("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_positions=16, n_embd=WIDTH, n_layer=LAYERS,
                   n_head=HEADS, activation_function="gelu", bos_token_id=0, eos_token_id=0),
    ),
    "nn.TransformerEncoder and BERT": (encoder, bert),
}  # fmt: skip


def findings(source: nn.Module, target: nn.Module, **settings: Any) -> list[Finding]:
    report = ckptfix.check(source.state_dict(), target, source_model=source, values=False, **settings)
    return [finding for finding in report.findings if finding.code == "KEY106"]


@pytest.mark.slow
@pytest.mark.parametrize("is_shipped", [True, False], ids=["shipped map", "inferred map"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_map_between_two_libraries_is_verified(pair, is_shipped, monkeypatch):
    if not is_shipped:
        monkeypatch.setattr(key106_renamed_layers, "look_up", lambda *_: None)
    source, target = (make() for make in PAIRS[pair])
    for one, other in ((source, target), (target, source)):
        proposed, *notes = findings(one, other)
        assert ", verified: " in proposed.message.replace(";", ",")
        assert proposed.fix is not None
        assert proposed.fix.applicability is Applicability.SAFE
        assert proposed.evidence["labels"] == {"verified": len(proposed.keys)}
        for note in notes:  # the key bias of attention
            assert note.level is Level.NOTE
            assert all(key.endswith("bias") for key in note.keys)


@pytest.mark.slow
def test_the_repaired_file_computes_the_same():
    source, target = (make() for make in PAIRS["nn.TransformerEncoder and BERT"])
    done, report = ckptfix.repair_state_dict(source.state_dict(), target, source_model=source)
    assert report.exit_code == 0
    target.load_state_dict(done)
    x = torch.randn(2, 8, WIDTH)
    torch.testing.assert_close(target.eval()(x)[0], source.eval()(x), rtol=1e-4, atol=1e-5)


class Heads(nn.Module):
    """Two heads on two tokens, as of DeiT; ``order`` is which of them sees the first."""

    def __init__(self, names: tuple[str, str], order: int = 1) -> None:
        super().__init__()
        self.stem, self.norm, self.mix = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.names = names[::order]
        for name in names:
            self.add_module(name, nn.Linear(8, 5))

    def forward(self, x: Any) -> Any:
        tokens = self.norm(self.stem(x))
        tokens = tokens + torch.tanh(self.mix(tokens)).mean(1, keepdim=True)
        return sum(getattr(self, name)(tokens[:, at]) for at, name in enumerate(self.names)) / 2


class Towers(nn.Module):
    def __init__(self, names: tuple[str, str], join: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.names, self.join = names, join
        for name in names:
            self.add_module(name, nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8)))

    def forward(self, x: Any) -> Any:
        return self.join(*(getattr(self, name)(x) for name in self.names))


FRIENDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "norms before and after": (lambda: encoder(norm_first=True), bert),
    "ReLU and GELU": (lambda: encoder("relu"), bert),
    "two forms of GELU": (encoder, lambda: bert("gelu_new")),
}


@pytest.mark.slow
@pytest.mark.parametrize("pair", FRIENDS)
def test_a_model_of_another_architecture_is_not_filled(pair):
    source, target = (make() for make in FRIENDS[pair])
    (finding,) = findings(source, target, rename_layers=True)
    assert "the outputs of the two models differ" in finding.message
    assert finding.fix is None


def test_equal_names_with_another_function_are_refuted():
    (finding,) = findings(encoder("relu"), encoder())
    assert finding.level is Level.WARNING
    (finding,) = findings(encoder(), encoder())
    assert finding.level is Level.NOTE
    assert "verified" in finding.message


def test_exchanged_heads_are_refuted():
    """The names and the order say that the first is the first; the outputs say that it is the second."""
    source, target = Heads(("head", "head_dist")), Heads(("cls_classifier", "dist_classifier"), -1)
    proposed, note = findings(source, target)
    assert proposed.evidence["labels"] == {"verified": 4}
    assert set(note.keys) == {"cls_classifier.bias", "dist_classifier.bias"}, "their sum is all that is seen"
    done, _ = ckptfix.repair_state_dict(source.state_dict(), target, source_model=source)
    assert torch.equal(done["dist_classifier.weight"], source.state_dict()["head.weight"])


@pytest.mark.parametrize("is_told_apart", [False, True])
def test_twin_towers_are_verified_only_if_the_outputs_tell_them_apart(is_told_apart):
    """Each layer shows by itself; all layers of both towers exchanged do not."""
    join = torch.sub if is_told_apart else torch.add
    proposed, *_ = findings(Towers(("online", "momentum"), join), Towers(("left", "right"), join))
    assert proposed.fix is not None
    assert proposed.fix.applicability is (Applicability.SAFE if is_told_apart else Applicability.UNSAFE)
    assert ("verified" in proposed.evidence["labels"]) is is_told_apart


class Codebook(nn.Module):
    """A quantiser: one of its two tables is used, and the other is kept for its training."""

    def __init__(self, names: tuple[str, ...], is_table_first: bool = True) -> None:
        super().__init__()
        self.names = names
        for name, (ins, outs) in zip(names[:2], ((6, 8), (8, 5)), strict=True):
            self.add_module(name, nn.Linear(ins, outs))
        start = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
        for name in names[2:] if is_table_first else names[:1:-1]:
            self.register_buffer(name, start.clone())

    def forward(self, x: Any) -> Any:
        first, last, table, _ = (getattr(self, name) for name in self.names)
        hidden = first(x)
        return last(hidden + (-torch.cdist(hidden, table)).softmax(-1) @ table)


def test_buffers_are_distinguished_like_weights():
    """Both begin with the same values, and the target has them in the other order."""
    source = Codebook(("enc", "dec", "embed", "embed_avg"))
    target = Codebook(("encoder", "decoder", "codebook", "ema_w"), False)
    file = {**source.state_dict(), "embed_avg": torch.randn(16, 8)}
    fresh = Codebook(("enc", "dec", "embed", "embed_avg"))
    done, _ = ckptfix.repair_state_dict(file, target, source_model=fresh)
    assert torch.equal(done["codebook"], file["embed"])
    assert torch.equal(done["ema_w"], file["embed_avg"])


class Body(nn.Module):
    """A stem, a head, and one more layer; ``end`` makes the outputs of them."""

    def __init__(self, names: Sequence[str], end: Callable[..., Any]) -> None:
        super().__init__()
        self.names, self.end = names, end
        for name, size in zip(names, ((6, 8), (8, 16), (16, 5), (16, 3), (16, 3)), strict=False):
            self.add_module(name, nn.Linear(*size))

    def forward(self, x: Any) -> Any:
        stem, body, *heads = (getattr(self, name) for name in self.names)
        return self.end(body(stem(x).relu()), *heads)


OURS, THEIRS = ("stem", "body", "cls", "box"), ("conv_in", "trunk", "score", "corner")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(
            lambda h, cls, box: cls(h.relu()), lambda h, cls, box: cls(F.relu6(h)), id="one saturates for large inputs"
        ),
        pytest.param(
            lambda h, cls, box: (cls(h), box(h)), lambda h, cls, box: (cls(h), 0 * box(h)), id="one output is zero"
        ),
        pytest.param(
            lambda h, cls, box: (cls(h), box(h) * box.bias),
            lambda h, cls, box: (cls(h), box(h) * box.bias.abs()),
            id="one takes the size of a vector",
        ),
        pytest.param(
            lambda h, cls, box: cls(h), lambda h, cls, box: cls(torch.cat([h[:2], -h[2:]])), id="a third sample"
        ),
    ],
)
def test_a_difference_at_other_inputs_refutes_the_map(ours, theirs):
    (finding,) = findings(Body(OURS, ours), Body(THEIRS, theirs))
    assert "do not compute the same" in finding.message
    assert finding.fix is None


def test_other_epsilons_are_reported_with_what_they_change():
    encoders = (encoder(), encoder())
    for module in encoders[1].modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-3
    (proposed,) = findings(*encoders)
    assert "verified" in proposed.message
    assert "epsilons of their norms, 1e-05 and 0.001, are made equal; with their own, the outputs differ by" in (
        proposed.message
    )
    assert 1e-6 < proposed.evidence["own"] < 1e-2


def test_rows_and_columns_may_be_one_axis():
    """As in Swin, whose features timm has as an image, and transformers as a sequence."""
    image = Body(OURS, lambda h, cls, box: box(cls(h)[..., None].expand(-1, -1, 16)).reshape(-1, 5, 1, 3))
    sequence = Body(THEIRS, lambda h, cls, box: box(cls(h)[..., None].expand(-1, -1, 16)))
    (proposed,) = findings(image, sequence)
    assert proposed.evidence["labels"] == {"verified": 8}


def test_tensors_that_change_no_output_are_not_verified():
    """A layer for the training only, of which the file has two and the target has one."""
    source = Body(("stem", "body", "cls", "aux_early", "aux_late"), lambda h, cls, *others: cls(h))
    target = Body(("conv_in", "trunk", "score", "extra"), lambda h, cls, *others: cls(h))
    proposed, *_ = findings(source, target)
    assert proposed.evidence["labels"].get("verified", 0) <= 6
    assert "verified" not in proposed.message
    assert proposed.fix is None or proposed.fix.applicability is Applicability.UNSAFE


def test_rounding_to_float32_gives_no_verdict():
    def rounded(h: Any, cls: Any, box: Any) -> Any:
        return cls(h.float().double())

    proposed, *_ = findings(Body(OURS, lambda h, cls, box: cls(h)), Body(THEIRS, rounded))
    assert "as if one model computed in float32" in proposed.message
    assert proposed.fix is not None


class Silent(Towers):
    """A model that gives no gradients."""

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            return super().forward(x)


class Noisy(Towers):
    def forward(self, x: Any) -> Any:
        return torch.rand(len(x))


class Pooled(Towers):
    def forward(self, x: Any) -> Any:
        return super().forward(x).sum().reshape(1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        pytest.param(Towers, Silent, "show not all", id="no gradients"),
        pytest.param(Noisy, Towers, "draws random numbers", id="random"),
        pytest.param(Towers, Pooled, "share no shape", id="shapes"),
    ],
)
def test_a_proof_without_a_verdict_keeps_the_labels(source, target, reason):
    proposed, *_ = findings(source(("online", "momentum"), torch.sub), target(("left", "right"), torch.sub))
    assert reason in proposed.message
    assert proposed.fix is not None
    assert proposed.fix.applicability is Applicability.UNSAFE
    assert "verified" not in proposed.evidence["labels"]


def test_a_file_of_another_model_gives_no_verdict():
    towers = Towers(("left", "right"), torch.sub)
    report = ckptfix.check(
        Towers(("online", "momentum"), torch.sub).state_dict(), towers, source_model=Heads(("a", "b")), values=False
    )
    assert any("the file does not fit the source model" in finding.message for finding in report.findings)


def test_the_models_and_torch_stay_as_they_are():
    source, target = Towers(("online", "momentum"), torch.sub), Towers(("left", "right"), torch.sub)
    before = {key: value.clone() for key, value in (source.state_dict() | target.state_dict()).items()}
    findings(source, target)
    after = source.state_dict() | target.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.get_default_dtype() == torch.float32
    assert source.training


def towers() -> nn.Module:
    return Towers(("online", "momentum"), torch.sub)


def other_towers() -> nn.Module:
    return Towers(("left", "right"), torch.sub)


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path) -> None:
    torch.save(towers().state_dict(), tmp_path / "towers.pth")
    command = ("repair", "towers.pth", "--model", f"{__name__}:other_towers")
    assert run_here(*command, "-n", cwd=tmp_path).returncode == 1, "the names do not say which tower is which"
    done = run_here(*command, "--source-model", f"{__name__}:towers", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "verified: the outputs of both models are equal" in done.stdout
    stored, fixed = (torch.load(tmp_path / f"towers{end}.pth", weights_only=True) for end in ("", ".fixed"))
    assert torch.equal(fixed["left.0.weight"], stored["online.0.weight"])
    assert run_here(*command, "--source-model", f"{__name__}:nothing", cwd=tmp_path).returncode == 2


def test_an_input_that_is_not_written_as_one_is_an_error_of_the_caller():
    with pytest.raises(UsageError, match="neither a shape nor a file"):
        ckptfix.repair_state_dict(towers().state_dict(), towers(), source_model=towers(), input="2 by 3")


def test_a_source_model_needs_a_model():
    with pytest.raises(UsageError, match="add"):
        ckptfix.check(towers().state_dict(), source_model=towers())


def test_an_error_names_the_model_that_it_is_about():
    with pytest.raises(TargetError, match=r"source_model='sample_checkpoints.models:nope': .*has no nope"):
        ckptfix.check({"a": torch.ones(2)}, nn.Linear(1, 2), source_model="sample_checkpoints.models:nope")


@pytest.mark.slow
def test_a_file_in_the_layout_of_transformers_4(tmp_path: Path) -> None:
    """``save_pretrained`` writes the names of version 4, which are not those of the model itself."""
    target, make = PAIRS["ViT of timm and transformers"][0](), PAIRS["ViT of timm and transformers"][1]
    source: Any = make()
    source.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    report = ckptfix.check(file, target, source_model=source, values=False)
    (proposed,) = (each for each in report.findings if each.code == "KEY106" and each.fix is not None)
    assert proposed.evidence["labels"] == {"verified": len(proposed.keys)}


@pytest.mark.parametrize("order", [1, -1])
def test_a_map_of_the_user_is_proved_too(order):
    names = dict(zip(("online", "momentum"), ("left", "right")[::order], strict=True))
    given = tuple(f"{old}.*={new}.*" for old, new in names.items())
    file = {f"module.{key}": value for key, value in towers().state_dict().items()}
    report = ckptfix.check(file, other_towers(), source_model=towers(), rename=given, values=False)
    (proved,) = (finding for finding in report.findings if finding.code == "KEY106")
    assert ("verified" in proved.message) is (order == 1)
    assert proved.level is (Level.NOTE if order == 1 else Level.WARNING)
    assert any("the outputs differ with your map" in str(remedy) for remedy in proved.remedies) is (order == -1)
