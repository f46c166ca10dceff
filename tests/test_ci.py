"""The GitHub Action, the pre-commit hook, the image and the conda recipe."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import ckptfix
from ckptfix.core.config import parse_toml
from ckptfix.zoo.items import Looks, by_name
from tests.cli.programs import environment, parse

ROOT = Path(__file__).resolve().parents[1]
PROJECT = parse_toml(ROOT / "pyproject.toml")["project"]
SAMPLES = ROOT / "sample_checkpoints"


@dataclass
class Composite:
    """A run of a composite action, as ``act`` does it: the scripts of its steps run, other actions are written down."""

    work: Path
    inputs: dict[str, str]
    path: str
    used: list[dict[str, str]] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    log: str = ""
    failed: bool = False

    def run(self) -> Composite:
        action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
        self.inputs = {name: str(each.get("default", "")) for name, each in action["inputs"].items()} | self.inputs
        for step in action["runs"]["steps"]:
            if not self.is_due(step.get("if", "success()")):
                continue
            if "uses" in step:
                self.used.append({"uses": step["uses"], **{k: self.filled(v) for k, v in step["with"].items()}})
            else:
                self.execute(step)
        self.outputs = {name: self.filled(each["value"]) for name, each in action["outputs"].items()}
        return self

    def execute(self, step: dict) -> None:
        files = {name: self.work / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_PATH")}
        for file in files.values():
            file.write_text("")
        script = self.work / "step.sh"
        script.write_text(step["run"])
        variables = {name: self.filled(str(value)) for name, value in step.get("env", {}).items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=self.work,
            env=environment(RUNNER_TEMP=str(self.work), PATH=self.path, **{k: str(v) for k, v in files.items()})
            | variables,
            capture_output=True,
            encoding="utf-8",
            timeout=300,
        )
        self.log += done.stdout + done.stderr
        self.failed |= done.returncode != 0
        self.path = os.pathsep.join((*files["GITHUB_PATH"].read_text().split("\n")[:-1], self.path))
        for line in files["GITHUB_OUTPUT"].read_text().splitlines():
            name, _, value = line.partition("=")
            self.outputs[f"steps.{step['id']}.outputs.{name}"] = value

    def filled(self, text: str) -> str:
        return re.sub(r"\$\{\{\s*(.*?)\s*\}\}", lambda match: self.value(match[1]), text)

    def value(self, expression: str) -> str:
        known = {"github.action_path": str(ROOT), "runner.temp": str(self.work), **self.outputs}
        known |= {f"inputs.{name}": value for name, value in self.inputs.items()}
        return known.get(expression, "") if expression.startswith("steps.") else known[expression]

    def is_due(self, condition: str) -> bool:
        """The few forms of conditions that the action has; any other is an error here."""
        condition = re.sub(r"^\$\{\{\s*(.*?)\s*\}\}$", r"\1", condition)
        due = True if "cancelled()" in condition else not self.failed
        for part in condition.split(" && "):
            if part not in ("success()", "!cancelled()"):
                name, operator, literal = part.split(" ")
                due &= (self.value(name) == literal.strip("'")) is (operator == "==")
        return due


@pytest.fixture
def bin_path(tmp_path: Path) -> str:
    """A PATH on which ``ckptfix`` belongs to this Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "ckptfix"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptfix "$@"\n')
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paths", "code", "annotations"),
    [
        pytest.param("head_missing.pth", "0", [], id="clean"),
        pytest.param("imagenet_dataparallel_cuda3.pth", "1", ["notice", "error"], id="a defect"),
        pytest.param("head_missing.pth\n\nsome where/torn.pth\n", "2", ["error"], id="an unreadable file"),
    ],
)
def test_the_action_annotates_and_keeps_the_page(paths, code, annotations, tmp_path, bin_path):
    for name in ("head_missing.pth", "imagenet_dataparallel_cuda3.pth"):
        shutil.copy(SAMPLES / name, tmp_path)
    (tmp_path / "some where").mkdir()
    (tmp_path / "some where" / "torn.pth").write_bytes((SAMPLES / "head_missing.pth").read_bytes()[:5000])
    done = Composite(tmp_path, {"paths": paths, "install": "false", "args": "--no-values"}, bin_path).run()
    assert (done.outputs["exit-code"], done.failed) == (code, code != "0")
    assert re.findall(r"^::(\w+) ", done.log, re.MULTILINE) == annotations
    (upload,) = done.used
    assert (upload["uses"], upload["name"]) == ("actions/upload-artifact@v4", "ckptfix-report")
    assert "<html" in Path(upload["path"]).read_text(encoding="utf-8")


def test_paths_may_be_patterns_and_options_are_in_quotes_on_several_lines(tmp_path, bin_path):
    stub = tmp_path / "bin" / "ckptfix"
    stub.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    for name in ("a b.pth", "c.pth", "odd [1].pt"):
        (tmp_path / name).touch()
    paths = "*.pth\n\n  odd [1].pt \nhf://org/repo@v1\nnone*.ckpt\n"
    args = "--no-values\n  --model 'timm:resnet18[num_classes=10]'\n--like \"my file.pth\""
    done = Composite(tmp_path, {"paths": paths, "args": args, "install": "false"}, bin_path).run()
    first, page = "check --output-format github --report".split(), str(tmp_path / "ckptfix-report.html")
    assert done.log.splitlines() == [
        *first,
        page,
        *("--no-values", "--model", "timm:resnet18[num_classes=10]", "--like", "my file.pth", "--"),
        *("a b.pth", "c.pth", "odd [1].pt", "hf://org/repo@v1", "none*.ckpt"),
    ]
    wrong = Composite(tmp_path, {"args": "--like 'my file.pth", "install": "false"}, bin_path).run()
    assert wrong.failed
    assert "quote" in wrong.log


