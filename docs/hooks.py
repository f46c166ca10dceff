"""Pages of the site that are made from the program: the rules' manuals and the help of each command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from ckptfix.rules import RULES

ROOT = Path(__file__).parents[1]
COMMANDS = "check repair migrate inspect diff map rule explain".split()
FAMILIES = {
    "FIL": "The file and its container",
    "KEY": "Names",
    "BUF": "Buffers",
    "FIT": "Fit to the model",
    "VAL": "Values",
    "OPT": "The optimizer's state",
    "RUN": "The forward test",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, text in (
        *_rule_pages(),
        ("cli.md", _command_line()),
        ("benchmarks.md", _benchmarks()),
        ("notebook.md", _notebook()),
    ):
        files.append(File.generated(config, path, content=text))
    return files


def _rule_pages() -> Iterator[tuple[str, str]]:
    listing = ["# Rules", "", "The page of each rule is what `ckptfix rule CODE` prints.", ""]
    for family, title in FAMILIES.items():
        rules = [rule for rule in RULES if rule.code.startswith(family)]
        if rules:
            listing += [f"## {title}", "", "| code | name | what it finds |", "|---|---|---|"]
        for rule in sorted(rules, key=lambda rule: rule.code):
            headline, _, manual = rule.manual.partition("\n")
            summary = headline.partition(": ")[2]
            listing.append(f"| [{rule.code}]({rule.code}.md) | {rule.name} | {summary} |")
            yield f"rules/{rule.code}.md", f"# {rule.code} {rule.name}\n\n{summary}\n{manual}\n"
        listing.append("")
    yield "rules/index.md", "\n".join(listing)


def _command_line() -> str:
    parts = ["# Command line", ""]
    for command in ("", *COMMANDS):
        words = ["ckptfix", command, "--help"] if command else ["ckptfix", "--help"]
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
        parts += [f"## ckptfix {command}".rstrip(), "", "```text", done.stdout.strip("\n"), "```", ""]
    return "\n".join(parts)


def _benchmarks() -> str:
    """The page of ``benchmarks/``, whose links lead out of the site."""
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


def _notebook() -> str:
    """The page of the notebook, with the outputs that it was saved with."""
    parts = []
    for cell in json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("data", {"text/plain": output.get("text", "")})
            html, plain = ("".join(shown.get(kind, "")) for kind in ("text/html", "text/plain"))
            parts.append(re.sub(r"\n\s*\n", "\n", html) if html else f"```text\n{plain.rstrip()}\n```")
    return "\n\n".join([*parts, "[The notebook itself](notebook.ipynb)"]) + "\n"
