import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.core.options import command_words, option_words
from ckptfix.errors import UsageError
from ckptfix.zoo.zoo_toml import Table, Treatment, plain_table, read_table


def table_of(folder: Path, text: str, **given) -> Table:
    path = folder / "zoo.toml"
    path.write_text(text, encoding="utf-8")
    return read_table(path, given)


def test_the_empty_table_gives_every_file_the_repairs_without_a_target(tmp_path):
    for table in (Table(), plain_table(), table_of(tmp_path, "")):
        treatment = table.treatment_of("a/b.pth")
        assert (treatment.arguments, treatment.output_name("a/b.pth")) == ({}, "a/b.pth")
        assert not table.excludes("a/b.pth")
        assert table.idle(["a/b.pth"]) == []


EXAMPLE = """\
exclude = ["runs/debug/"]

[defaults]
format = "safetensors"
ignore = ["val203"]
timeout = 20

[[files]]
match = "resnet18-*.pth"
model = "torchvision.models:resnet18"
model-args = { num_classes = 10 }
weights = "ema"
input = ["1x3x32x32"]
output = "resnets/{stem}{suffix}"

[[files]]
match = ["resnet*.pth", "other/**/*.pth"]
like = "good.pth"
format = "pth"
fill = "target"
no-values = true
"""


def test_another_configuration_of_a_named_model_is_another_treatment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert").mkdir()
    digests = set()
    for text in ("{}", '{"hidden_size": 8}'):
        (tmp_path / "bert" / "config.json").write_text(text)
        digests.add(Treatment(choices={"model": "transformers:bert"}).digest("1"))
    assert len(digests) == 2


def test_the_first_match_wins_and_its_keys_outdo_the_defaults(tmp_path):
    (tmp_path / "good.pth").touch()
    table = table_of(tmp_path, EXAMPLE)
    first = table.treatment_of("x/resnet18-abc.pth")
    assert (first.model, first.arguments["model_args"], first.like) == (
        "torchvision.models:resnet18",
        {"num_classes": 10},
        None,
    )
    assert first.settings.keys() == {"format", "ignore", "weights", "input", "timeout"}
    assert (first.settings["format"], first.settings["ignore"]) == ("safetensors", ("val203",))
    assert (first.settings["input"], first.settings["timeout"]) == (("1x3x32x32",), 20)
    assert first.output_name("x/resnet18-abc.pth") == "resnets/resnet18-abc.safetensors"

    second = table.treatment_of("resnet50.pth")
    assert second is table.treatment_of("other/deep/er/x.pth")
    assert second.like == str(tmp_path / "good.pth")
    assert second.settings == {"format": "pth", "ignore": ("val203",), "fill": "target", "values": False}

    rest = table.treatment_of("bert.bin")
    assert rest.settings == {"format": "safetensors", "ignore": ("val203",)}
    assert table.excludes("a/runs/debug/x.pth") is False
    assert table.excludes("runs/debug/x.pth") is True


def test_arguments_are_those_of_repair(tmp_path):
    import inspect

    import ckptfix

    (tmp_path / "good.pth").touch()
    for name in ("resnet18-x.pth", "resnet50.pth", "x"):
        treatment = table_of(tmp_path, EXAMPLE).treatment_of(name)
        inspect.signature(ckptfix.repair).bind(name, **treatment.arguments)


def test_the_command_of_one_file(tmp_path):
    treatment = table_of(tmp_path, EXAMPLE.replace('like = "good.pth"', 'model = "m:f"')).treatment_of("resnet50.pth")
    assert " ".join(
        command_words("repair", "old/resnet50.pth", {**treatment.choices, "output": "new/x.pth", "unsafe_fixes": True})
    ) == (
        "ckptfix repair old/resnet50.pth --model m:f --no-values --ignore val203 --unsafe-fixes --fill target"
        " --timeout 20 --output new/x.pth --format pth"
    )


