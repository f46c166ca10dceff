"""The page in a real browser: it opens, filters, sorts, shows a file, and asks no network for anything."""

import re

import pytest

from tests.report.page.browser import look, requests
from tests.report.page.reading import page_text
from tests.report.page.samples import HOSTILE, NAN, PREFIX, record, repaired, undecided, unreadable, weights, zoo
from tests.report.page.test_rendering import hostile_zoo


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page made of records and weights; afterwards the browser has complained of nothing."""

    def show(records, lines=(), **rest):
        file = tmp_path / "report.html"
        file.write_text(page_text("old_zoo → new_zoo", records, lines, **rest), encoding="utf-8")
        browser.get("about:blank")
        browser.get_log("browser"), requests(browser)
        browser.get(file.as_uri())
        return file.as_uri()

    look(browser, 1280, 900)
    yield show
    assert browser.get_log("browser") == []
    assert [url for url in requests(browser) if not url.startswith(("file:", "data:", "about:"))] == []


def texts(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].filter(e => e.offsetParent).map(e => e.innerText.trim())",
        selector,
    )


def names(browser):
    return texts(browser, "#files .tabulator-row a")


def press(browser, selector):
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def wait(browser, condition):
    """Wait until a JavaScript expression holds."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 10, 0.02).until(lambda driver: driver.execute_script(f"return {condition}"))


def go(browser, address):
    browser.execute_script("location.hash = arguments[0]", address)
    wait(browser, f"location.hash === {address!r}")
    wait(browser, "document.querySelector('#file').hidden === (location.hash === '#/')")


def test_a_page_of_nothing(browser, show):
    show([])
    assert texts(browser, "#lead") == ["0 files"]
    assert names(browser) == []


def test_outcomes_are_counted(browser, show):
    show(*zoo())
    assert texts(browser, "#outcome-chips button") == [
        "1 failed 9 %",
        "1 unreadable 9 %",
        "1 needs a decision 9 %",
        "4 repaired 36 %",
        "3 already fine 27 %",
        "1 other 9 %",
    ]
    assert texts(browser, "#codes button")[0].split("\n") == ["KEY102", "wrapper-prefix", "5 files"]


def test_what_needs_someone_comes_first(browser, show):
    show(*zoo())
    assert names(browser)[:4] == [
        "2017/net/big.pth",
        "2017/net/torn.pth",
        "2017/net/nan.pth",
        "2019/resnet/resnet101.pth",
    ]
    assert len(names(browser)) == 11


def test_search(browser, show):
    show(*zoo())
    box = browser.find_element("id", "search")
    box.send_keys("resnet1 2019")
    wait(browser, "document.querySelectorAll('#files .tabulator-row').length === 2")
    assert names(browser) == ["2019/resnet/resnet101.pth", "2019/resnet/resnet18.pth"]
    assert texts(browser, "#count") == ["2 of 11 files"]
    press(browser, "#clear")
    assert len(names(browser)) == 11
    box.send_keys("VAL101")
    wait(browser, "document.querySelectorAll('#files .tabulator-row').length === 1")
    assert names(browser) == ["2017/net/nan.pth"]


def test_filters_by_outcome_and_rule(browser, show):
    show(*zoo())
    press(browser, "[data-outcome='already fine']")
    assert names(browser) == [f"2021/vit/vit{size}.pth" for size in "bls"]
    assert browser.find_element("id", "by-outcome").get_property("value") == "already fine"
    press(browser, "[data-code=KEY102]")
    assert names(browser) == []
    assert texts(browser, "#files .tabulator-placeholder") == ["No files match these filters."]
    press(browser, "[data-outcome='already fine']")
    assert len(names(browser)) == 5
    press(browser, "#clear")
    assert len(names(browser)) == 11


def test_sorting_from_the_keyboard(browser, show):
    records = [record(f"{size}.pth", size=size, numel=1000 - size) for size in (20, 3, 100)]
    show(records)
    header = browser.find_element("css selector", "#files .tabulator-col[tabulator-field=size]")
    for expected in (["3.pth", "20.pth", "100.pth"], ["100.pth", "20.pth", "3.pth"]):
        header.send_keys("\ue007")
        assert names(browser) == expected


