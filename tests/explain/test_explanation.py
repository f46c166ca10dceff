"""Unknown text gets the nearest message, and nonsense gets none."""

import re
import shlex
from difflib import SequenceMatcher
from itertools import islice, product

import pytest

from ckptfix.explain import Explanation, MessageContext, explain, explanation, nearest
from ckptfix.explain.advice import Requirement
from ckptfix.explain.explanation import RECORDS, KnownMessage, recognise
from ckptfix.explain.text import messages
from tests.cli.programs import parse
from tests.explain.known import KNOWN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "!!! 123 ???",
        "asdf qwer zxcv",
        "hello world, how are you today",
        "ZeroDivisionError: division by zero",
        "KeyError: 'colour'",
        "AttributeError: 'Trainer' object has no attribute 'colour'",
        "RuntimeError: the kettle is empty",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co'): Max retries exceeded",
        "The quick brown fox jumps over the lazy dog and loads the model into memory on the device",
        "error: subprocess-exited-with-error",
    ],
)
def test_nothing_is_near(text: str):
    assert nearest(text) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ValueError: Expected more than 1 vlaue per chanel when trainig", "batchnorm-one-value"),
        ("Atempting to deserialise object on a CUDA devise but torch.cuda.is_availble() is False", "device-tag"),
        ("loaded optimizer state has parameter group with size that does not match the group", "optimizer-groups"),
        (
            "ValueError: numpy array given has negative stride, tensors with negative stride unsupported",
            "negative-strides",
        ),
    ],
)
def test_the_nearest(text: str, name: str):
    assert explain(text) is None
    close = nearest(text)
    assert close is not None
    assert close[0].name == name
    assert 0.5 <= close[1] <= 1


def test_a_long_log_of_unknown_errors_is_compared_from_its_end(monkeypatch):
    compared = 0

    class Counting(SequenceMatcher):
        def __init__(self, *given, **more):
            nonlocal compared
            compared += 1
            super().__init__(*given, **more)

    monkeypatch.setattr(explanation, "SequenceMatcher", Counting)
    names = ("".join(letters) for letters in product("abcdefgh", repeat=4))
    errors = [f"ValueError: no request of the kind {name} was finished by this worker" for name in islice(names, 2000)]
    log = "\n".join(f"Traceback (most recent call last):\n{error}" for error in [*errors, *errors[:3] * 100])
    assert nearest(log) is None
    assert compared < 50 * len(RECORDS)


def test_a_known_message_is_nearest_to_itself():
    for record in RECORDS:
        close = nearest(record.example) if len(record.example.split()) > 3 else None
        if close is not None:  # two or three words are not enough
            assert close[1] == pytest.approx(1, abs=0.05), record.name


UNKNOWN = {
    "nothing": "",
    "greeting": "hello, my model is good",
    "nonsense": "asdf qwer zxcv 1234 !!",
    "another error": "ZeroDivisionError: division by zero",
    "key of a user's dict": "KeyError: 'colour'",
    "dict of a user": "AttributeError: 'dict' object has no attribute 'shape'",
    "call of a user's dict": "TypeError: 'dict' object is not callable",
    "image that was not read": "AttributeError: 'NoneType' object has no attribute 'copy'",
    "index of a user's list": "IndexError: index out of range",
    "attribute of a user's class": "AttributeError: 'Trainer' object has no attribute 'colour'",
    "torch itself is missing": "ModuleNotFoundError: No module named 'torch'",
    "a good loss": "Epoch 3: train loss: 0.231, info: saved",
    "entry of a data set's settings": "KeyError: 'names'",
    "text that should be tokens": "AttributeError: 'str' object has no attribute 'to'",
    "settings of a user": "AttributeError: 'TrainConfig' object has no attribute 'lr'",
    "unpacking of a user's tuple": "ValueError: not enough values to unpack (expected 3, got 2)",
    "iteration over nothing": "TypeError: 'NoneType' object is not iterable",
    "import of a user's module": "ImportError: cannot import name 'helper' from 'utils' (/home/me/utils.py)",
    "finance": "the bank's loss in Nantes was 3 %",
    "a loss and a nanosecond": "loss: 0.1 (12 nanoseconds)",
    "memory of a browser": "the tab ran out of memory",
    "json": "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    "all keys matched": "<All keys matched successfully>",
    "connection": "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443)",
    "python syntax": "SyntaxError: invalid syntax",
    "shell": "bash: torchrun: command not found",
    "java": "java.lang.IllegalArgumentException: Unsupported class file major version 61",
    "http": "requests.exceptions.InvalidHeader: Invalid leading whitespace in header: x",
    "http in words": "Tomcat: Request Header Too Large",
    "a server's open files": "OSError: [Errno 24] Too many open files: '/var/log/access.log'",
    "assertion of a program in C": "a.out: a.c:10: main: Assertion `x > 0' failed. Aborted (core dumped)",
    "input of scikit-learn": "ValueError: Input contains NaN, infinity or a value too large for dtype('float64').",
    "loss of packets": "5 packets transmitted, packet loss = inf",
    "the best loss at the start": "epoch 3 loss=0.234 best loss=inf patience 3",
    "symbol of threads": "ImportError: /usr/lib/libfoo.so: undefined symbol: THREAD_create",
    "writing of another program": "fatal: file write failed: Broken pipe",
    "processes that disagree": "AssertionError: Coordinator rank mismatch: expected 2, got 3",
    "heads that do not match": "ValueError: k_descale head dimension must match num_kv_heads, expected 2, got 4",
    "files of another program": "Expected 4 of 5 replies under load but found 3 in time",
    "shards of a database": "All shards must have the same number of replicas",
    "folder of images": "FileNotFoundError: can't find image files in directory 'data/train'",
    "folder of another program": "FileNotFoundError: Directory '/var/lib/checkpoint' doesn't exist",
    "format of another program": "ValueError: Unrecognized checkpoint format at runs/model.ckpt",
    "process that is missing": "Missing checkpoint for rank 3 in the leader board",
    "other text file": "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xe9 in position 11: invalid continuation",
}


