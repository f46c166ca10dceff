import gzip
import json
import pickle
import re
import shlex
import subprocess
import sys
import zipfile
from argparse import Namespace

import numpy
import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

import ckptfix
from tests.checks import assert_same
from tests.cli.programs import command, environment, run, run_here
from tests.reading.folders.ranks.genuine import unpacked

PREFIX = (
    'RuntimeError: Error(s) in loading state_dict for Linear:\n\tMissing key(s) in state_dict: "weight", "bias".\n\t'
    'Unexpected key(s) in state_dict: "module.weight", "module.bias".\n'
)
MAGIC = "RuntimeError: Invalid magic number; corrupt file?"


def piped(text, cwd, *words):
    """Run ``ckptfix explain`` with bytes on stdin."""
    return subprocess.run(
        command("explain", *words), cwd=cwd, env=environment(), input=text, capture_output=True, timeout=300
    )


def test_unknown_text(tmp_path):
    done = run_here("explain", "ValueError: the kettle is empty", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("not recognised: ")
    assert "nearest" not in done.stdout


def test_unknown_text_near_a_known_one(tmp_path):
    done = run_here("explain", "zip archive reading failed, no central directory found", cwd=tmp_path)
    assert done.returncode == 1
    assert "The nearest known message is damaged-archive" in done.stdout


def test_full(tmp_path):
    done = run("explain", MAGIC, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"foreign-pickle: {MAGIC}\n\nwhat it means:\n  The file is a pickle")
    assert "  run: ckptfix inspect FILE\n" in done.stdout
    assert "(FILE is your checkpoint)" in done.stdout


@pytest.mark.parametrize("front", [(), ("---",), (f"{'-' * 60}\n",), ("--- Logging error ---\n",)])
def test_words_without_quotes_and_after_dashes(front, tmp_path):
    words = ("RuntimeError:", "Torch", "not", "compiled", "with", "CUDA", "enabled")
    done = run_here("explain", *front, *words, cwd=tmp_path)
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "no-cuda-build")


SHAPE = (
    "RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for emb.weight: copying a param with shape"
    " torch.Size([{}]) from checkpoint, the shape in current model"
)
OF_RANKS = {
    "zero3_w2_fp32_g1": f"{SHAPE.format(0)} is torch.Size([13, 7]).",
    "fsdp2_w4": f"{SHAPE.format('4, 7')} is torch.Size([13, 7]).",
    "megatron_tp2pp2": "AssertionError: tensor_model_parallel_size value from checkpoint (2) is not equal to the input"
    " argument value (1).",
    "megatron_dist_tp2pp2": "OSError: Error no file named model.safetensors found in directory out.",
    "fsdp1_local_w2": "ModuleNotFoundError: No module named 'torch.distributed._shard'",
    "fsdp1_sharded_w4": "IsADirectoryError: [Errno 21] Is a directory: 'saved'",
    "universal_zero2": "KeyError: 'state_dict'",
    "pipeline_pp2": "",
}


@pytest.mark.parametrize("kind", OF_RANKS)
def test_a_folder_of_a_training_run_is_merged_first(tmp_path, kind):
    """Whatever the message says about one rank's part, no rule on one rank's shapes helps."""
    unpacked(kind, tmp_path)
    text = OF_RANKS[kind] or "the kettle is empty"
    done = run_here("explain", text, "--file", "saved", "--output-format", "json", cwd=tmp_path)
    said = json.loads(done.stdout)
    first = said["advice"][0]["command"] if OF_RANKS[kind] else said["verdict"]["command"]
    needed = "--model PKG.MOD:FACTORY " if kind == "fsdp1_local_w2" else ""
    folder = ckptfix.check(tmp_path / "saved", values=False).source.removeprefix(f"{tmp_path}/")
    assert first == f"ckptfix repair {folder} {needed}--output model.pth"
    assert "--adapt" not in done.stdout
    assert "torch.load(" not in done.stdout
    if not needed:
        assert run_here(*shlex.split(first)[1:], cwd=tmp_path).returncode == 0


NAMING_FOLDERS = {
    "zero2_w2_bf16_g2": "FileNotFoundError: can't find *_optim_states.pt files in directory {!r}",
    "zero3_w2_fp32_g1": "ValueError: Unable to find 'latest' file at {}/latest",
    "universal_zero2": "OSError: Error no file named model.safetensors found in directory {!r}.",
    "megatron_tp2pp2": "ValueError: Unrecognized checkpoint format at {!r}",
    "fsdp2_w4": "FileNotFoundError: [Errno 2] No such file or directory: {!r}.",
    "megatron_dist_tp2pp2": "CheckpointingException: {} is not a distributed checkpoint",
}