def test_a_file_by_its_link(browser, show):
    show(*zoo())
    browser.find_element("link text", "2019/resnet/resnet18.pth").click()
    wait(browser, "!document.querySelector('#file').hidden")
    assert browser.execute_script("return location.hash") == "#/2019%2Fresnet%2Fresnet18.pth"
    assert browser.title == "2019/resnet/resnet18.pth | old_zoo → new_zoo"
    assert texts(browser, "#file h3") == [
        *("Findings", "Edits", "Coverage", "Forward test passed", "Weights", "The file"),
    ]
    assert texts(browser, "#file .edits li") == ["rename 4 keys: module.{…} → {…}"]
    assert texts(browser, "#file .card h4") == ["error KEY102 wrapper-prefix fixed"]
    assert len(texts(browser, "#file .tabulator-row")) == 4
    assert browser.execute_script("return document.querySelectorAll('#file canvas').length") == 1
    press(browser, "#file nav a")
    wait(browser, "!document.querySelector('#overview').hidden")
    wait(browser, "document.querySelectorAll('#files .tabulator-row a').length === 11")


def test_an_address_opens_its_file(browser, show):
    address = show(*zoo())
    browser.get("about:blank")
    browser.get(f"{address}#/2017%2Fnet%2Fnan.pth")
    assert texts(browser, "#file .command code") == [
        "ckptfix repair 2017/net/nan.pth --replace VAL101 --fill twin",
    ]
    assert texts(browser, "#file .card h4")[0] == "error VAL101 non-finite"
    assert texts(browser, "#file .tabulator-row.flagged .name") == ["layers.2.weight"]
    press(browser, "#file .check input")
    assert len(texts(browser, "#file .tabulator-row")) == 1
    # From one file to the next, in the order of the table.
    press(browser, "#file [rel=next]")
    wait(browser, "location.hash !== '#/2017%2Fnet%2Fnan.pth'")
    assert texts(browser, "#file h2 .name")


def test_an_error_is_reported(browser, show):
    show([unreadable("a.pth"), record("b.pth")])
    assert "the file ends after 1.2 MB" in texts(browser, "#files .tabulator-row")[0]
    go(browser, "#/a.pth")
    assert texts(browser, "#file .notice") == ["a.pth: the file ends after 1.2 MB of 97.8 MB"]


def test_one_file_is_the_page(browser, show):
    show([undecided("nan.pth")], [weights("nan.pth", flagged={2: ["VAL101"]})])
    assert texts(browser, "#file h2 .name") == ["nan.pth"]
    assert texts(browser, "#overview") == []


def test_the_chart_marks_what_is_flagged(browser, show):
    """The colour of flagged layers is on the canvas where one is flagged, and only there."""
    counting = """
        const canvas = document.querySelector("#file canvas");
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let red = 0, blue = 0;
        for (let at = 0; at < data.length; at += 4) {
          if (data[at] > 150 && data[at + 1] < 60 && data[at + 2] < 60 && data[at + 3] > 200) red += 1;
          if (data[at] < 90 && data[at + 2] > 180 && data[at + 3] > 200) blue += 1;
        }
        return [red, blue];
    """
    show([record("a.pth"), record("b.pth")], [weights("a.pth"), weights("b.pth", flagged={2: ["VAL101"]})])
    seen = {}
    for name in "ab":
        go(browser, f"#/{name}.pth")
        wait(browser, "document.querySelector('#file canvas')")
        seen[name] = browser.execute_script(counting)
    assert (seen["a"][0], seen["a"][1] > 20) == (0, True)
    assert min(seen["b"]) > 20
    assert "1 flagged" in browser.find_element("css selector", "#file .chart").get_attribute("aria-label")


@pytest.mark.parametrize("figures", [{"rms": 0.0, "minimum": 0.0, "maximum": 0.0}, {"rms": 5e-324, "maximum": 1.7e308}])
def test_odd_figures_are_drawn_or_said(browser, show, figures):
    line = weights("a.pth")
    for layer in line["layers"]:
        layer.update(figures)
    show([record("a.pth")], [line])
    assert len(texts(browser, "#file .tabulator-row")) == 4
    assert texts(browser, "#file .chart") or "Nothing to draw" in texts(browser, "#file")[0]


def test_counters_are_in_the_table_alone(browser, show):
    line = weights("a.pth")
    line["layers"][0]["dtype"] = "int64"
    show([record("a.pth")], [line])
    assert "Weights by layer: 3 layers" in browser.find_element("css selector", ".chart").get_attribute("aria-label")
    assert "1 integer tensor" in texts(browser, "#file")[0]
    assert len(texts(browser, "#file .tabulator-row")) == 4


def test_each_layer_has_its_histogram_also_on_paper(browser, show):
    show([record("a.pth")], [weights("a.pth", 6)])
    said = [each.get_attribute("aria-label") for each in browser.find_elements("css selector", "#file svg.histogram")]
    assert len(said) == 3
    assert re.fullmatch("from -.+ to .+, most from .+ to .+", said[0])
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    bars = "return [...document.querySelectorAll('.on-paper path')].map((path) => path.getAttribute('d'))"
    assert [path.count("M") for path in browser.execute_script(bars)] == [14, 14, 14]


