import itertools
import shlex

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import ckptfix
from ckptfix.cli.program import exit_code
from ckptfix.core.coverage import Coverage
from ckptfix.core.edits import Rename
from ckptfix.core.finding import FILE, Applicability, Blocks, Finding, Fix, Level, Remedy, advise
from ckptfix.core.option import CHECK, REPAIR
from ckptfix.report.advice import Presentation, advice_lines, mark, next_command
from ckptfix.report.style import TextFormat
from tests.reading.folders.ranks.genuine import unpacked
from tests.report.samples import COUNTER, EXTRA, MISMATCH, MISSING, NOTE, PREFIX, repaired, report


def told(report, mode=CHECK):
    return TextFormat().write(advice_lines(report, Presentation(mode))).splitlines()


@pytest.mark.parametrize(
    "findings", [pytest.param((), id="clean"), pytest.param((NOTE,), id="a note asks for nothing")]
)
def test_nothing_to_do_after_a_check(findings):
    assert told(report(*findings)) == []


def test_nothing_is_left_of_a_file_that_fits():
    assert told(report(coverage=Coverage(4, 4, 0, 0), target="zoo:tiny")) == []


def test_what_is_at_a_url_is_downloaded_first():
    lines = told(report(PREFIX, source="https://host/runs/a b.pth"))
    assert lines[-2:] == ["first: curl -LO 'https://host/runs/a b.pth'", "  run: ckptfix repair 'a b.pth'"]
    lines = told(report(PREFIX, source="hf://org/repo/model.safetensors"))
    assert lines[-2:] == [
        "first: hf download org/repo model.safetensors --local-dir .",
        "  run: ckptfix repair model.safetensors",
    ]


def test_nothing_is_left_after_a_repair():
    assert told(repaired(), REPAIR) == ["nothing left to do"]


@pytest.mark.parametrize(
    ("findings", "command"),
    [
        pytest.param((MISMATCH,), "", id="no fix, no command"),
        pytest.param((PREFIX,), "ckptfix repair resnet.pth", id="safe"),
        pytest.param((EXTRA, PREFIX), "ckptfix repair resnet.pth --unsafe-fixes", id="unsafe"),
        pytest.param((MISSING,), "ckptfix repair resnet.pth --fill target", id="a flag of its own is enough"),
    ],
)
def test_command_after_a_check(findings, command):
    assert next_command(report(*findings), Presentation()) == command


def test_the_command_is_quoted_and_keeps_what_was_given():
    presentation = Presentation(choices={"model": "zoo:resnet"})
    assert (
        next_command(report(EXTRA, source="my file.pth"), presentation)
        == "ckptfix repair 'my file.pth' --model zoo:resnet --unsafe-fixes"
    )


def test_a_repair_does_not_advise_itself():
    assert next_command(report(COUNTER), Presentation(REPAIR)) == ""


def test_a_flag_that_was_given_is_not_given_twice():
    presentation = Presentation(REPAIR, choices={"fill": "donor.pth"})
    assert next_command(report(MISSING), presentation) == ""


def test_what_to_do_about_each_finding():
    assert told(report(PREFIX, EXTRA, MISSING, MISMATCH)) == [
        "left:",
        "  FIT102 unexpected-key: --unsafe-fixes applies the fix, which invents, drops or changes values",
        "  FIT101 missing-key: --fill target takes the initial values",
        "  FIT103 shape-mismatch: no automatic repair; see ckptfix rule FIT103",
        "  run: ckptfix repair resnet.pth --unsafe-fixes --fill target",
    ]


def test_findings_with_the_same_advice_share_a_line():
    same = (Remedy.of("name the model that the file belongs to"),)
    lines = told(report(replace(EXTRA, remedies=same), replace(MISSING, remedies=same), MISMATCH))
    assert lines[:2] == [
        "left:",
        "  FIT102 unexpected-key, FIT101 missing-key: name the model that the file belongs to",
    ]
    assert lines[2].startswith("  FIT103 shape-mismatch: ")


def test_a_rename_is_not_a_change_of_values():
    fix = Fix((Rename("a.weight", "b.weight"),), Applicability.UNSAFE)
    assert told(report(replace(PREFIX, fix=fix)))[1] == (
        f"  {PREFIX.code} {PREFIX.name}: --unsafe-fixes applies the fix, which renames keys, and nothing confirms the "
        "new names"
    )


def test_a_command_for_each_set_of_weights():
    """What a choice may solve is not solved by another flag before it."""
    sets = replace(
        MISMATCH,
        code="KEY104",
        blocks=Blocks.FILLING,
        remedies=tuple(Remedy((("weights", name),), "uses only this set") for name in "qk"),
    )
    lines = told(report(sets, replace(sets, code="KEY106"), EXTRA, MISSING))  # two findings may offer the same choice
    assert [line.strip() for line in lines if "ckptfix repair" in line] == [
        "run: ckptfix repair resnet.pth --weights q",
        "or: ckptfix repair resnet.pth --weights k",
    ]


