"""The libraries in the page are those that SHA256SUMS and the Makefile name."""

import hashlib
import re
from pathlib import Path

import pytest

from ckptfix.report import page

FOLDER = Path(page.__file__).parent / "assets" / "vendor"
ROOT = Path(__file__).parents[3]
SUMS = {name: digest for digest, name in map(str.split, (FOLDER / "SHA256SUMS").read_text().splitlines())}
LIBRARIES = sorted(name for name in SUMS if not name.endswith(".LICENSE"))


def test_every_file_is_known():
    assert {path.name for path in FOLDER.iterdir()} == {*SUMS, "SHA256SUMS", "README.md"}


@pytest.mark.parametrize("name", sorted(SUMS))
def test_it_is_as_it_came(name):
    assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == SUMS[name]


@pytest.mark.parametrize("name", LIBRARIES)
def test_it_can_stand_within_a_page(name):
    """Nothing ends its element; line ends are those that the policy's hash is of."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert not re.search(r"</(script|style)|<!--|\r", text, re.IGNORECASE)


@pytest.mark.parametrize("name", LIBRARIES)
def test_it_has_a_licence_next_to_it(name):
    assert "Permission is hereby granted, free of charge" in (FOLDER / f"{name.split('.')[0]}.LICENSE").read_text()


@pytest.mark.parametrize("library", ["uplot", "tabulator"])
def test_the_makefile_and_the_page_of_the_folder_name_the_same_version(library):
    version = re.search(rf"^{library.upper()} := [a-z-]+@([0-9.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert version
    assert f"v{version[1]}" in (FOLDER / f"{library}.min.js").read_text(encoding="utf-8")[:200]
    assert f") {version[1]} |" in (FOLDER / "README.md").read_text()
