"""Takes screenshots of the report of a real migration for the documentation: `make screenshot`.

The zoo consists of the project's sample checkpoints: some unchanged, some trained a little longer, some broken.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from sample_checkpoints import models
from sample_checkpoints.build import momentum_sgd, train
from tests.report.page.browser import chromium, look, missing

ROOT = Path(__file__).parents[3]
TABLE = """\
[[files]]
match = ["2018_classifiers/", "2020_sweep/", "hub/"]
model = "sample_checkpoints.models:resnet_tiny"

[[files]]
match = "2021_vit/*"
model = "sample_checkpoints.models:vit_tiny"
format = "safetensors"
output = "{stem}.safetensors"

[[files]]
match = "2019_detection/nan_*"
model = "sample_checkpoints.models:resnet_bottleneck"
"""


def main(picture: Path) -> None:
    """Create the zoo, migrate it, and take screenshots of the overview and of the page of one file."""
    if reason := missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_zoo(folder / "old_zoo")
        (folder / "zoo.toml").write_text(TABLE)
        words = [sys.executable, "-m", "ckptfix", "migrate", "old_zoo", "new_zoo", "--report", "report.html"]
        environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        subprocess.run(words, cwd=folder, env=environment, check=False, stdout=subprocess.DEVNULL)
        with chromium(folder / "profile") as browser:
            look(browser, 1280, 1030)
            browser.get((folder / "report.html").as_uri())
            browser.save_screenshot(str(picture))
            look(browser, 1280, 1200)
            browser.execute_script("location.hash = '#/' + encodeURIComponent('2019_detection/decayed_aux_head.pth')")
            browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
            browser.save_screenshot(str(picture.with_stem(picture.stem + "-file")))


def make_zoo(zoo: Path) -> None:
    """Write a zoo like that of a lab after a few years."""
    samples = ROOT / "sample_checkpoints"
    for place in (
        "2018_classifiers/before_num_batches_tracked.pth",
        "2018_classifiers/imagenet_dataparallel_cuda3.pth",
        "2018_classifiers/num_batches_tracked_removed.pth",
        "2018_classifiers/head_missing.pth",
        "2019_detection/decayed_aux_head.pth",
        "2019_detection/nan_running_var.pth",
        "2019_detection/whole_model_class_gone.pth",
        "2021_vit/ddp_compiled.pth",
        "2021_vit/namespace_args.pth",
        "2022_text/tied_language_model.safetensors",
    ):
        write(zoo / place, (samples / Path(place).name).read_bytes())
    for seed in range(8):
        torch.manual_seed(seed)
        model = models.resnet_tiny()
        train(model, momentum_sgd(model), steps=1 + seed % 3)
        prefix = "module." if seed % 2 else ""
        file = zoo / "2020_sweep" / f"seed{seed}.pth"
        file.parent.mkdir(exist_ok=True)
        torch.save({prefix + key: value for key, value in model.state_dict().items()}, file)
    whole = (zoo / "2020_sweep" / "seed1.pth").read_bytes()
    write(zoo / "hub" / f"resnet_tiny-{hashlib.sha256(whole).hexdigest()[:8]}.pth", whole)
    write(zoo / "2020_sweep" / "seed8.pth", whole[: len(whole) // 2])
    write(zoo / "2021_vit" / "large.pth", b"<!DOCTYPE html><html><title>404 Not Found</title></html>\n")
    write(zoo / "2021_vit" / "train.log", b"epoch 90: 76.1\n")


def write(file: Path, content: bytes) -> None:
    """Write a file, creating its folders."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
