"""The README and the pages of docs/ say what the program does: their links lead somewhere, their commands run."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfix.core.config import parse_toml
from ckptfix.rules import RULES
from tests.cli.programs import parse, run_here

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(ROOT.glob("docs/**/*.md"))
GENERATED = {"docs/cli.md", "docs/benchmarks.md", *(f"docs/rules/{rule.code}.md" for rule in RULES)}
"""Pages that ``docs/hooks.py`` makes when the site is built."""

LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)[^)]*\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """The code blocks in these languages, each with its page."""
    for page in PAGES:
        for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language in languages:
                yield page.relative_to(ROOT).as_posix(), text


def commands() -> Iterator[str]:
    """The commands of ckptfix in all shell blocks, without comments, prompts, pipes and redirections."""
    for _, text in blocks("sh", "console"):
        for line in text.replace("\\\n", " ").splitlines():
            line = re.split(r"\s+#\s|\s[<>]\s", line.removeprefix("$ "))[0].rpartition("| ")[2].strip()
            if line.startswith("ckptfix "):
                yield line


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_list_items_begin_their_line():
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES} | {rule.code: rule.manual for rule in RULES}
    assert [name for name, text in texts.items() if re.search(r"[.;:,] - [\w`]", text)] == []


def test_links_are_valid():
    for page in PAGES:
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            if not link.startswith(("http:", "https:")):
                target = (page.parent / link).resolve()
                assert target.exists() or target.relative_to(ROOT).as_posix() in GENERATED, (page.name, link)


def test_named_files_of_the_project_exist():
    """A file is named below the project or the package: `reading/sniffing.py`. `my_defect` is yet to be written."""
    rooms = "|".join(path.name for path in (ROOT / "ckptfix").iterdir() if path.is_dir())
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = re.findall(rf"`((?:(?:ckptfix|tests|benchmarks|{rooms})/)[\w/.-]+\.\w+)`", text)
        absent = [name for name in named if not any((root / name).exists() for root in (ROOT, ROOT / "ckptfix"))]
        assert [name for name in absent if "my_defect" not in name] == [], page.name


def test_commands_are_valid():
    for command in set(commands()):
        parse(command)


ON_SAMPLES = sorted({line for line in commands() if "sample_checkpoints/" in line and "old_zoo" not in line})


@pytest.mark.slow
@pytest.mark.parametrize("command", ON_SAMPLES)
def test_commands_on_samples_run(command: str, tmp_path: Path):
    shutil.copytree(ROOT / "sample_checkpoints", tmp_path / "sample_checkpoints")
    done = run_here(*shlex.split(command)[1:], cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr


@pytest.mark.parametrize(("page", "text"), list(blocks("python")), ids=lambda value: value[:40])
def test_python_compiles(page: str, text: str):
    compile(text, page, "exec")


@pytest.mark.parametrize(("page", "text"), list(blocks("toml")), ids=lambda value: value[:40])
def test_toml_parses(page: str, text: str, tmp_path: Path):
    (tmp_path / "a.toml").write_text(text, encoding="utf-8")
    assert parse_toml(tmp_path / "a.toml")


def test_every_family_of_rules_is_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {rule.code[:3] for rule in RULES} == set(re.findall(r"^\| `([A-Z]{3})` \|", readme, re.MULTILINE))