def test_what_becomes_untrained_is_of_the_set_that_was_taken():
    """Nothing is known about the other one yet: its price would differ."""
    sets = replace(MISMATCH, code="FIL101", remedies=tuple(Remedy((("weights", name),), "takes it") for name in "qk"))
    fill = Remedy((("fill", "target"),), "takes the model's", (("fc.weight", 4),))
    lines = told(report(sets, replace(MISSING, remedies=(fill,)), coverage=Coverage(4, 8, 0, 0)))
    commands = [line.strip() for line in lines if "ckptfix repair" in line]
    assert ["--fill target" in command for command in commands] == [True, False]


@pytest.mark.parametrize(
    ("remedy", "command"),
    [
        pytest.param(Remedy(text="merge the adapter first"), "", id="words make no command"),
        pytest.param(Remedy((("fill", FILE),), "takes them from there"), "", id="nor does a value to be given"),
        pytest.param(Remedy((("weights", "net A"),), "takes it"), "--weights 'net A'", id="a blank in a value"),
        pytest.param(Remedy((("format", "pth"),), "keeps it"), "--format pth", id="an option with a value"),
    ],
)
def test_what_makes_a_command(remedy, command):
    made = next_command(report(replace(MISMATCH, remedies=(remedy,))), Presentation(REPAIR))
    assert made == (f"ckptfix repair resnet.pth {command}" if command else "")


def test_nothing_is_filled_or_dropped_while_the_weights_are_in_another_form():
    elsewhere = replace(MISMATCH, blocks=Blocks.FILLING, remedies=advise("merge the adapter first"))
    assert next_command(report(MISSING, EXTRA, elsewhere), Presentation(REPAIR)) == ""
    assert next_command(report(MISSING, EXTRA), Presentation(REPAIR)).endswith("--unsafe-fixes --fill target")


def test_the_price_of_a_fill():
    coverage = Coverage(20_520_000, 20_007_000, 0, 0)
    assert told(report(MISSING, coverage=coverage))[-1].strip() == "`fc` becomes untrained: 2.5 % of the model"


def test_a_model_of_random_weights_is_asked_for_by_its_own_flag():
    coverage = Coverage(100, 41, 0, 0, {"target": 59})
    lines = told(report(coverage=coverage, is_refused=True), REPAIR)
    assert lines[0] == "left: 59 % of the parameters are untrained"
    assert "--allow-untrained" in lines[1]


def test_what_a_plan_leaves_is_reported():
    lines = TextFormat().write(advice_lines(report(PREFIX), Presentation(REPAIR, choices={"apply": "plan.json"})))
    assert lines.splitlines() == ["left:", "  KEY102 wrapper-prefix: not in the plan"]


