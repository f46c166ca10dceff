"""Messages are found despite what loggers, launchers, terminals and mail add around them."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.explain import explain
from ckptfix.explain.text import Relation, clean, file_name, folder_name, messages

KEYS = 'Missing key(s) in state_dict: "conv1.weight", "fc.bias". '


@pytest.mark.parametrize(
    "line",
    [
        "",
        '  File "train.py", line 3, in <module>',
        "loss: 0.3",
        "conv1.weight | UNEXPECTED |",
        "RuntimeError: CUDA error: invalid argument",
        "ValueError: 12:30 is no number",
        "[64, 3, 7, 7]",
        "C:\\new\\table\\model.pth",
    ],
)
def test_what_is_not_noise_stays(line: str):
    assert clean(line) == line


@pytest.mark.parametrize(
    "noisy",
    [
        "2024-05-01 12:00:00,123 {}",
        "2024-05-01T12:00:00.1234567Z {}",
        "[2024-05-01 12:00:00,123] {}",
        "2024-05-01 12:00:00 | ERROR | {}",
        "12:00:00 - {}",
        "2024/05/01 12:00:00 - mmengine - ERROR - {}",
        "05/01/2024 12:00:00 - WARNING - transformers.modeling_utils - {}",
        "[WARNING|modeling_utils.py:3234] 2024-05-01 12:00:00,123 >> {}",
        "WARNING [05/01 12:00:00 fvcore.common.checkpoint]: {}",
        "2024-05-01 12:00:00.123 | ERROR    | train:main:12 - {}",
        "[2024-05-01 12:00:00,123] [INFO] [engine.py:123:load] {}",
        "(EngineCore_DP0 pid=4242) ERROR 05-01 12:00:00 [core.py:396] {}",
        "[E501 12:00:00.123456789 ProcessGroupNCCL.cpp:616] {}",
        "0: {}",
        "12: [rank12]: {}",
        " 3: {}",
        "[default3]:{}",
        "node-3: {}",
        "2024-05-01T12:00:00.1234567Z ##[error]{}",
        "May  1 12:00:00 gpu-3 python[4242]: {}",
        "ERROR:root:{}",
        "[ERROR] {}",
        "[rank0]: {}",
        "[rank0]:[2024-05-01 12:00:00,123] ERROR: {}",
        "[1,0]<stderr>: {}",
        "(trainer pid=4242, ip=10.0.0.1) {}",
        "web_1  | {}",
        "> {}",
        "> > {}",
        "E       {}",
        "│ {} │",
        "\x1b[31m{}\x1b[0m",
        "\x1b[1;31m[rank1]\x1b[0m: {}",
        "Loading:  45%|████▌     | 5/11 [00:01<00:02,  3.2it/s]{}",
        "100%|##########| 391/391 [00:12<00:00, 31.2it/s, loss=0.3]\r{}",
        "\ufeff{}",
    ],
)
def test_noise_around_a_line(noisy: str):
    line = "RuntimeError: Invalid magic number; corrupt file?"
    (message,) = messages(noisy.format(line))
    assert message.headline == line


TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 12, in <module>
    model.load_state_dict(torch.load("runs/last.pth"))
  File "torch/nn/modules/module.py", line 2215, in load_state_dict
    raise RuntimeError('Error(s) in loading state_dict for {}:\\n\\t{}'.format(
RuntimeError: Error(s) in loading state_dict for Net:
\tMissing key(s) in state_dict: "conv1.weight", "fc.weight".
\tUnexpected key(s) in state_dict: "module.conv1.weight", "module.fc.weight".
"""


@pytest.mark.parametrize(
    "front",
    [
        "",
        "3: ",
        "[default3]:",
        "[rank0]: ",
        "2024-05-01 12:00:00,123 - ",
        "> ",
        "E   ",
        "web_1  | ",
        "(pid 77) ",
        "\x1b[31m",
    ],
)
def test_a_whole_traceback_in_noise(front: str):
    explanation = explain("\n".join(front + line for line in TRACEBACK.splitlines()))
    assert explanation is not None
    assert explanation.name == "does-not-fit"
    assert any("2 keys with the wrapper prefix `module.`" in cause for cause, _ in explanation.causes)
    assert explanation.file == "runs/last.pth"
    assert any(advice.command == "ckptfix repair runs/last.pth" for advice in explanation.advice)


@pytest.mark.parametrize("width", [40, 61, 80, 100])
def test_a_terminal_has_broken_the_lines(width: int):
    lines = (line[start : start + width] for line in TRACEBACK.splitlines() for start in range(0, len(line), width))
    explanation = explain("\n".join(lines))
    assert explanation is not None
    assert any("2 keys with the wrapper prefix `module.`" in cause for cause, _ in explanation.causes)