@pytest.mark.parametrize("kind", NAMING_FOLDERS)
@pytest.mark.parametrize("around", ["out", "it's tag='a' $x"])
def test_commands_with_the_folder_that_a_message_names(tmp_path, kind, around):
    """Each works when pasted, whatever the folder is called; one of a file that is missing names the file's folder."""
    saved, _ = unpacked(kind, tmp_path)
    (tmp_path / around).mkdir()
    folder = f"{around}/checkpoint-500"
    saved.rename(tmp_path / folder)
    named = f"{folder}/model_world_size_4_rank_9.pt" if kind == "fsdp2_w4" else folder
    text = NAMING_FOLDERS[kind].format(named)
    if " " in around and "{!r}" not in NAMING_FOLDERS[kind]:
        pytest.skip("an unquoted path ends at a blank")
    done = run_here("explain", text, "--output-format", "json", cwd=tmp_path)
    commands = [each["command"] for each in json.loads(done.stdout)["advice"] if each["command"]]
    assert any(folder in shlex.split(command) for command in commands)
    for line in commands:
        assert "FOLDER" not in line
        _, verb, *words = shlex.split(line)
        assert run_here(verb, *words, cwd=tmp_path).returncode in ((0, 1) if verb == "check" else (0,)), line
        (tmp_path / "model.pth").unlink(missing_ok=True)


def test_of_ranks_that_cannot_be_merged_the_defect_is_reported(tmp_path):
    saved, _ = unpacked("zero3_w2_fp32_g1", tmp_path)
    one, other = sorted(saved.glob("*/*optim_states.pt"))
    other.write_bytes(one.read_bytes())
    done = run_here("explain", "KeyError: 'state_dict'", "--file", "saved", "--output-format", "json", cwd=tmp_path)
    said = json.loads(done.stdout)
    assert "FIL105" in said["verdict"]["others"]
    assert "--output model.pth" not in done.stdout


def test_a_message_about_the_machine_stays_one(tmp_path):
    unpacked("fsdp2_w4", tmp_path)
    text = "RuntimeError: CUDA error: invalid device ordinal"
    done = run_here("explain", text, "--file", "saved", cwd=tmp_path)
    assert "\nthis folder: Nothing is wrong in saved itself, so it is not at fault." in done.stdout
    assert "torch.load(" not in done.stdout


def test_a_folder_is_not_given_to_a_function_that_opens_files(tmp_path):
    (tmp_path / "model").mkdir()
    safetensors.torch.save_file({"a.weight": torch.ones(4, 4)}, tmp_path / "model" / "model.safetensors")
    done = run_here("explain", "RuntimeError: No CUDA GPUs are available", "--file", "model", cwd=tmp_path)
    assert "torch.load(" not in done.stdout
    assert "\nthis folder: Nothing is wrong in model/model.safetensors itself" in done.stdout


@pytest.mark.parametrize("words", [(), ("-",)])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_stdin(tmp_path, words, encoding):
    done = piped(f"[rank0]: {MAGIC}\n".encode(encoding), tmp_path, *words)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"foreign-pickle")


LINEAR = torch.nn.Linear(3, 2)
WEIGHTS = LINEAR.state_dict()


def saved(root, **settings):
    return lambda path: torch.save(root, path, **settings)


def gzipped(path):
    torch.save(WEIGHTS, path)
    path.write_bytes(gzip.compress(path.read_bytes()))


