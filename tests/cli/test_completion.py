import shlex
import shutil
import subprocess
import sys

import pytest

from tests.cli.programs import ROOT


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        ("--like known : timm/resnet5", "timm/resnet50"),
        ("--like known :", "timm/resnet50"),
        ("--like = known : timm/resnet5", "timm/resnet50"),
        ("--like known:timm/resnet5", "known:timm/resnet50"),  # without `:` among COMP_WORDBREAKS
        ("--adapt pos_embed = t", "timm"),
        ("--adapt vocab = pad : m", "mean"),
        ("--fill = t", "target"),
        ("--drop", "--drop-mismatched"),
        ("--fill", "--fill"),
    ],
)
def test_bash_gets_what_belongs_after_the_last_colon(words, suggested, tmp_path):
    line = ["ckptfix", "repair", *words.split(" ")]
    (tmp_path / "ckptfix").write_text(f'#!/bin/sh\nexec {sys.executable} -m ckptfix "$@"\n')
    (tmp_path / "ckptfix").chmod(0o755)
    script = (
        f'PATH="{tmp_path}:$PATH"; complete() {{ :; }}; eval "$(_CKPTFIX_COMPLETE=bash_source ckptfix)"\n'
        f"COMP_WORDS=({shlex.join(line)}); COMP_CWORD={len(line) - 1}\n"
        '_ckptfix_completion ckptfix; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert suggested in done.stdout.splitlines()