def test_is_not_recognised():
    assert [text for text in UNKNOWN.values() if explain(text) is not None] == []


BESIDE_FILE = {
    "KeyError: 'g_ema2'": "container-key",
    "AttributeError: 'AAttn' object has no attribute 'qkv'. Did you mean: 'qk'?": "attribute-of-module",
    "TypeError: a bytes-like object is required, not 'str'": "",
    "AttributeError: 'Trainer' object has no attribute 'colour'": "",
    "AttributeError: 'NoneType' object has no attribute 'colour'": "",
}


@pytest.mark.parametrize(("text", "name"), BESIDE_FILE.items(), ids=BESIDE_FILE)
def test_is_recognised_only_next_to_a_checkpoint(text: str, name: str):
    assert explain(text) is None
    explanation = explain(text, MessageContext("model.pth"))
    assert (explanation.name if explanation else "") == name
    if explanation:
        assert_whole(explanation)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_is_recognised_as_this_alone_and_answered(record: KnownMessage):
    for text in (record.example, *KNOWN.get(record.name, ())):
        (message,) = messages(text)
        assert [each.name for each, _ in recognise(message)] == [record.name], text
        explanation = explain(text, MessageContext("my model.pth", ("--model", "zoo:tiny")))
        assert explanation is not None
        assert explanation.name == record.name
        assert_whole(explanation)


def test_every_record_is_listed_with_its_wordings():
    assert KNOWN.keys() == {record.name for record in RECORDS}
    assert len({record.name for record in RECORDS}) == len(RECORDS)


def test_every_pattern_is_hit_by_a_message():
    idle = []
    for record in RECORDS:
        texts = (record.example, *KNOWN[record.name])
        said = [reading for text in texts for message in messages(text) for reading in message.readings]
        for pattern in record.patterns:
            if not any(re.search(pattern, reading, re.IGNORECASE) for reading in said):
                idle.append((record.name, pattern))
    assert idle == []


GROUPS = {name for record in RECORDS for pattern in record.patterns for name in re.compile(pattern).groupindex}


def assert_whole(explanation: Explanation) -> None:
    """Nothing is left to fill in, and every command is accepted by the parser."""
    told = [cause for cause, _ in explanation.causes]
    told += [part for advice in explanation.advice for part in (advice.text, advice.command, advice.code)]
    for place in re.findall(r"\{(\w+)\}", " ".join(told)):
        assert place not in {*GROUPS, "FILE", "MODEL", "path", "load"}
    assert explanation.advice
    assert explanation.source.startswith("https://")
    for advice in explanation.advice:
        if advice.command:
            parse(advice.command)
            assert not ("--dry-run" in advice.command and "run" in advice.text), "a dry run has no forward test"
            assert " FILE" not in advice.command


