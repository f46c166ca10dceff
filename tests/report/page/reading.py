"""Parses a page as a browser would: its elements, and the data in them."""

import json
from html.parser import HTMLParser
from typing import Any

from ckptfix.report.page import page_pieces


def page_text(*given: Any, **more: Any) -> str:
    """Return the whole page."""
    return "".join(page_pieces(*given, **more))


class Page(HTMLParser):
    """The elements of a page: ``tags`` with their attributes, ``data`` by id, and all texts outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, Any] = {}
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self._open: tuple[str, dict[str, str | None]] | None = None
        self._content: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._open, self._content = (tag, dict(attrs)), []

    def handle_endtag(self, tag: str) -> None:
        if self._open is None or tag != self._open[0]:
            return
        attributes, content = self._open[1], "".join(self._content)
        self._open = None
        if tag == "script" and attributes.get("type") == "application/json":
            self.data[str(attributes["id"])] = json.loads(content)
        elif tag == "script":
            self.scripts.append(content)

    def handle_data(self, data: str) -> None:
        (self.texts if self._open is None else self._content).append(data)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the table, by the names of the columns."""
        chunks = [self.data[f"rows-{number}"] for number in range(sum(name.startswith("rows-") for name in self.data))]
        return [dict(zip(self.data["run"]["columns"], row, strict=True)) for chunk in chunks for row in chunk]

    def details(self, number: int) -> dict[str, Any]:
        """Return the details of a row, with the fields taken from earlier files."""
        details = dict(self.data[f"file-{number}"])
        for part, earlier in details.pop("same", {}).items():
            details[part] = self.data[f"file-{earlier}"][part]
        return details

    def visible_tags(self) -> list[str]:
        """Return all elements except those of the data, in order."""
        return [tag for tag, attributes in self.tags if attributes.get("type") != "application/json"]

    def contents(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements with this tag."""
        return [attributes for name, attributes in self.tags if name == tag]