def test_a_note_does_not_mark_a_layer(browser, show):
    note = {**NAN, "code": "VAL206", "name": "subnormal", "level": "note"}
    show([record("a.pth", findings=[note])], [weights("a.pth", flagged={2: ["VAL206"]}, nonfinite=0)])
    assert "none flagged" in browser.find_element("css selector", "#file .chart").get_attribute("aria-label")
    assert texts(browser, "#file .tabulator-row.flagged") == []
    assert "VAL206" in texts(browser, "#file .tabulator-row")[2]


def test_hostile_names_are_text(browser, show):
    records, lines = hostile_zoo()
    show(records, lines, facts={HOSTILE[0]: HOSTILE[1]}, renames={HOSTILE[0]: HOSTILE[2]})
    assert len(names(browser)) == len(HOSTILE)
    assert {"<img src=x onerror='window.hacked = 2'>.pth", "turned\\u202egnp.exe"} < set(names(browser))
    for number, name in enumerate(HOSTILE):
        address = browser.execute_script("return addressOf(rows[arguments[0]])", number)
        go(browser, address)
        told = texts(browser, "#file h2 .name")
        assert told == [browser.execute_script("return shown(rows[arguments[0]].name)", number)], name
        for details in browser.find_elements("css selector", "#file details"):
            browser.execute_script("arguments[0].open = true", details)
    assert browser.execute_script("return window.hacked") is None
    assert browser.execute_script("return document.querySelectorAll('#page img, #page svg[onload]').length") == 0


def test_the_policy_stops_scripts_and_requests(browser, show):
    show([record("a.pth"), record("b.pth")])
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s);"
        "fetch('https://example.org/').catch(() => { window.refused = true })"
    )
    wait(browser, "window.refused")
    assert browser.execute_script("return window.hacked") is None
    complaints = [entry["message"] for entry in browser.get_log("browser")]
    assert len(complaints) >= 2
    assert all("Content Security Policy" in message for message in complaints)


def test_a_phone_shows_no_more_than_its_width(browser, show):
    look(browser, 390, 800, "dark")
    show(*zoo(), facts={"Command": "ckptfix migrate " + "long/" * 40})
    width = "document.documentElement.scrollWidth"
    assert browser.execute_script(f"return {width}") == 390
    go(browser, "#/2017%2Fnet%2Fnan.pth")
    assert browser.execute_script(f"return {width}") == 390


def test_paper_has_all_files(browser, show):
    show([repaired(f"{number:03}.pth") for number in range(120)])
    assert len(names(browser)) == 50
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script("return document.querySelectorAll('.on-paper tbody tr').length") == 120
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script("return document.querySelectorAll('.on-paper').length") == 0


def test_paper_has_whole_texts(browser, show):
    """Nothing has to be scrolled to or is hidden by an ellipsis."""
    lost = record("lost.pth", "unreadable", error="the file is cut short in the middle of it; " * 20)
    show([lost, *(undecided(f"{number:03}.pth") | {"command": f"ckptfix migrate {number}"} for number in range(60))])
    wait(browser, "document.querySelector('#files .tabulator-row')")
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")  # before the layout changes, as in a browser
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    texts_of = "[...document.querySelectorAll('#decisions pre, .on-paper *')]"
    text = "document.querySelector('.on-paper .clamped')"
    cut = f"{texts_of}.filter((each) => each.scrollHeight > each.clientHeight + 2)"
    try:
        assert browser.execute_script("return document.querySelector('#decisions pre').innerText").count("\n") == 59
        assert browser.execute_script(f"return {cut}.map((each) => each.className)") == []
        assert browser.execute_script(f"return {text}.clientWidth > 200")  # not one word per line
        assert browser.execute_script("return document.querySelector('#decisions pre').clientHeight") > 600
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.slow
def test_ten_thousand_files_open_at_once(browser, show):
    show(repaired(f"family{number % 40}/{number:05}.pth") for number in range(10_000))
    timing = "performance.getEntriesByType('navigation')[0]"
    wait(browser, f"{timing}.loadEventEnd > 0")
    seconds = browser.execute_script(f"return {timing}.loadEventEnd / 1000")
    assert seconds < 8  # it takes less than one; machines of tests are busy
    browser.find_element("id", "search").send_keys("07777")
    wait(browser, "document.querySelectorAll('#files .tabulator-row').length === 1")
    assert names(browser) == ["family17/07777.pth"]