def test_another_target_takes_the_place_of_that_of_the_defaults(tmp_path):
    (tmp_path / "good.pth").touch()
    text = '[defaults]\nmodel = "m:f"\nmodel-args = [1]\ninput = ["1x3"]\n[[files]]\nmatch = "a"\nlike = "good.pth"\n'
    table = table_of(tmp_path, text)
    assert table.treatment_of("a").arguments == {"like": str(tmp_path / "good.pth")}
    assert table.treatment_of("b").arguments["model_args"] == [1]


def test_what_the_defaults_say_of_models_and_targets_is_for_files_that_have_one(tmp_path):
    table = table_of(tmp_path, '[defaults]\nfill = "target"\nsmoke = true\nbackward = true\n')
    assert table.treatment_of("a").arguments == {}


def test_the_command_line_wins(tmp_path):
    text = '[defaults]\nseed = 1\n[[files]]\nmatch = "a"\nmodel = "m:f"\nseed = 2\nformat = "pth"\n'
    table = table_of(tmp_path, text, seed=3, like=__file__)
    assert table.treatment_of("a").arguments["seed"] == 3
    assert table.treatment_of("a").model is None
    assert table.treatment_of("b").like == __file__
    assert plain_table({"format": "safetensors"}).treatment_of("a").output_name("a.pth") == "a.safetensors"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(
            '[[files]]\nmatch = "a"\nmodel = "m:f"\ninput = ["x"]', '(a): input = "x" is neither', id="no input"
        ),
        pytest.param('[defaults]\nmodel = "m:f"\ndevice = "gpu"', 'device = "gpu": not a device', id="no device"),
        pytest.param("exclud = []", "there is no exclud; did you mean exclude?", id="a slip at the top"),
        pytest.param("[default]", "there is no default; did you mean [defaults]?", id="a slip in a table's name"),
        pytest.param("[[file]]", "there is no file; did you mean [[files]]?", id="a slip in a list's name"),
        pytest.param("[resnet]", "there is no resnet; a table of files begins with [[files]]", id="another table"),
        pytest.param('model = "m:f"', "model is outside of a table", id="a key without a table"),
        pytest.param("exclude = 'x'", "exclude must be a list of patterns", id="exclude is no list"),
        pytest.param("exclude = ['[z-a]']", "exclude: '[z-a]' is not a pattern", id="a range upside down"),
        pytest.param("defaults = 1", "defaults must be a table", id="defaults is no table"),
        pytest.param("[files]\nmatch = 'a'", "files must be one table for each group", id="one pair of brackets"),
        pytest.param("[[files]]\nmodel = 'm:f'", "[[files]] 1 has no match", id="no pattern"),
        pytest.param("[[files]]\nmatch = []", "[[files]] 1: match has to be a pattern or a list", id="an empty list"),
        pytest.param("[[files]]\nmatch = 5", "[[files]] 1 (5): match has to be a pattern or a list", id="a number"),
        pytest.param("[[files]]\nmatch = ''", "[[files]] 1: '' matches nothing", id="an empty pattern"),
        pytest.param(
            "[[files]]\nmatch = 'a'\n[[files]]\nmatch = ['b', 'c']\nmodell = 'm:f'",
            "[[files]] 2 (b, c): there is no key modell; did you mean model?",
            id="a slip in the second table",
        ),
        pytest.param("[[files]]\nmatch = 'a'\nexclude = ['b']", "above the first table", id="exclude after a table"),
        pytest.param("[defaults]\nexclude = ['b']", "above the first table", id="exclude in the defaults"),
        pytest.param("[[files]]\nmatch = 'a'\nquiet = true", "(a): there is no key quiet", id="a flag of a report"),
        pytest.param("[defaults]\nsalvage = true", "[defaults]: there is no key salvage", id="a blank cheque"),
        pytest.param("[defaults]\nseed = 'x'", "[defaults]: seed has to be an integer", id="a text for a number"),
        pytest.param("[defaults]\nformat = 'onnx'", "format has to be one of pth, safetensors", id="an unknown format"),
        pytest.param("[defaults]\nignore = ['FOO']", '[defaults]: ignore = "FOO": no rule', id="an unknown rule"),
        pytest.param("[defaults]\ndtype = 'fp17'", '[defaults]: dtype = "fp17": unknown dtype', id="an unknown dtype"),
        pytest.param("[defaults]\nshard-size = 'much'", 'shard-size = "much": not a size', id="no size"),
        pytest.param("[defaults]\nfor-torch = 'x'", 'for-torch = "x": not a version', id="no version"),
        pytest.param(
            "[defaults]\noutput = '{stm}'", "[defaults]: output = '{stm}': there is no {stm}", id="a template"
        ),
        pytest.param("[[files]]\nmatch='a'\nmodel='m'", "model = 'm': write it as pkg.mod:factory", id="no factory"),
        pytest.param(
            "[[files]]\nmatch='a'\nmodel='m:f'\nlike='zoo.toml'", "model and like exclude each other", id="two targets"
        ),
        pytest.param("[[files]]\nmatch='a'\nlike='nowhere.pth'", "there is no such file", id="no file"),
        pytest.param("[[files]]\nmatch='a'\nfill='targt'\nmodel='a:b'", "did you mean target", id="a slip in a word"),
        pytest.param("[[files]]\nmatch='a'\nlike='known:timm/resnet5O'", "did you mean timm/resnet50", id="no model"),
        pytest.param("[defaults]\nlike='known:timm/resnet50[classes=2]'", "is not an argument of", id="no argument"),
        pytest.param("[[files]]\nmatch='a'\nlike='s3://b/x.pth'", "like = 's3://b/x.pth': is a URL", id="a URL"),
        pytest.param("[[files]]\nmatch='a'\ninput=['1x3']", "input has no meaning without a model", id="no model"),
        pytest.param("[[files]]\nmatch='a'\nfill='target'", 'fill = "target" takes values from', id="no target"),
        pytest.param(
            "[[files]]\nmatch='a'\nreplace=['x']", "replace needs a source of values", id="a setting that needs another"
        ),
        pytest.param(
            "[[files]]\nmatch='a'\nmodel='m:f'\nmodel-args={x=2020-01-01}", "give texts, numbers", id="a date"
        ),
        pytest.param("[[files]\n", "invalid TOML", id="no TOML"),
    ],
)
def test_errors_name_the_file_the_table_and_the_key(tmp_path, text, said):
    with pytest.raises(UsageError) as error:
        table_of(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'zoo.toml'}: ")
    assert said in str(error.value)


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"zoo\.toml: cannot read the configuration"):
        read_table(tmp_path / "zoo.toml")


