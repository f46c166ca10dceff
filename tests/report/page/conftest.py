"""The browser for the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.report.page import browser as browsers

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Start Chromium. Skips tests if it is missing, or fails them if $CKPTFIX_BROWSER is `required`."""
    if reason := browsers.missing():
        if os.environ.get("CKPTFIX_BROWSER") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    with browsers.chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver
