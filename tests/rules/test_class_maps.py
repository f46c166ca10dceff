"""Heads for other classes: by a map or two lists of names, on single heads and those of detectors."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.errors import UsageError
from ckptfix.rules.fit103_shape_mismatch import shape_mismatch
from tests.rules.proposals import propose


def head(classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, classes))


CLASSES = ("cat", "dog", "cow", "emu", "fox")


@pytest.mark.parametrize(
    ("old", "new", "rows"),
    [
        pytest.param(None, "4\n0\n2", [4, 0, 2], id="rows of the file"),
        pytest.param(None, "1\nmean\n", [1, None], id="a class that the file does not have"),
        pytest.param(CLASSES, "fox\ncat", [4, 0], id="names"),
        pytest.param(CLASSES, "\ufefffox\r\ncat\r\n", [4, 0], id="names as Windows saves them"),
        pytest.param(CLASSES, "dog\nmean\nemu\ncow", [1, None, 3, 2], id="names and a new class"),
        pytest.param(
            ("background", *CLASSES), "\n".join((*CLASSES, "background")), [1, 2, 3, 4, 5, 0], id="background last"
        ),
        pytest.param(("N/A", *CLASSES, "N/A"), "fox\nmean\nmean", [5, None, None], id="places of no class"),
    ],
)
def test_classes_by_a_map(old, new, rows, tmp_path):
    (tmp_path / "old.txt").write_text("\n".join(old or ()))
    (tmp_path / "new.txt").write_text(new, encoding="utf-8")
    file, model = head(len(old or CLASSES)), head(len(rows))
    lists = f"{tmp_path}/old.txt,{tmp_path}/new.txt" if old else f"{tmp_path}/new.txt"
    keys = "@2.*" if len(rows) == len(old or CLASSES) else ""
    before = file.state_dict()
    repaired_state, report = ckptfix.repair_state_dict(before, model, adapt=f"head{keys}={lists}")
    assert report.exit_code == 0
    for key in ("2.weight", "2.bias"):
        expected = [before[key].double().mean(0) if row is None else before[key][row] for row in rows]
        assert torch.equal(repaired_state[key], torch.stack([row.to(before[key].dtype) for row in expected]))


def test_classes_of_detectors(tmp_path):
    """Each class has a box in Faster R-CNN, each anchor all classes in RetinaNet, and its box, too, in YOLOv5."""
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
    from torchvision.models.detection.retinanet import RetinaNetClassificationHead

    (tmp_path / "old.txt").write_text("\n".join(("background", *CLASSES)))
    (tmp_path / "new.txt").write_text("background\nfox\ncat")
    (tmp_path / "map.txt").write_text("0\n5\n1")
    lists, rows = f"{tmp_path}/old.txt,{tmp_path}/new.txt", [0, 5, 1]

    def both(make: Callable[[int], nn.Module], lists: str) -> tuple[nn.Module, nn.Module]:
        old, new = nn.ModuleDict({"head": make(6)}), nn.ModuleDict({"head": make(3)})
        state, report = ckptfix.repair_state_dict(old.state_dict(), new, adapt=f"head={lists}")
        assert report.exit_code == 0
        new.load_state_dict(state)
        return old["head"], new["head"]

    old, new = both(lambda classes: FastRCNNPredictor(8, classes), lists)
    (scores, boxes), (new_scores, new_boxes) = (head(torch.arange(8.0)[None]) for head in (old, new))
    torch.testing.assert_close(new_scores, scores[:, rows])
    torch.testing.assert_close(new_boxes.view(1, 3, 4), boxes.view(1, 6, 4)[:, rows])
    old, new = both(lambda classes: RetinaNetClassificationHead(4, 9, classes), lists)
    image = torch.randn(1, 4, 5, 5)
    torch.testing.assert_close(new([image]), old([image])[..., rows])

    def yolo(classes: int) -> nn.Module:
        return nn.ModuleDict({"m": nn.ModuleList([nn.Conv2d(4, 3 * (5 + classes), 1)])})

    old, new = both(yolo, lists)
    outputs = [detect["m"][0](image) for detect in (old, new)]  # type: ignore[index]  # of a ModuleDict
    wanted, found = (output.view(1, 3, -1, 5, 5) for output in outputs)
    torch.testing.assert_close(found, wanted[:, :, [0, 1, 2, 3, 4, *(5 + row for row in rows)]])
    with pytest.raises(UsageError, match="seems to have 9 rows per class; give the class names"):
        both(lambda classes: RetinaNetClassificationHead(4, 9, classes), f"{tmp_path}/map.txt")
    (tmp_path / "new.txt").write_text("background\nmean\ncat")
    with pytest.raises(UsageError, match="4 rows per class, so mean is not defined"):
        both(lambda classes: FastRCNNPredictor(8, classes), lists)
    (tmp_path / "old.txt").write_text("\n".join(CLASSES))
    with pytest.raises(UsageError, match=r"5 lines, and .* 6 classes in the file, one more: the backgr"):
        both(lambda classes: nn.Linear(8, classes), lists)


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        (("0\n1",), "new.txt has 2 lines, and 2.weight 3 classes in the model"),
        (("0\n1\n5",), "line 3 of .*new.txt, '5', is not a row of the file, 0 to 4"),
        (("a\nb", "a\nb\nb"), "old.txt has 2 lines, and 2.weight 5 classes in the file"),
        (("cat\ndog\ndog\nemu\nfox", "cat\ndog\nemu"), "old.txt has 'dog' 2 times; give each class its own name"),
        (("cat\ndog\ncow\nemu\nfox", "cat\ncat\nmean"), "new.txt has 'cat' 2 times; give each class its own name"),
        (("\n",), "the list of classes is empty"),
        (("0\n1\n\xff",), "new.txt: cannot read the list of classes: 'utf-8' codec"),
        (("0", "1", "2"), "give one map, or the class names of the file and of the model"),
        (("", "cat\ndog\nemu"), "the list of classes is empty"),
        (("cat\ndog\ncow\nemu\nfox", "cat\ndog\nfax"), "'fax', is not a class of the file; did you mean 'fox'"),
    ],
)
def test_a_map_that_does_not_fit(lists, said, tmp_path):
    names = ("more.txt", "old.txt", "new.txt")[-len(lists) :]
    for name, text in zip(names, lists, strict=True):
        (tmp_path / name).write_text(text, encoding="latin-1")
    given = ",".join(f"{tmp_path}/{name}" for name in names)
    with pytest.raises(UsageError, match=said):
        propose(shape_mismatch, head(5).state_dict(), head(3), adapt=(f"head={given}",))


def test_a_map_that_is_not_there():
    with pytest.raises(UsageError, match=r"there is no file classes\.txt; check the path"):
        ckptfix.check(head(5).state_dict(), head(3), adapt={"head": "classes.txt"})