def zipped(path):
    torch.save({"net": WEIGHTS}, path.with_name("inner.pth"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(path.with_name("inner.pth"), "inner.pth")


# How a file is written, its name, and the beginning of the code that reads its weights: a plain call where that is all
# it takes.
LOAD, OPEN = 'torch.load("{}", map_location="cpu")', 'ckptfix.open_checkpoint("{}"'
FILES = {
    "a state_dict": (saved(WEIGHTS), "file.pth", LOAD),
    "a container": (saved({"net": WEIGHTS, "epoch": 1}), "file.pth", LOAD + "['net']"),
    "a list": (saved([{"g": WEIGHTS}]), "file.bin", LOAD + "[0]['g']"),
    "nested": (saved({"models": {"g": WEIGHTS, "d": WEIGHTS}}), "file.pt", LOAD + "['models']['g']"),
    "legacy": (saved(WEIGHTS, _use_new_zipfile_serialization=False), "file.pth.tar", LOAD),
    "of Lightning": (
        saved({"state_dict": WEIGHTS, "pytorch-lightning_version": "2.0"}),
        "a.ckpt",
        LOAD + "['state_dict']",
    ),
    "with a class beside the weights": (saved({"net": WEIGHTS, "args": Namespace(lr=1)}), "file.pth", OPEN),
    "a whole model": (saved(LINEAR), "file.pth", OPEN),
    "a whole model in a container": (saved({"model": LINEAR}), "file.pth", OPEN),
    "legacy, a whole model": (saved(LINEAR, _use_new_zipfile_serialization=False), "file.pth", OPEN),
    "TorchScript": (lambda path: torch.jit.script(LINEAR).save(path), "file.pt", OPEN),
    "safetensors": (lambda path: save_file(WEIGHTS, path), "file.safetensors", 'safetensors.torch.load_file("{}")'),
    "safetensors of another suffix": (lambda path: save_file(WEIGHTS, path), "file.pth", OPEN),
    "a pickle of arrays": (
        lambda path: path.write_bytes(pickle.dumps({key: value.numpy() for key, value in WEIGHTS.items()})),
        "w.pkl",
        OPEN,
    ),
    "packed": (gzipped, "file.pth.gz", OPEN),
    "in an archive": (zipped, "file.zip", OPEN),
}


@pytest.mark.parametrize("kind", FILES)
def test_the_code_gives_the_weights_of_this_very_file(tmp_path, monkeypatch, kind):
    write, name, code = FILES[kind]
    write(tmp_path / name)
    done = run_here("explain", "KeyError: 'params'", "--file", name, "--output-format", "concise", cwd=tmp_path)
    (line,) = re.findall(r"code: state_dict = (.*)", done.stdout)
    assert line.startswith(code.format(name))
    monkeypatch.chdir(tmp_path)
    found = eval(line, {"torch": torch, "safetensors": safetensors, "ckptfix": ckptfix})
    assert_same(dict(sorted(found.items())), dict(sorted(WEIGHTS.items())))


def test_the_code_takes_the_set_that_was_chosen(tmp_path, monkeypatch):
    both = {f"{net}.{key}": value + len(net) for net in ("student", "ema") for key, value in WEIGHTS.items()}
    torch.save(both, tmp_path / "f.pth")
    words = ("KeyError: 'params'", "--file", "f.pth", "--weights", "ema", "--output-format", "concise")
    (line,) = re.findall(r"code: state_dict = (.*)", run_here("explain", *words, cwd=tmp_path).stdout)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(eval(line, {"ckptfix": ckptfix})["weight"], both["ema.weight"])


def test_a_file_that_cannot_be_read_gives_no_weights_in_code(tmp_path):
    numpy.savez(tmp_path / "file.npz", weight=LINEAR.weight.detach().numpy())
    done = run_here("explain", "KeyError: 'params'", "--file", "file.npz", cwd=tmp_path)
    assert "this file: it cannot be read" in done.stdout
    assert "in your code" not in done.stdout


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_log_file(tmp_path, encoding):
    (tmp_path / "err.log").write_text(f"[rank0]: {MAGIC}\n", encoding)
    done = run_here("explain", "err.log", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("foreign-pickle")


def test_the_logs_of_several_ranks(tmp_path):
    (tmp_path / "0.log").write_text("step 3\n")
    (tmp_path / "1.log").write_text(f"[rank1]: {MAGIC}\n")
    assert run_here("explain", "0.log", "1.log", cwd=tmp_path).stdout.startswith("foreign-pickle")
    assert run_here("explain", "0.log", "2.log", cwd=tmp_path).returncode == 1


def test_stdin_of_no_encoding_at_all(tmp_path):
    assert piped(b"\xff\x80 " + MAGIC.encode(), tmp_path).returncode == 0


def test_json(tmp_path):
    data = json.loads(run_here("explain", PREFIX, "--output-format", "json", cwd=tmp_path).stdout)
    assert (data["version"], data["recognised"], data["name"]) == (1, True, "does-not-fit")
    assert "2 keys with the wrapper prefix `module.`" in data["causes"][1]["text"]
    assert data["advice"][0]["command"] == "ckptfix repair FILE"
    assert data["nearest"] is None


def test_json_of_an_unknown_text(tmp_path):
    done = run_here(
        "explain", "zip archive reading failed, no central directory found", "--output-format", "json", cwd=tmp_path
    )
    data = json.loads(done.stdout)
    assert (done.returncode, data["recognised"], data["nearest"]["name"]) == (1, False, "damaged-archive")


def test_concise(tmp_path):
    lines = run_here("explain", MAGIC, "--output-format", "concise", cwd=tmp_path).stdout.splitlines()
    assert all(line.startswith("foreign-pickle: ") for line in lines)
    assert "foreign-pickle: run: ckptfix inspect FILE" in lines


def test_with_the_file_and_the_model(folder):
    done = run_here("explain", PREFIX, "--file", "wrapped.pth", "--model", "zoo:tiny", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "this file: wrapped.pth has this problem:\n  KEY102 wrapper-prefix error" in done.stdout
    assert done.stdout.endswith("  run: ckptfix repair wrapped.pth --model zoo:tiny\n")


def test_with_a_file_that_cannot_be_read(folder):
    done = run_here("explain", "failed finding central directory", "--file", "torn.pth", cwd=folder)
    assert done.returncode == 0
    assert "this file: it cannot be read: torn.pth: " in done.stdout


def test_a_text_from_the_file_name_cannot_steer_the_terminal(tmp_path):
    done = run_here("explain", "FileNotFoundError: No such file or directory: 'a\x1b]0;x\x07.pth'", cwd=tmp_path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("",), "no text to explain"),
        (("runs/train.log",), "runs/train.log: there is no such log; give its path, or the message in quotes"),
        (("good.pth",), "good.pth is not a text file; to examine a checkpoint, run `ckptfix check good.pth`"),
        ((MAGIC, "--file", "nowhere.pth"), "there is no such file"),
        ((MAGIC, "--file", "good.pth", "--model", "zoo:tiny", "--like", "good.pth"), "exclude each other"),
    ],
)
def test_usage(folder, words, complaint):
    done = run_here("explain", *words, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_configured_model_is_named_and_not_run(folder):
    (folder / "ckptfix.toml").write_text('model = "zoo:broken"\n')
    done = run_here(
        "explain", "size mismatch for fc.weight: copying a param with shape [1] from checkpoint,", cwd=folder
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "ckptfix check FILE --model zoo:broken" in done.stdout


def test_it_imports_nothing_slow(tmp_path):
    program = (
        "import sys, atexit\n"
        "slow = {'torch', 'numpy', 'rich', 'safetensors'}\n"
        "atexit.register(lambda: sys.stderr.write(str(sorted(slow & {*sys.modules}))))\n"
        "from ckptfix.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "explain", PREFIX],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "[]")


def test_help_does_not_load_the_records(tmp_path):
    program = (
        "import sys, atexit\n"
        "atexit.register(lambda: sys.stderr.write(str([n for n in sys.modules if n.startswith('ckptfix.explain')])))\n"
        "from ckptfix.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.stderr == "[]"


def test_nothing_is_filled_with_untrained_values_where_the_file_says_otherwise(tmp_path):
    """The file is for another model, so the command that the message alone suggests would be refused."""
    torch.save({"weight": torch.ones(10, 8), "bias": torch.ones(10)}, tmp_path / "a.pth")
    text = (
        "size mismatch for weight: copying a param with shape torch.Size([10, 8]) from checkpoint, the shape in current"
        " model is torch.Size([7, 8])."
    )
    asked = ("explain", text, "--file", "a.pth", "--model", "torch.nn:Linear", "--model-args", "[8, 7]")
    assert "--fill target" in run_here(*asked[:2], cwd=tmp_path).stdout
    assert "--fill target" not in run_here(*asked, cwd=tmp_path).stdout


NO_GLOBAL = (
    "_pickle.UnpicklingError: Weights only load failed. Unsupported global: GLOBAL argparse.Namespace was not an"
)


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: x is not a zero checkpoint",
        "The checkpoint being loaded used a DP world size of 2 but the current DP world size is 4.",
        'Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "l1.weight".\n\tUnexpected key(s) in'
        ' state_dict: "module", "optimizer", "epoch". ',
        "KeyError: 'module.l1.weight'",
        "the kettle is empty",
    ],
)
@pytest.mark.parametrize("name", ["saved", "*/*rank_0_mp*optim_states.pt"], ids=["folder", "file"])
def test_every_step_works_on_a_folder_that_lacks_ranks(tmp_path, text, name):
    saved, _ = unpacked("zero2_w3_fp32_g1", tmp_path)
    next(saved.glob("*/*rank_1_mp*optim_states.pt")).unlink()
    file = name if name == "saved" else str(next(saved.glob(name)).relative_to(tmp_path))
    done = run_here("explain", text, "--file", file, cwd=tmp_path)
    commands = re.findall(r"(?:run|itself): (ckptfix .*)", done.stdout)
    assert "checkpoint[" not in done.stdout
    assert "state_dict)" not in done.stdout
    assert (f"ckptfix repair {file} --salvage --output salvaged.pth" in commands) is (done.returncode == 0)
    for one in commands:
        assert run_here(*shlex.split(one)[1:], cwd=tmp_path).returncode < 2, one


def copy_over(one, other):
    other.write_bytes(one.read_bytes())


def swap(one, other):
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def keep_first(one, other):
    for each in sorted(one.parent.glob("*.pt")):
        if each != one:
            each.unlink()


@pytest.mark.parametrize("file", ["saved", "one"])
@pytest.mark.parametrize(
    ("kind", "pattern", "change"),
    [
        ("zero3_w2_fp32_g1", "*/*optim_states.pt", copy_over),
        ("zero3_w2_fp32_g1", "*/*optim_states.pt", swap),
        ("zero2_w3_fp32_g1", "*/*optim_states.pt", swap),
        ("fsdp2_w4", "*_rank_*.pt", copy_over),
        ("hsdp_w4", "rank_*.pt", keep_first),
    ],
)
def test_no_step_is_printed_that_writes_nothing(tmp_path, kind, pattern, change, file):
    saved, _ = unpacked(kind, tmp_path)
    one, other = sorted(saved.glob(pattern))[:2]
    change(one, other)
    name = file if file == "saved" else str(one.relative_to(tmp_path))
    for text in ("ValueError: Expected 4 of '*_optim_states.pt' under 'saved' but found 3 files.", "'state_dict'"):
        done = run_here("explain", text, "--file", name, cwd=tmp_path)
        for step in re.findall(r"(?:run|itself): (ckptfix .*)", done.stdout):
            if kind == "hsdp_w4" and "FOLDER" in step:
                continue  # the folder with all ranks is not known
            pasted = run_here(*shlex.split(step)[1:], cwd=tmp_path)
            assert step.startswith("ckptfix check") or re.search("written: (?!nothing)", pasted.stdout), step


def test_without_an_optimizer_no_universal_checkpoint_is_suggested(tmp_path):
    unpacked("fsdp2_w4", tmp_path)
    text = "The checkpoint being loaded used a DP world size of 2 but the current DP world size is 4."
    done = run_here("explain", text, "--file", "saved", cwd=tmp_path)
    assert re.findall(r"run: (ckptfix .*)", done.stdout) == ["ckptfix repair saved --output model.pth"]
    assert "load_universal" not in done.stdout


def test_the_folder_of_a_rank_is_in_the_commands(tmp_path):
    unpacked("zero2_w3_fp32_g1", tmp_path)
    file = "saved/global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    text = "ValueError: Invalid for universal checkpoint: saved/latest_universal does not exist"
    done = run_here("explain", text, "--file", file, cwd=tmp_path)
    first = re.findall(r"run: (ckptfix .*)", done.stdout)[0]
    assert first == "ckptfix repair saved/global_step2 --format universal -o universal"
    assert run_here(*shlex.split(first)[1:], cwd=tmp_path).returncode == 0


def test_a_rank_without_the_others_is_named_as_one(tmp_path):
    unpacked("megatron_tp2pp2", tmp_path)
    file = next((tmp_path / "saved").glob("*/mp_rank_00_001/model_optim_rng.pt"))
    file.rename(tmp_path / "alone.pt")
    done = run_here("explain", NO_GLOBAL, "--file", "alone.pt", cwd=tmp_path)
    assert "The file holds one rank's part of each weight" in done.stdout
    assert "run: ckptfix repair FOLDER -o model.pth" in done.stdout


def test_another_number_of_gpus_gets_a_universal_checkpoint(tmp_path):
    unpacked("zero2_w3_fp32_g1", tmp_path)
    text = "The checkpoint being loaded used a DP world size of 2 but the current DP world size is 4."
    done = run_here("explain", text, "--file", "saved", cwd=tmp_path)
    command = re.findall(r"run: (ckptfix .*)", done.stdout)[0]
    assert run_here(*shlex.split(command)[1:], cwd=tmp_path).returncode == 0
    assert list((tmp_path / "universal").glob("*/zero/l1.bias/exp_avg.pt"))
