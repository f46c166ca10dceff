import json
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from tests.checks import bytes_of
from tests.cli.programs import run, run_here
from tests.reading.folders.ranks.genuine import unpacked


@pytest.mark.parametrize(
    ("words", "code"),
    [
        pytest.param(["good.pth"], 0, id="clean"),
        pytest.param(["good.pth", "--model", "zoo:tiny"], 0, id="fits"),
        pytest.param(["wrapped.pth"], 1, id="a defect"),
        pytest.param(["good.pth", "wrapped.pth"], 1, id="the worst counts"),
        pytest.param(["wrapped.pth", "--ignore", "KEY"], 0, id="ignored"),
        pytest.param(["wrapped.pth", "--select", "val,buf"], 0, id="not selected"),
        pytest.param(["good.pth", "--model", "zoo:tiny", "--model-args", '{"width": 5}'], 1, id="does not fit"),
        pytest.param(["good.pth", "--like", "wrapped.pth"], 1, id="unlike"),
        pytest.param(["torn.pth"], 2, id="unreadable"),
        pytest.param(["nowhere.pth"], 2, id="absent"),
        pytest.param(["good.pth", "--model", "zoo:absent"], 2, id="no such factory"),
        pytest.param(["good.pth", "--no-such-flag"], 2, id="no such flag"),
        pytest.param([], 2, id="no path"),
    ],
)
def test_exit_code(folder, words, code):
    assert run_here("check", *words, cwd=folder).returncode == code


def test_one_bad_file_does_not_stop_the_others(folder):
    done = run_here("check", "torn.pth", "nowhere.pth", "wrapped.pth", "--output-format", "concise", cwd=folder)
    assert done.returncode == 2
    assert done.stdout.startswith("wrapped.pth: KEY102 wrapper-prefix: ")
    *errors, count = done.stderr.splitlines()
    assert [line.split(": ")[2] for line in errors] == ["torn.pth", "nowhere.pth"]
    assert count == "ckptfix: 3 files: 1 with defects (1 defect, 1 fixable), 2 could not be read"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_folder_is_searched(jobs, folder):
    (folder / "deep").mkdir()
    (folder / "good.pth").rename(folder / "deep" / "good.pth")
    (folder / "torn.pth").unlink()
    done = run("check", ".", "--jobs", jobs, cwd=folder)
    assert (done.returncode, done.stderr) == (1, "")
    headlines = [line for line in done.stdout.splitlines() if ".pth: " in line and not line.startswith(" ")]
    assert [line.partition(": ")[0] for line in headlines] == ["deep/good.pth", "wrapped.pth"]
    assert done.stdout.endswith("\n2 files: 1 with defects (1 defect, 1 fixable)\n")


def test_a_folder_without_a_checkpoint_is_an_error(folder):
    (folder / "empty").mkdir()
    done = run_here("check", "empty", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "empty: an empty folder" in done.stderr


def test_a_folder_that_is_one_checkpoint_is_checked_whole(folder):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "good.pth").rename(folder / "model" / "pytorch_model.bin")
    done = run_here("check", "model", cwd=folder)
    assert done.returncode == 0
    assert "files:" not in done.stdout


def test_checkpoints_next_to_the_weights_of_a_library_are_checked_too(folder):
    shutil.copy(folder / "good.pth", folder / "adapter_model.bin")
    (folder / "torn.pth").unlink()
    done = run_here("check", ".", "--output-format", "concise", cwd=folder)
    assert (done.returncode, "wrapped.pth: KEY102" in done.stdout) == (1, True)
    for name in ("wrapped.pth", "good.pth"):
        (folder / name).rename(folder / {"wrapped.pth": "training_args.bin", "good.pth": "optimizer.pt"}[name])
    assert run_here("check", ".", cwd=folder).returncode == 0


def test_a_missing_save_that_is_named_the_latest_is_an_error_beside_the_reports_of_the_others(tmp_path):
    saved, _ = unpacked("zero2_w2_bf16_g2", tmp_path)
    (saved / "latest").write_text("global_step9")
    done = run_here("check", "saved", cwd=tmp_path)
    assert (done.returncode, "saved/latest: names global_step9, which is missing" in done.stderr) == (2, True)
    assert done.stdout.startswith("saved/global_step2: nothing wrong")


def test_checkpoints_next_to_the_only_one_of_torch_distributed_are_checked_too(folder):
    """As torchtune has `epoch_0` next to `dist_epoch_0`."""
    (folder / "run" / "epoch_0").mkdir(parents=True)
    state_dict_saver.save({"a": torch.ones(2)}, checkpoint_id=folder / "run" / "dist_epoch_0", no_dist=True)
    (folder / "good.pth").rename(folder / "run" / "epoch_0" / "model.pth")
    done = run_here("check", "run", cwd=folder)
    assert [line.split(": ")[0] for line in done.stdout.splitlines() if ": nothing wrong" in line] == [
        "run/dist_epoch_0",
        "run/epoch_0/model.pth",
    ]