def test_tables_that_match_nothing_are_reported(tmp_path):
    text = "".join(f"[[files]]\nmatch = '{pattern}'\n" for pattern in ("*.pth", "a.pth", "b.bin"))
    assert table_of(tmp_path, text).idle(["a.pth"]) == [
        f"{tmp_path / 'zoo.toml'}: [[files]] {number} ({name}) matches no file, or only files that an earlier table"
        " matches"
        for number, name in ((2, "a.pth"), (3, "b.bin"))
    ]


class TestDigest:
    def test_it_is_the_same_for_the_same_settings(self, tmp_path):
        table = table_of(tmp_path, '[[files]]\nmatch = "a"\nunsafe-fixes = false\n[[files]]\nmatch = ["b", "c"]\n')
        digests = {each.digest("1") for each in (*table.treatments, table.rest, Table().rest, Treatment())}
        assert len(digests) == 1

    def test_it_changes_with_all_that_counts(self, tmp_path):
        texts = [
            "",
            "format = 'pth'",
            "model = 'm:f'",
            "model = 'm:f'\nmodel-args = [1]",
            "model = 'm:f'\nsmoke = false",
        ]
        texts += ["output = 'x/{stem}'", "model = 'm:f'\ninput = ['1x2']", "model = 'm:f'\ncompare = 'source'"]
        digests = [table_of(tmp_path, f"[defaults]\n{text}\n").rest.digest("1") for text in texts]
        assert len({*digests, Treatment().digest("2")}) == len(texts) + 1

    @pytest.mark.parametrize("key", ["like", "fill", "compare", "recalibrate", "adapter"])
    def test_it_changes_with_a_file_that_is_read(self, tmp_path, key):
        beside = tmp_path / "beside.pth"
        save_file({"a": torch.ones(2)}, beside)
        text = f"[defaults]\nmodel = 'm:f'\n{key} = 'beside.pth'\n".replace("model = 'm:f'\nlike", "like")

        def digest(folder: Path = tmp_path) -> str:
            return table_of(folder, text).rest.digest("1")

        before = digest()
        assert digest() == before
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        os.link(beside, elsewhere / "beside.pth")
        assert digest(elsewhere) == before, "the place of the file does not count"
        save_file({"a": torch.ones(1)}, beside)
        assert digest() != before

    def test_it_changes_with_a_shard(self, tmp_path):
        index, shard = tmp_path / "model.safetensors.index.json", tmp_path / "model-1.safetensors"
        index.touch()
        shard.write_bytes(b"x")
        text = "[defaults]\nlike = 'model.safetensors.index.json'\n"
        (tmp_path / "zoo.toml").touch()
        before = read_digest(tmp_path, text)
        shard.write_bytes(b"yy")
        assert read_digest(tmp_path, text) != before

    def test_it_changes_with_the_code_of_the_model(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        code = tmp_path / "mine.py"
        code.write_text("")
        text = "[defaults]\nmodel = 'mine:f'\n"
        before = table_of(tmp_path, text).rest.digest("1")
        code.write_text("# more")
        assert table_of(tmp_path, text).rest.digest("1") != before


def read_digest(folder: Path, text: str) -> str:
    table = folder.parent / f"{folder.name}.toml"
    table.write_text(text.replace("like = '", f"like = '{folder.name}/"))
    return read_table(table).rest.digest("1")


def test_a_treatment_goes_to_another_process(tmp_path):
    (tmp_path / "good.pth").touch()
    treatment = table_of(tmp_path, EXAMPLE).treatment_of("resnet18-x.pth")
    digest = treatment.digest("1")
    other = pickle.loads(pickle.dumps(treatment))
    assert (other, other.digest("1")) == (treatment, digest)


def test_noop_options_of_a_model_go_to_the_tables_that_have_one(tmp_path):
    text = '[[files]]\nmatch = "a"\nmodel = "m:f"\n'
    assert table_of(tmp_path, text, timeout=7).treatment_of("a").settings == {"timeout": 7}
    assert plain_table({"smoke": False}).rest.settings == {}


def test_noop_a_donor_of_the_defaults_is_for_the_tables_that_have_a_target(tmp_path):
    (tmp_path / "donor.pth").touch()
    table = table_of(tmp_path, '[defaults]\nfill = "donor.pth"\n[[files]]\nmatch = "a"\nmodel = "m:f"\n')
    assert table.treatment_of("a").settings == {"fill": str(tmp_path / "donor.pth")}
    assert table.rest.settings == {}


def test_options_of_a_model_without_any_model_are_refused(tmp_path):
    for table in (lambda given: plain_table(given), lambda given: table_of(tmp_path, "", **given)):
        with pytest.raises(UsageError, match="model_args= has no meaning without a model"):
            table({"model_args": "[1]"})


def test_the_models_of_a_table_come_with_the_first_place_that_names_them(tmp_path):
    text = '[[files]]\nmatch = "a"\nmodel = "m:f"\n[[files]]\nmatch = "b"\nmodel = "m:f"\n[[files]]\nmatch = "c"\n'
    assert table_of(tmp_path, text).models() == {"m:f": f"{tmp_path / 'zoo.toml'}: [[files]] 1 (a)"}
    assert plain_table().models() == {}


def test_a_map_is_read_next_to_the_source_if_it_is_a_file(tmp_path):
    """Edited after a run, it made no file be done again. One that ships with ckptfix changes with its version."""
    (tmp_path / "map.json").write_text('{"ckptfix-map": 1, "rules": [{"from": "a.*", "to": "b.*"}]}')
    own = '[[files]]\nmatch = "a"\nrename-map = "map.json"\n'
    text = f'{own}[[files]]\nmatch = "b"\nrename-map = "esrgan-old_basicsr"\n'
    before, shipped = (table_of(tmp_path, text).treatment_of(name) for name in "ab")
    assert list(before.files()) == [("rename_map", str(tmp_path / "map.json"))]
    assert list(shipped.files()) == []
    old = before.digest("1")
    (tmp_path / "map.json").write_text('{"ckptfix-map": 1, "rules": [{"from": "a.*", "to": "longer.*"}]}')
    assert table_of(tmp_path, text).treatment_of("a").digest("1") != old
    assert table_of(tmp_path, text).treatment_of("b").digest("1") == shipped.digest("1")


def test_recipes_for_shapes(tmp_path):
    """Those of the defaults are for the files that have a model; a list of classes is read next to the source."""
    (tmp_path / "classes.txt").write_text("0\n1\n")
    defaults = '[defaults]\nadapt = { pos_embed = "timm" }\n'
    own = '[[files]]\nmatch = "a"\nlike = "classes.txt"\nadapt = { in_chans = "mean", head = "classes.txt" }\n'
    table = table_of(tmp_path, f'{defaults}{own}[[files]]\nmatch = "b"\nmodel = "m:f"\n')
    first, second, rest = (table.treatment_of(name) for name in "abc")
    assert first.settings["adapt"] == ("in_chans=mean", f"head={tmp_path / 'classes.txt'}")
    assert ("adapt", str(tmp_path / "classes.txt")) in set(first.files())
    assert option_words(first.choices)[-4:] == (
        "--adapt",
        "in_chans=mean",
        "--adapt",
        f"head={tmp_path / 'classes.txt'}",
    )
    assert second.settings["adapt"] == ("pos_embed=timm",)
    assert "adapt" not in rest.settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('adapt = { pos_embed = "tim" }', r'adapt = { "pos_embed" = "tim" }: .* did you mean timm\?'),
        ('adapt = "pos_embed=timm"', "adapt has to be a table of strings"),
        ("adapt = { pos_embed = 3 }", "adapt has to be a table of strings"),
    ],
)
def test_recipes_that_mean_nothing(tmp_path, text, said):
    with pytest.raises(UsageError, match=said):
        table_of(tmp_path, f'[[files]]\nmatch = "a"\nmodel = "m:f"\n{text}\n')


def test_adapters_of_a_group_of_files(tmp_path):
    """Their folders are relative to the table; a change of any file in one is a change of the settings."""
    for name in ("style", "detail"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    text = '[[files]]\nmatch = "unet*"\nadapter = ["style=0.7", "detail"]\n'
    treatment = table_of(tmp_path, text).treatment_of("unet.pth")
    paths = (f"{tmp_path / 'style'}=0.7", str(tmp_path / "detail"))
    assert treatment.arguments["adapter"] == paths
    assert option_words(treatment.choices) == ("--adapter", paths[0], "--adapter", paths[1])
    before = treatment.digest("1")
    (tmp_path / "detail" / "adapter_config.json").write_text("{ }")
    assert table_of(tmp_path, text).treatment_of("unet.pth").digest("1") != before
    with pytest.raises(UsageError, match="there is no such file"):
        table_of(tmp_path, text.replace("detail", "none"))
