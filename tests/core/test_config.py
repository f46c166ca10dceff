import pytest

from ckptfix.core.config import load_configuration
from ckptfix.errors import UsageError


def test_noop_no_configuration_file(tmp_path):
    configuration = load_configuration(tmp_path)
    assert configuration.values == {}
    assert configuration.path is None


def test_a_pyproject_without_the_table_is_ignored(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n[tool.other]\n')
    assert load_configuration(tmp_path).path is None


@pytest.mark.parametrize(
    ("name", "head"), [("ckptfix.toml", ""), ("pyproject.toml", "[tool.ckptfix]\n")], ids=["own file", "pyproject"]
)
def test_values_of_every_kind(tmp_path, name, head):
    (tmp_path / name).write_text(
        head
        + """\
model = "zoo:resnet18"
model-args = { depth = 18 }
select = ["KEY", "BUF101"]
no-values = true
seed = 3
timeout = 1.5
output-format = "json"
input = ["2x3x8x8"]
"""
    )
    configuration = load_configuration(tmp_path)
    assert configuration.path == tmp_path / name
    assert configuration.values == {
        "model": "zoo:resnet18",
        "model_args": {"depth": 18},
        "select": ["KEY", "BUF101"],
        "values": False,
        "seed": 3,
        "timeout": 1.5,
        "output_format": "json",
        "input": ["2x3x8x8"],
    }


def test_only_the_nearest_configuration_file_is_used(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "ckptfix.toml").write_text("seed = 1\nno-values = true\n")
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.ckptfix]\nseed = 2\n")
    assert load_configuration(inner).values == {"seed": 2}


def test_ckptfix_toml_wins_over_pyproject_toml(tmp_path):
    (tmp_path / "ckptfix.toml").write_text("seed = 1\n")
    (tmp_path / "pyproject.toml").write_text("[tool.ckptfix]\nseed = 2\n")
    assert load_configuration(tmp_path).values == {"seed": 1}


def test_paths_are_relative_to_the_file_that_names_them(tmp_path):
    inner = tmp_path / "runs"
    inner.mkdir()
    (tmp_path / "ckptfix.toml").write_text(
        'like = "good.pth"\nfill = "/abs/donor.pth"\ncompare = "good.pth"\nrecalibrate = "data.npy"\n'
        'input = ["ids=data.npy", "2x3", "x.pt"]\n'
    )
    good, data = str(tmp_path / "good.pth"), str(tmp_path / "data.npy")
    expected: dict[str, object] = {"like": good, "fill": "/abs/donor.pth", "compare": good, "recalibrate": data}
    expected |= {"input": [f"ids={data}", "2x3", str(tmp_path / "x.pt")]}
    assert load_configuration(inner).values == expected


def test_special_words_are_not_made_into_paths(tmp_path):
    (tmp_path / "ckptfix.toml").write_text('fill = "target"\ncompare = "source"\n')
    assert load_configuration(tmp_path).values == {"fill": "target", "compare": "source"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("unsafe-fix = true", "there is no key unsafe-fix; did you mean unsafe-fixes?", id="a slip"),
        pytest.param("xyzzy = 1", "there is no key xyzzy; the keys are ", id="an unknown key"),
        pytest.param(
            "unsafe_fixes = true", "there is no key unsafe_fixes; did you mean unsafe-fixes?", id="snake case"
        ),
        pytest.param("output = 'x'", "there is no key output", id="a flag of one run"),
        pytest.param("seed = true", "seed has to be an integer, not True", id="a bool is no number"),
        pytest.param("seed = 1.5", "seed has to be an integer, not 1.5", id="a fraction"),
        pytest.param("select = 'KEY'", "select has to be a list of strings, not 'KEY'", id="a text is no list"),
        pytest.param("select = [1]", "select has to be a list of strings", id="a list of numbers"),
        pytest.param("no-values = 'yes'", "no-values has to be a boolean", id="a text is no bool"),
        pytest.param("model = ['a']", "model has to be a string", id="a list is no text"),
        pytest.param("timeout = true", "timeout has to be a number", id="a bool is no time"),
        pytest.param(
            "output-format = 'xml'", "output-format has to be one of full, concise, json, github", id="a choice"
        ),
        pytest.param("format = 'onnx'", "format has to be one of pth, safetensors", id="another choice"),
        pytest.param("seed = ", "invalid TOML", id="no TOML"),
        pytest.param(f"seed = {'1' * 5000}", "invalid TOML", id="a number of too many digits"),
        pytest.param(f"seed = {'[' * 5000}", "invalid TOML", id="lists in lists"),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path, text, said):
    (tmp_path / "ckptfix.toml").write_text(text)
    with pytest.raises(UsageError) as error:
        load_configuration(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'ckptfix.toml'}: {said}")
    assert "\n" not in str(error.value)


def test_other_encodings_are_refused(tmp_path):
    (tmp_path / "ckptfix.toml").write_bytes("model = 'Größe:x'".encode("latin-1"))
    with pytest.raises(UsageError, match="UTF-8"):
        load_configuration(tmp_path)


@pytest.mark.parametrize("text", ["tool.ckptfix = 3", "[[tool.ckptfix]]"])
def test_the_configuration_has_to_be_a_table(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UsageError, match="has to be a table"):
        load_configuration(tmp_path)