@pytest.mark.parametrize("command", ["ckptfix repair a.pth --nonsense", "ckptfix mend a.pth", "ckptfix check"])
def test_a_wrong_command_would_be_seen(command: str):
    with pytest.raises(Exception, match=r"No such option|mend|Missing"):
        parse(command)


@pytest.mark.parametrize("file", ["-x.pth", "a b.pth", "it's.pth", "$(rm).pth", "--model.pth"])
def test_any_file_name_stays_one_word(file: str):
    explanation = explain(RECORDS[0].example, MessageContext(file))
    assert explanation is not None
    assert_whole(explanation)
    (command,) = [advice.command for advice in explanation.advice if advice.command]
    assert shlex.split(command)[-1] in (file, f"./{file}")


def test_records_use_what_their_patterns_find():
    for record in RECORDS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", record.name)
        groups = {name for pattern in record.patterns for name in re.compile(pattern).groupindex}
        texts = [record.cause, *(text for advice in record.advice for text in (advice.text, advice.code))]
        used = set(re.findall(r"\{(\w+)\}", " ".join(texts))) - {"path", "load"}
        assert used <= groups, record.name
        always = set.intersection(*({*re.compile(pattern).groupindex} for pattern in record.patterns))
        assert used - always <= set(record.unknown) | always, record.name
        assert set(record.unknown) <= groups, record.name


def test_an_attribute_is_asked_of_a_module():
    """The same words about another object say nothing about a checkpoint."""
    text = (
        'Traceback (most recent call last):\n  File "/lib/torch/nn/modules/module.py", line 1965, in __getattr__\n'
        "    raise AttributeError(\nAttributeError: 'Net' object has no attribute 'attention'"
    )
    found = explain(text)
    assert found is not None
    assert found.name == "attribute-of-module"
    assert explain(text.splitlines()[-1]) is None


@pytest.mark.parametrize("key", ["model", "optimizer", "config"])  # of each record that knows both answers
@pytest.mark.parametrize("is_held", [False, True])
def test_an_entry_that_the_file_has(key: str, is_held: bool):
    found = explain(
        f"KeyError: '{key}'", MessageContext("a.pth", entries=frozenset({"net", key} if is_held else {"net"}))
    )
    assert found is not None
    ((said, _),) = found.causes
    assert (f"has an entry '{key}'" in said) is is_held


def test_a_known_folder_is_in_the_commands():
    text = (
        "Unable to find latest file at ./x/latest, if trying to load latest checkpoint please ensure this file exists"
    )
    for subject, name in ((None, "./x"), (MessageContext("my run", folder="my run"), "'my run'")):
        explanation = explain(text, subject)
        assert explanation is not None
        assert f"ckptfix repair {name} -o model.pth" in [advice.command for advice in explanation.advice]


def test_a_web_ui_that_goes_on_without_a_model():
    error = "TypeError: 'NoneType' object is not iterable"
    for text in (f"{error}\n*** Error completing request", f'  File "modules_forge/main_thread.py", line 30\n{error}'):
        explanation = explain(text)
        assert explanation is not None
        assert explanation.name == "model-did-not-load"
    assert explain(error) is None


def test_every_step_says_what_it_needs_of_the_checkpoint():
    """Code that opens the file or uses its weights needs them, and only a command with --salvage needs a part."""
    opens = re.compile(r"(?:load|load_file|open|load_from_checkpoint)\(\{path\}|pretrained=\{path\}")
    uses = re.compile(r"\{load\}|(?<![\w.])(?:state_dict|checkpoint)(?=[,).;\[]|$)")
    for record in RECORDS:
        for advice in record.advice:
            if opens.search(advice.code):
                assert advice.needed is Requirement.FILE, (record.name, advice.code)
            elif uses.search(advice.code) and not advice.code.startswith("torch.save("):
                assert advice.needed is Requirement.WHOLE, (record.name, advice.code)
            assert advice.salvages is ("--salvage" in advice.command)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_file_that_cannot_be_read_gets_only_what_works_without_it(record: KnownMessage):
    salvaging = "ckptfix repair a.pth --salvage --output salvaged.pth"
    for text in (record.example, *KNOWN[record.name]):
        for said in (salvaging, ""):
            explanation = explain(text, MessageContext("a.pth", code="", is_unreadable=True, salvaging=said))
            assert explanation is not None
            assert all(each.needed in (Requirement.NOTHING, Requirement.PART) for each in explanation.advice)
            commands = [each.command for each in explanation.advice if each.command]
            assert all("--salvage" in words for words in map(shlex.split, commands))
            assert bool(commands) is bool(said)