def test_escapes_of_repr_and_json():
    explanation = explain(TRACEBACK.splitlines()[5] + r"\n\tMissing key(s) in state_dict: \"a.w\", \"b.w\". \n\t"
                          r"Unexpected key(s) in state_dict: \"module.a.w\", \"module.b.w\". ")  # fmt: skip
    assert explanation is not None
    assert any("with the wrapper prefix `module.`" in cause for cause, _ in explanation.causes)


DIRECT = "\nThe above exception was the direct cause of the following exception:\n\n"
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"


def trace(message: str) -> str:
    return f'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n{message}\n'


CUT = trace("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory")
LFS = trace("_pickle.UnpicklingError: invalid load key, 'v'.")
WRAPPER = trace("OSError: Unable to load weights from pytorch checkpoint file for 'a' at 'b'.")
TEXT = trace("UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80 in position 64: invalid start byte")
OTHER = trace("ValueError: nothing that is known")
MODULE = trace("ModuleNotFoundError: No module named 'models'")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        pytest.param(OTHER + DIRECT + OTHER, None, id="nothing is known"),
        pytest.param(CUT + DIRECT + OTHER, "damaged-archive", id="the cause"),
        pytest.param(CUT + DIRECT + LFS, "damaged-archive", id="the cause of two that are known"),
        pytest.param(OTHER + DIRECT + CUT, "damaged-archive", id="the cause is unknown"),
        pytest.param(LFS + HANDLING + MODULE, "missing-module", id="the first was handled by another try"),
        pytest.param(LFS + HANDLING + TEXT + HANDLING + WRAPPER, "git-lfs-pointer", id="as transformers does"),
        pytest.param(WRAPPER, "transformers-wrapper", id="the wrapper alone"),
        pytest.param(CUT + OTHER, "damaged-archive", id="two tracebacks of a log"),
        pytest.param("Loss is nan\n" + CUT, "damaged-archive", id="a line before the traceback"),
        pytest.param("[rank0]: " + CUT + "[rank1]: " + CUT, "damaged-archive", id="two ranks"),
    ],
)
def test_which_exception_matters(text: str, name: str | None):
    explanation = explain(text)
    assert (explanation and explanation.name) == name


def test_a_line_that_raises_is_not_the_message():
    source = 'raise RuntimeError(f"Missing key in checkpoint state_dict: {fqn}.")'
    explanation = explain(f"[rank0]:     {source}\n[rank0]: RuntimeError: Missing key in checkpoint state_dict: a.b.")
    assert explanation is not None
    assert "asked for a.b," in explanation.causes[0][0]


def test_a_message_that_is_recognised_by_its_frames():
    message = trace("AttributeError: 'NoneType' object has no attribute 'copy'")
    assert explain(message) is None
    explanation = explain(message.replace("f()", "state_dict = model.load_state_dict(weights)"))
    assert explanation is not None
    assert explanation.name == "model-not-state-dict"


@pytest.mark.parametrize(
    ("message", "line", "name"),
    [
        (
            "AttributeError: 'NoneType' object has no attribute 'eval'",
            "model.append(ckpt['ema' if ckpt.get('ema') else 'model'].float().fuse().eval())",
            "container-key",
        ),
        (
            "AttributeError: 'dict' object has no attribute 'generator'",
            "weights = loaded.generator.state_dict()",
            "state-dict-not-model",
        ),
        (
            "TypeError: 'Sequential' object is not iterable",
            "generator, discriminator, g_ema = pickle.load(f)",
            "model-not-state-dict",
        ),
        (
            "RuntimeError: The size of tensor a (768) must match the size of tensor b (2) at non-singleton dimension 0",
            "exp_avg.mul_(beta1).add_(grad, alpha=1.0 - beta1)",
            "optimizer-groups",
        ),
        ("AssertionError", "assert metadata is not None", "distributed-missing-key"),
        ("AssertionError", "assert isinstance(weight, DTensor)", "merger-of-ranks"),
        ("AssertionError", "assert isinstance(weight, torch.distributed._tensor.DTensor)", "merger-of-ranks"),
        ("AssertionError", "assert prev_state_dict_type is not None", "no-fsdp-module"),
        ("KeyError: 'xyz'", "self.optimizers[k].load_state_dict(v)", "optimizer-groups"),
        ("KeyError: 'language_model.norm.weight'", 'models/qwen2.py", line 1, in load_weights', "names-of-an-engine"),
        (
            "AttributeError: 'BertEncoder' object has no attribute 'bias'",
            "in load_tf_weights_in_bert",
            "tensorflow-conversion",
        ),
        ("AssertionError", "assert len(self.ckpt_list) > 0", "sharded-checkpoint"),
        ("KeyError: 'lm_head.weight'", "param = params_dict[name]", "names-of-an-engine"),
        ("KeyError: 'step'", "step = checkpoint['step']", "weights-without-optimizer"),
        ("KeyError: 'step'", "torch/optim/adamw.py: torch.is_tensor(p_state['step'])", "optimizer-groups"),
        ("AttributeError: 'NoneType' object has no attribute 'lower'", "load_torch_file(path)", "no-such-file"),
        ("AssertionError", "weight_loader: assert param_data.shape == loaded_weight.shape", "names-of-an-engine"),
        (
            "RuntimeError: start (0) + length (4096) exceeds dimension size (2048).",
            "weight_loader: loaded_weight = loaded_weight.narrow(output_dim, start_idx, shard_size)",
            "names-of-an-engine",
        ),
        (
            "IndexError: list index out of range",
            "path = sorted(glob.glob(os.path.join(checkpoint_dir, '*.pth')))[-1]",
            "no-such-file",
        ),
        (
            "AttributeError: 'NoneType' object has no attribute 'get'",
            'if metadata.get("format") == "pt":',
            "safetensors-without-format",
        ),
    ],
)
def test_what_a_line_of_code_says_of_a_short_message(message: str, line: str, name: str):
    elsewhere = explain(trace(message))
    assert elsewhere is None or elsewhere.name != name
    explanation = explain(trace(message).replace("f()", line))
    assert explanation is not None
    assert explanation.name == name