def test_pickles_of_a_folder_are_checked_if_they_have_weights_or_run_code(folder):
    (folder / "torn.pth").unlink()
    (folder / "vocabulary.pkl").write_bytes(pickle.dumps({"the": 1}))
    assert "vocabulary" not in run_here("check", ".", cwd=folder).stdout
    (folder / "detectron.pkl").write_bytes(pickle.dumps({"model": {"fc.weight": np.full((2, 3), np.nan, "f4")}}))
    done = run_here("check", ".", "--output-format", "concise", cwd=folder)
    assert (done.returncode, "detectron.pkl: VAL101" in done.stdout) == (1, True)
    (folder / "armed.pkl").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    done = run_here("check", ".", "--output-format", "concise", cwd=folder)
    assert (done.returncode, "armed.pkl" in done.stderr) == (2, True)


class Payload:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("weights", ["a.pth", "b/a.pth", "pytorch_model.bin"])
@pytest.mark.parametrize("name", ["scheduler.pt", "lr_scheduler", "recipe_state.pt"])
def test_what_a_trainer_saves_next_to_weights_is_named_only_if_it_runs_code(folder, name, weights):
    (folder / "run" / "b").mkdir(parents=True)
    (folder / "good.pth").rename(folder / "run" / weights)
    torch.save({"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}, "seed": 1}, folder / "run" / name)
    done = run_here("check", "run", cwd=folder)
    assert (done.returncode, name in done.stdout, done.stderr) == (0, False, "")
    if weights != "pytorch_model.bin":  # it is read next to this file, and left out if it cannot be read
        whole = (folder / "run" / name).read_bytes()
        (folder / "run" / name).write_bytes(whole[: len(whole) // 2])
        done = run_here("check", "run", cwd=folder)
        assert (done.returncode, name in done.stderr) == (2, True)
    torch.save(Payload(), folder / "run" / name)
    done = run_here("check", "run", cwd=folder)
    assert done.returncode > 0
    assert name in done.stdout + done.stderr
    assert "run code" in done.stdout + done.stderr or "FIL901" in done.stdout


def test_a_pipe_gets_no_escape_codes(folder):
    done = run("check", "wrapped.pth", "torn.pth", cwd=folder)
    assert "\x1b" not in done.stdout + done.stderr


def test_force_color(folder):
    assert "\x1b[1;31m" in run_here("check", "wrapped.pth", cwd=folder, FORCE_COLOR="1").stdout
    assert "\x1b" not in run_here("check", "wrapped.pth", cwd=folder, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_an_ascii_stream(folder):
    done = run("check", "wrapped.pth", "--like", "good.pth", cwd=folder, PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert done.stdout.isascii()


def test_json_alone_is_on_stdout(folder):
    done = run_here("check", "wrapped.pth", "torn.pth", "--output-format", "json", cwd=folder)
    data = json.loads(done.stdout)
    assert [entry["exit_code"] for entry in data["reports"]] == [1, 2]
    assert "torn.pth" in data["reports"][1]["error"]


def test_the_traceback_has_only_frames_of_the_user(folder):
    done = run_here("check", "good.pth", "wrapped.pth", "--model", "zoo:broken", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "zoo.py" in done.stderr
    assert "ckptfix/" not in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1].startswith("ckptfix: error: --model zoo:broken raised ZeroDivisionError")


def test_nothing_is_written(folder):
    before = sorted(path.name for path in folder.iterdir())
    run_here("check", "wrapped.pth", cwd=folder)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_configuration_and_command_line(folder):
    (folder / "ckptfix.toml").write_text('ignore = ["KEY"]\noutput-format = "concise"\n')
    assert run_here("check", "wrapped.pth", cwd=folder).returncode == 0
    assert run_here("check", "wrapped.pth", "--ignore", "VAL", cwd=folder).returncode == 1


def test_a_model_out_of_a_configuration_file_is_reported(folder):
    (folder / "ckptfix.toml").write_text('model = "zoo:tiny"\n')
    done = run_here("check", "good.pth", cwd=folder)
    assert done.returncode == 0
    assert f"the model zoo:tiny comes from {folder / 'ckptfix.toml'}" in done.stderr


def test_a_wrong_configuration_is_one_line(folder):
    (folder / "ckptfix.toml").write_text("sed = 3\n")
    done = run_here("check", "good.pth", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"ckptfix: error: {folder / 'ckptfix.toml'}: there is no key sed; did you mean seed?\n"


def test_the_advice_is_a_command_that_works(folder):
    advice = run_here("check", "wrapped.pth", "--model", "zoo:tiny", cwd=folder).stdout.splitlines()[-1]
    assert advice.startswith("  run: ckptfix ")
    assert run_here(*advice.split()[2:], cwd=folder).returncode == 0


@pytest.mark.parametrize("more", [["--salvage"], ["--model", "zoo:rotary"]])
def test_damage_is_a_finding_and_no_warning_of_python(folder, more):
    """A buffer that the model also has is examined, and its storage fails its checksum."""
    inv_freq = torch.arange(1.0, 9.0)
    torch.save({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "inv_freq": inv_freq}, folder / "rot.pth")
    data = bytearray((folder / "rot.pth").read_bytes())
    data[data.index(bytes_of(inv_freq)) + 3] ^= 0x40
    (folder / "rot.pth").write_bytes(data)
    with (folder / "zoo.py").open("a") as zoo:
        zoo.write("\n\ndef rotary():\n    made = tiny()\n")
        zoo.write("    made.register_buffer('inv_freq', torch.arange(1.0, 9.0), persistent=False)\n    return made\n")
    done = run_here("check", "rot.pth", *more, cwd=folder)
    assert done.stderr == ""
    assert "FIL201" in done.stdout