def layers(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def adapted() -> dict[str, torch.Tensor]:
    """An unmerged LoRA: its layers have other names, and the trained part is next to them."""
    state = {}
    for key, value in layers(8, 8, 8).state_dict().items():
        path, _, leaf = key.rpartition(".")
        state[f"base_model.model.{path}.base_layer.{leaf}"] = value
        state[f"base_model.model.{path}.lora_A.default.weight"] = torch.ones(2, 8)
        state[f"base_model.model.{path}.lora_B.default.weight"] = torch.ones(8, 2)
    return state


def fused() -> nn.Module:
    """One projection for query, key and value, where the file has three."""
    model = nn.Module()
    model.qkv, model.out = nn.Linear(8, 24), nn.Linear(8, 8)
    return model


def squares(*names: str) -> dict[str, torch.Tensor]:
    return {key: value for name in names for key, value in named(name, nn.Linear(8, 8)).items()}


def named(name: str, layer: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{name}.{key}": value for key, value in layer.state_dict().items()}


def without_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: torch.empty(0) if value.dim() > 1 else value for key, value in model.state_dict().items()}


def transposed(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.t() if value.dim() > 1 else value for key, value in model.state_dict().items()}


def test_a_check_gives_the_command_for_a_layout_that_a_repair_restores(tmp_path, monkeypatch):
    """A problem that a safe fix solves does not block its command."""
    monkeypatch.chdir(tmp_path)
    torch.save({"proj.weight": torch.randn(8, 8, 1, 1), "proj.bias": torch.randn(8)}, "conv.pth")
    torch.save({"proj.weight": torch.randn(8, 8), "proj.bias": torch.randn(8)}, "linear.pth")
    report = ckptfix.check("conv.pth", like="linear.pth")
    command = next_command(report, Presentation(choices={"like": "linear.pth"}))
    assert command == "ckptfix repair conv.pth --like linear.pth"
    assert exit_code(shlex.split(command)[1:]) == 0
    assert torch.load("conv.fixed.pth", weights_only=True)["proj.weight"].shape == (8, 8)


def int8(model: nn.Module) -> dict[str, torch.Tensor]:
    """As bitsandbytes has it: codes and the largest number of each row."""
    state = model.state_dict()
    for key in [key for key in state if key.endswith("weight")]:
        largest = state[key].abs().amax(1)
        state[key.replace("weight", "SCB")] = largest
        state[key] = torch.round(state[key] * 127 / largest[:, None]).to(torch.int8)
    return state


def two_networks(model: nn.Module) -> dict[str, torch.Tensor]:
    """As ema_pytorch has it, with a wrapper around the average."""
    state = {"initted": torch.tensor(True), "step": torch.tensor(9)}
    for prefix in ("online_model.", "ema_model.module."):
        state |= {prefix + key: value.clone() for key, value in model.state_dict().items()}
    return state


@pytest.mark.parametrize(
    ("make", "option"), [(int8, "--unsafe-fixes"), (two_networks, "--weights online_model")], ids=["int8", "ema"]
)
def test_a_check_gives_a_command_that_works(make, option, tmp_path, monkeypatch):
    """Keys covered by another rule's fix, or outside of all sets that the names allow, do not block it."""
    monkeypatch.chdir(tmp_path)
    model = layers(8, 8, 6)
    torch.save(make(model), "old.pth")
    torch.save(model.state_dict(), "model.pth")
    command = next_command(ckptfix.check("old.pth", like="model.pth"), Presentation(choices={"like": "model.pth"}))
    assert command == f"ckptfix repair old.pth --like model.pth {option}"
    assert exit_code(shlex.split(command)[1:]) == 0
    model.load_state_dict(torch.load("old.fixed.pth", weights_only=True))


CLASSES = [
    pytest.param(adapted(), layers(8, 8, 8), id="an adapter that was not merged"),
    pytest.param(squares("q", "k", "v", "out"), fused(), id="another layout"),
    pytest.param(squares("alpha", "beta", "gamma"), layers(8, 8, 8, 8), id="other names"),
    pytest.param(without_weights(layers(8, 8, 8)), layers(8, 8, 8), id="the empty weights of ZeRO 3"),
    pytest.param(layers(8, 6, 6, 3).state_dict(), layers(8, 9, 9, 3), id="another variant"),
    pytest.param(
        transposed(layers(8, 8, 6, 9)),
        layers(8, 8, 6, 9),
        id="transposed matrices",
    ),
    pytest.param({"weight": torch.ones(4, 8, 1, 1)}, nn.Conv2d(4, 8, 1, bias=False), id="a kernel of 1x1 transposed"),
]


@pytest.mark.parametrize(("file", "model"), CLASSES)
def test_no_command_makes_untrained_what_the_file_has_in_another_form(file, model):
    report = ckptfix.check(file, model)
    words = shlex.split(next_command(report, Presentation()))
    assert not {"--fill", "--drop-mismatched"} & set(words)
    if "--unsafe-fixes" in words:
        repaired = ckptfix.repair(file, model, unsafe_fixes=True).report
        assert repaired.obstacles or (repaired.coverage and repaired.coverage.share == 1.0)


@pytest.mark.parametrize("model", [None, layers(8, 8)])
def test_no_command_for_one_rank_of_a_model(model):
    file = {"_fsdp_wrapped_module._flat_param": torch.ones(9)}
    assert next_command(ckptfix.check(file, model), Presentation()) == ""


def test_no_command_leaves_the_optimizer_of_one_rank_out(tmp_path):
    """Its weights would still be those of one rank."""
    folder, _ = unpacked("fsdp2_w4", tmp_path)
    alone = (folder / "model_world_size_4_rank_1.pt").rename(tmp_path / "alone.pt")
    report = ckptfix.check(alone)
    assert {"FIL105", "OPT102"} <= {finding.code for finding in report.left}
    assert next_command(report, Presentation()) == ""


@pytest.mark.parametrize(("file", "model"), CLASSES)
def test_asking_for_every_fill_writes_no_model_of_random_weights(file, model, tmp_path):
    report = ckptfix.repair(
        file, model, output=tmp_path / "out.pth", fill="target", drop_mismatched=True, unsafe_fixes=True
    ).report
    assert report.coverage is not None
    assert report.exit_code == 1 or report.coverage.share == 1.0
    assert report.output is None or report.coverage.share >= 0.5


@pytest.mark.parametrize(
    ("finding", "fixed", "text"),
    [
        pytest.param(MISMATCH, False, "", id="no fix"),
        pytest.param(
            Finding("X1", "x", Level.ERROR, "m", fix=Fix((), Applicability.DISPLAY_ONLY)),
            False,
            "",
            id="shown",
        ),
        pytest.param(PREFIX, False, "[fixable]", id="safe"),
        pytest.param(EXTRA, False, "[fixable with --unsafe-fixes]", id="unsafe"),
        pytest.param(
            Finding("X1", "x", Level.ERROR, "m", fix=Fix((), Applicability.UNSAFE, asked=True)),
            False,
            "[fixable]",
            id="unsafe but asked for",
        ),
        pytest.param(EXTRA, True, "[fixed]", id="fixed"),
    ],
)
def test_mark(finding, fixed, text):
    assert mark(finding, report(finding, fixed=(finding,) if fixed else ()), Presentation()) == text


def test_what_is_not_written_only_would_be_fixed():
    for held in ({"is_dry_run": True}, {"is_refused": True}):
        assert mark(PREFIX, report(PREFIX, fixed=(PREFIX,), **held), Presentation()) == "[would be fixed]"


def test_verbose_lifts_the_limit():
    assert (Presentation().limit, Presentation(verbose=True).limit) == (12, None)