@pytest.mark.parametrize(
    "line",
    [
        "self.generator.load_state_dict(checkpoint['gen'])",
        "net.load_state_dict(torch.load(path, map_location='cpu')['gen'])",
        "weights = ckpt['gen']",
    ],
)
def test_the_entry_of_a_file_is_recognised_by_the_line_that_asks_for_it(line):
    message = trace("KeyError: 'gen'")
    assert explain(message) is None
    explanation = explain(message.replace("f()", line))
    assert explanation is not None
    assert "the file has no entry 'gen'" in explanation.causes[0][0]
    assert explain(message.replace("f()", line.replace("'gen'", "'other'"))) is None


@pytest.mark.parametrize(
    ("message", "frame", "name"),
    [
        ("struct.error: unpack requires a buffer of 4 bytes", "torch/_weights_only_unpickler.py", "truncated-file"),
        ("RuntimeError: Trying to resize storage that is not resizable", "_rebuild_tensor", "truncated-file"),
        ("AssertionError: storage key '12' not found in {}", "torch/serialization.py", "truncated-file"),
        (
            "    result = unpickler.load()\nUnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 3",
            "torch/serialization.py",
            "python-2-pickle",
        ),
    ],
)
def test_damage_that_shows_in_the_frames_alone(message: str, frame: str, name: str):
    assert explain(trace(message)) is None
    explanation = explain(trace(message).replace("a.py", frame))
    assert explanation is not None
    assert explanation.name == name


@pytest.mark.parametrize(
    ("message", "frame"),
    [
        pytest.param("KeyError: 'betas'", "torch/optim/adam.py", id="the state of SGD in Adam"),
        pytest.param(
            "RuntimeError: The size of tensor a (7) must match the size of tensor b (3) at non-singleton dimension 3",
            "torch/optim/adam.py",
            id="the state of another model",
        ),
    ],
)
def test_a_step_of_an_optimizer_with_the_state_of_another(message: str, frame: str):
    elsewhere = explain(trace(message))
    assert elsewhere is None or elsewhere.name in ("unequal-sizes", "optimizer-of-other-kind")
    explanation = explain(trace(message).replace("a.py", frame))
    assert explanation is not None
    assert explanation.name in ("optimizer-groups", "optimizer-of-other-kind")


@pytest.mark.parametrize(
    "front", ["", "loaded config\n", "INFO a\nRuntimeError: Error(s) in loading state_dict for A:\n\t"]
)
def test_a_list_of_a_thousand_keys_without_a_traceback(front: str):
    keys = ", ".join(f'"module.layer{n}.0.weight"' for n in range(1000))
    explanation = explain(f"{front}Unexpected key(s) in state_dict: {keys}. \n")
    assert explanation is not None
    assert "1000" in explanation.causes[1][0]


