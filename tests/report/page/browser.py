"""Headless Chromium for the tests of the page: Debian's packages chromium and chromium-driver, driven by selenium."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --hide-scrollbars"
)
HOW_TO_GET = "on Debian and Ubuntu: apt-get install chromium chromium-driver"


def missing() -> str:
    """Return what is missing and how to get it; empty if nothing is."""
    if not (_chromium() and shutil.which("chromedriver")):
        return f"the page is not tested: chromium or chromedriver is missing; {HOW_TO_GET}"
    try:
        import selenium  # noqa: F401 - only to see whether it is installed
    except ImportError:
        return "the page is not tested: selenium is not installed; pip install -e '.[test-page]'"
    return ""


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def chromium(profile: Path) -> Iterator[Chrome]:
    """Start a browser with an empty profile."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = str(_chromium())
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def look(driver: Chrome, width: int, height: int, scheme: str = "light") -> None:
    """Show pages in this size and colour scheme."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def requests(driver: Chrome) -> list[str]:
    """Return the URLs requested since the last call."""
    messages: list[Any] = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    return [str(each["request"]["url"]) for each in sent]