def test_a_dry_run_says_that_nothing_was_written(browser, show):
    records, lines = zoo()
    undone = [record | {"findings": [each | {"fixed": False} for each in record["findings"]]} for record in records]
    show(undone, lines, dry_run=True)
    assert "dry run, nothing was written" in texts(browser, "#lead")[0]
    assert "repaired" not in {
        name.partition(" ")[2].partition(" <")[0] for name in texts(browser, "#outcome-chips button")
    }
    go(browser, "#/2019%2Fresnet%2Fresnet18.pth")
    assert texts(browser, "#file .notice")[0].startswith("This was a dry run: nothing was written.")
    assert texts(browser, "#file .card h4") == ["error KEY102 wrapper-prefix would be fixed"]
    assert "Edits that would be made" in texts(browser, "#file h3")
    assert "would come from the file" in " ".join(texts(browser, "#file p"))


def test_what_was_refused_is_not_called_done_and_what_it_is_like_is_reported(browser, show):
    command = "ckptfix check a.pth --like known:timm/resnet18"
    like = {"text": "timm resnet18, under `module.`", "commands": [command]}
    findings = [{**PREFIX, "fixed": False}]
    facts = {"outcome": "needs a decision", "output": None, "findings": findings, "refused": True, "looks_like": like}
    show([{**repaired("a.pth"), **facts}])
    assert "Edits that would be made" in texts(browser, "#file h3")
    assert texts(browser, "#file .card h4") == ["error KEY102 wrapper-prefix would be fixed"]
    shown = " ".join(texts(browser, "#file p"))
    assert "would come from the file" in shown
    assert "Looks like: timm resnet18, under `module.`" in shown
    assert command in texts(browser, "#file .command pre")


def test_findings_are_in_order_of_their_level_and_lead_to_the_manual(browser, show):
    note = {**PREFIX, "code": "VAL206", "name": "subnormal", "level": "note", "fixed": False}
    show([*(record(f"{number}.pth", findings=[note]) for number in range(5)), undecided("nan.pth")])
    assert [text.split()[0] for text in texts(browser, "#codes button")] == ["KEY102", "VAL101", "VAL206"]
    go(browser, "#/nan.pth")
    press(browser, "#file .card details:last-of-type summary")
    assert "NaN" in texts(browser, "#file .manual")[0]


def test_only_all_files_are_100_per_cent(browser, show):
    show([undecided("a.pth"), *(record(f"{number}.pth") for number in range(299))])
    assert [text.partition("< 1 %")[1] or text[-6:] for text in texts(browser, "#outcome-chips button")] == [
        "< 1 %",
        "> 99 %",
    ]


def test_the_commands_of_all_decisions_are_copied_together(browser, show):
    show([*(undecided(f"{one}.pth") | {"command": f"ckptfix migrate {one}"} for one in "ab"), record("c")])
    assert texts(browser, "#decisions pre") == ["ckptfix migrate a\nckptfix migrate b"]
    ways = [
        {"options": {"fill": "twin"}, "text": "takes them from the twin", "command": "ckptfix migrate a --fill twin"},
        {"options": {"accept": ["VAL101"]}, "text": "keeps it", "command": "ckptfix migrate a --accept VAL101"},
    ]
    ways[0]["price"] = "`fc` becomes untrained: 2.5 % of the model"
    show([undecided("a.pth") | {"command": ways[0]["command"], "decisions": ways}, record("c")])
    assert texts(browser, "#decisions pre") == []
    go(browser, "#/a.pth")
    assert texts(browser, "#file .command pre") == [way["command"] for way in ways]
    assert texts(browser, "#file .price") == ["`fc` becomes untrained: 2.5 % of the model"]


def test_old_and_new_names_show_what_differs(browser, show):
    show([repaired("a.pth")])
    press(browser, "#file details summary")
    browser.execute_script("for (const each of document.querySelectorAll('#file details')) each.open = true")
    assert set(texts(browser, "#file td del")) == {"module"}
    assert texts(browser, "#file td ins") == []


def test_the_labels_of_a_wide_range_are_whole(browser, show):
    plain = {"dtype": "float32", "shape": [4], "numel": 4, "zeros": 0, "nonfinite": 0, "flagged": []}
    figures = [(number, 10.0**number) for number in range(-10, 2)]
    layers = [{**plain, "key": f"l{n}", "rms": size, "minimum": -size, "maximum": size} for n, size in figures]
    show([record("a.pth")], [{"source": "a.pth", "version": 1, "layers": layers}])
    said = browser.execute_script(
        "const said = []; const real = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (...all) { said.push(all[0]); real.apply(this, all); };"
        "dispatchEvent(new Event('ckptfix-colours')); return new Promise((done) => setTimeout(() => done(said), 200));"
    )
    labels = [text for text in said if text.startswith("10") or text in ("1", "0.1", "0.01", "100")]
    assert "10⁻¹⁰" in labels
    assert len(labels) >= 5
    assert all(label not in ("10⁻", "10undefined") and "undefined" not in label for label in said)