@pytest.mark.parametrize("sign", ["a", "A_", "Error", " ", "'", "a.", '"a", ', "%|", "["])
def test_an_endless_line_takes_no_time(sign: str):
    begun = time.process_time()
    assert explain(sign * (100_000 // len(sign))) is None
    assert time.process_time() - begun < 20  # a quadratic search takes many minutes


def test_the_parts_of_a_chain():
    parts = messages(LFS + HANDLING + TEXT + DIRECT + WRAPPER)
    assert [part.relation for part in parts] == [Relation.FIRST, Relation.WHILE_HANDLING, Relation.CAUSED]
    assert [part.headline.partition(":")[0] for part in parts] == [
        "_pickle.UnpicklingError",
        "UnicodeDecodeError",
        "OSError",
    ]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("no file", None),
        ("torch.load('a.pth'); torch.load('b.pth')", None),
        ("failed locating file constants.pkl: file not found", None),
        ("see https://example.com/a.pth", None),
        ("Expected 4 of '*_optim_states.pt' under 'ckpt' but found 3 files", None),
        (r"No file matching 'model_world_size_(\d+)_rank_0.pt' found in ckpt", None),
        ('  File "train.py", line 3', None),
        ("torch.load('a b.pth')", "a b.pth"),
        ("torch.load('a.pth') # a.pth", "a.pth"),
        ("python test.py --weights runs/best.pt --img 640", "runs/best.pt"),
        (r"C:\models\net.ckpt", r"C:\models\net.ckpt"),
        (r"Error verifying pickled file from V:/!SDModels\net.ckpt:", None),  # a part of a path is no path
        ("loading <model.pth>", "model.pth"),
        ("    return self.model(x)", None),
        ("open('yolov3.weights')", "yolov3.weights"),
        ("[Errno 2] No such file or directory: 'model.safetensors'", "model.safetensors"),
        ("IsADirectoryError: [Errno 21] Is a directory: 'out 1/checkpoint-500'", "out 1/checkpoint-500"),
    ],
)
def test_the_file_that_a_text_names(text: str, name: str | None):
    assert file_name(text) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("see https://example.com/a/checkpoint-500", None),
        ("load_checkpoint(folder, tag='global_step10')", None),  # a tag is no path
        ("loading global_step10", None),
        ("'logs/worker_rank_3.log'", None),
        ('  File "/a/rank_3.py", line 3', None),
        ("a/checkpoint-1 and b/checkpoint-2", None),
        ("Directory 'out/global_step10' doesn't exist", None),
        ("--checkpoint.load_step=1000 not found at outputs/step-1000", None),
        ("No such file or directory: 'out/checkpoint-500'", None),
        ("can't find *_optim_states.pt files in directory 'out/global_step10'", "out/global_step10"),
        ("Unable to find 'latest' file at out/checkpoint-500/latest", "out/checkpoint-500"),
        ("No such file or directory: 'out/global_step10/mp_rank_00_model_states.pt'", "out/global_step10"),
        ("No such file or directory: 'it/iter_0000100/mp_rank_01_003/model_optim_rng.pt'", "it/iter_0000100"),
        ("[Errno 2] No such file or directory: 'out/step 7/__3_0.distcp'", "out/step 7"),
        ("no file named a.bin, b.bin found in directory out/checkpoint-500.", "out/checkpoint-500"),
        ("ckpt/iter_0001000 is not a distributed checkpoint", "ckpt/iter_0001000"),
        ("read out/latest, then out/global_step3/", "out/global_step3"),
        (r"C:\runs\checkpoint-500 is empty", r"C:\runs\checkpoint-500"),
        (r"""'it\'s "x"/global_step10'""", """it's "x"/global_step10"""),
        ("\"lr=1,tag='a b'/global_step10/mp_rank_00_model_states.pt\"", "lr=1,tag='a b'/global_step10"),
    ],
)
def test_the_folder_that_a_text_names(text: str, name: str | None):
    assert folder_name(text) == name


def test_an_existing_folder_with_the_file_that_names_a_save(tmp_path: Path):
    text = f"ValueError: Expected 4 of '*_optim_states.pt' under '{tmp_path}' but found 3 files."
    assert folder_name(text) is None
    (tmp_path / "latest").write_text("global_step2")
    assert folder_name(text) == str(tmp_path)


@pytest.mark.parametrize("line", ["out/run/checkpoint-{} does not exist", "'out/a b/checkpoint-{}'", "\"'`{}"])
def test_many_folders_take_no_time(line: str):
    text = "\n".join(map(line.format, range(20_000)))
    begun = time.process_time()
    assert folder_name(text) is None
    assert time.process_time() - begun < 10


@given(st.text(max_size=300))
def test_any_text_gives_an_answer_or_none(text: str):
    explanation = explain(text)
    assert explanation is None or explanation.name


def test_a_long_log_takes_no_time():
    log = "".join(f'step {n}: loss 0.{n} "a{n}.weight" [1, 2] at /x/y{n}.py\n' for n in range(20_000))
    begun = time.process_time()
    explanation = explain(log + CUT)
    assert explanation is not None
    assert explanation.name == "damaged-archive"
    assert time.process_time() - begun < 20