def test_inputs_of_the_action_are_never_run(tmp_path, bin_path):
    evil = {"paths": "$(touch hacked).pth\n`touch hacked`.pth", "args": "; touch hacked", "artifact": ""}
    done = Composite(tmp_path, {**evil, "install": "false"}, bin_path).run()
    assert (done.failed, done.used) == (True, [])
    assert not (tmp_path / "hacked").exists()


def test_the_action_installs_itself_next_to_the_packages_of_the_job(tmp_path, bin_path):
    stub = tmp_path / "bin" / "python3"
    stub.write_text(
        '#!/bin/sh\nmkdir -p "$3/bin"\nprintf \'#!/bin/sh\\necho "pip $@"\\n\' > "$3/bin/pip"\nchmod +x "$3/bin/pip"\n'
    )
    stub.chmod(0o755)
    done = Composite(tmp_path, {"paths": "nowhere.pth"}, bin_path).run()
    assert f"pip install --quiet --extra-index-url https://download.pytorch.org/whl/cpu {ROOT}\n" in done.log
    assert done.path.startswith(f"{tmp_path}/ckptfix/bin{os.pathsep}")


HOOK = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))[0]


@pytest.mark.parametrize(
    "name",
    "a.pth a.PT runs/epoch=1.ckpt model.safetensors deep/er/a.pth.tar a.tar a.bin pytorch_model.bin "
    "diffusion_pytorch_model.bin mypytorch_model.bin model-00001-of-00002.bin "
    "consolidated.00.pth model.safetensors.index.json apth a.pth.txt a.pth/readme.md notes.md a.npz a.pth.gz".split(),
)
def test_the_hook_takes_names_of_checkpoints(name):
    assert bool(re.search(HOOK["files"], name)) is (by_name(name) is Looks.CHECKPOINT)


def test_the_hook_runs_a_command_that_exists():
    parse(f"{HOOK['entry']} a.pth")


@pytest.mark.slow
def test_pre_commit_stops_a_commit_of_a_defect(tmp_path, bin_path):
    """pre-commit itself runs the hook, with the ckptfix that is installed."""
    hooks, project = tmp_path / "hooks", tmp_path / "project"
    variables = environment(
        PATH=bin_path,
        HOME=str(tmp_path),
        PRE_COMMIT_HOME=str(tmp_path / "cache"),
        GIT_CONFIG_NOSYSTEM="1",
        **{f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    )

    def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=cwd, env=variables, capture_output=True, encoding="utf-8", timeout=120)

    for folder in (hooks, project):
        folder.mkdir()
        run("git", "init", "-q", cwd=folder)
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", hooks)
    run("git", "add", ".", cwd=hooks)
    run("git", "commit", "-qm", "hooks", cwd=hooks)
    revision = run("git", "rev-parse", "HEAD", cwd=hooks).stdout.strip()
    config = {"repos": [{"repo": str(hooks), "rev": revision, "hooks": [{"id": HOOK["id"], "language": "system"}]}]}
    (project / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    outcomes = {}
    for name in ("head_missing.pth", "nan_running_var.pth"):
        shutil.copy(SAMPLES / name, project)
        (project / "notes.txt").write_text(name)
        run("git", "add", "--all", cwd=project)
        done = run(sys.executable, "-m", "pre_commit", "run", cwd=project)
        outcomes[name] = done.returncode, "VAL101 non-finite" in done.stdout, done.stderr
        run("git", "commit", "--no-verify", "-qm", name, cwd=project)
    assert outcomes == {"head_missing.pth": (0, False, ""), "nan_running_var.pth": (1, True, "")}


def test_the_image_runs_without_root_and_copies_existing_files():
    stages = (ROOT / "Dockerfile").read_text(encoding="utf-8").split("\nFROM ")
    assert re.search(r"^USER (?!root|0)\w+\n(.*\n)*ENTRYPOINT \[\"ckptfix\"\]", stages[-1], re.MULTILINE)
    assert "slim" in stages[-1].splitlines()[0]
    assert "whl/cpu" in stages[-1]
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    kept = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    build = parse_toml(ROOT / "pyproject.toml")["tool"]["hatch"]["build"]
    needed = {PROJECT["readme"], *build["targets"]["wheel"]["packages"], "pyproject.toml", "hatch_build.py"}
    needed |= {pattern.partition("/")[0] for pattern in PROJECT["license-files"]}
    needed |= {name for name in re.findall(r"^COPY (\S+) ", "\n".join(stages), re.MULTILINE) if name != "."}
    assert needed <= kept
    assert all((ROOT / name).exists() for name in kept)
    assert any(fnmatch("ckptfix/values/_kernel.so", pattern) for pattern in patterns)


ON_CONDA = {"torch": "pytorch", "isal": "python-isal"}
"""The names of packages that have another one on conda-forge."""


def test_the_recipe_agrees_with_the_project():
    recipe = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == PROJECT["version"] == ckptfix.__version__
    assert recipe["about"]["license"] == PROJECT["license"]
    needed = [Requirement(text) for text in PROJECT["dependencies"]]
    wanted = {f"{ON_CONDA.get(each.name, each.name)} {each.specifier}" for each in needed}
    assert set(recipe["requirements"]["run"]) == wanted | {f"python {PROJECT['requires-python']}"}
    build = parse_toml(ROOT / "pyproject.toml")["build-system"]["requires"]
    assert {str(Requirement(text.replace(" ", ""))) for text in recipe["requirements"]["host"][2:]} == set(build)
    licenses = {path for pattern in PROJECT["license-files"] for path in ROOT.glob(pattern)}
    assert {ROOT / name for name in recipe["about"]["license_file"]} == licenses
