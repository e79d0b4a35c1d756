"""The report in a real browser, headless and without a network: how fast it opens, and what can be clicked.

With PICTURES=FOLDER pictures of its sections are kept. `bash tests/run.sh pictures` makes docs/report.png.
"""

import base64
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.reported_runs import HOSTILE, ILLNESSES, healthy_rows, plant_stall, write_run
from verl_megatron.observe.report.page import write_report
from verl_megatron.observe.report.record import read_run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1440,1100"
)
TEN = (
    "stalled",
    "zero-variance groups",
    "cut responses",
    "KL off its history",
    "gap off its history",
    "gradient norm off its history",
    "rewards failing",
    "NaN",
    "entropy collapse",
    "reward falling",
)
PICTURES = os.environ.get("PICTURES")
# What takes time when a page of 500 iterations opens, 1.5 to 2 s on two cores, most of it to read plotly.js.
MOST_BYTES = 400_000  # without plotly.js
MOST_ELEMENTS = 2_500
MOST_PLOTS = 12  # drawn for one screen

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="needs chromium and chromedriver (apt-get install chromium chromium-driver)",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (pip install selenium)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def sick_run(tmp_path_factory) -> Path:
    """A run of 500 iterations with ten illnesses, and samples that try to be code."""
    rows = healthy_rows(500)
    for name in TEN[1:]:
        ILLNESSES[name](rows)
    folder = write_run(tmp_path_factory.mktemp("runs") / "grpo-8b-math", rows, hostile=True)
    plant_stall(folder)
    write_report(folder / "report.html", [read_run(folder)])
    return folder


@pytest.fixture
def page(browser, sick_run):
    """The browser with the report of the sick run."""
    open_page(browser, sick_run / "report.html")
    return browser


def open_page(browser, file: Path) -> None:
    browser.get(file.as_uri())
    wait(browser, "return document.documentElement.dataset.ready !== undefined")


def wait(browser, condition: str) -> None:
    """Wait until a script returns true."""
    end = time.monotonic() + 30
    while not browser.execute_script(condition):
        assert time.monotonic() < end, f"not within 30 s: {condition}"
        time.sleep(0.02)


def texts(browser, selector: str) -> list[str]:
    script = (
        "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent.toWellFormed())"
    )
    return browser.execute_script(script, selector)


def keep_picture(browser, name: str) -> None:
    """Keep a picture of what is on the screen, but not among the documents."""
    if PICTURES and PICTURES != "docs":
        Path(PICTURES).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(Path(PICTURES) / f"{name}.png"))


def errors_of(browser) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_500_iterations_open_quickly_and_ten_illnesses_are_named(browser, sick_run):
    """Alarms and summary come before plotly.js is read; of plots and samples only what is looked at is made.

    Seconds are printed: until the scripts are ready, and until the first plots are on the screen.
    """
    html = (sick_run / "report.html").read_text()
    plotly = max(re.findall("<script.*?</script>", html, re.DOTALL), key=len)
    assert html.index('id="alarms"') < html.index('id="summary"') < html.index(plotly)
    assert len(html) - len(plotly) < MOST_BYTES
    begin = time.perf_counter()
    open_page(browser, sick_run / "report.html")
    ready_s = time.perf_counter() - begin
    assert not texts(browser, ".plot .main-svg") and not texts(browser, "#group *")
    assert browser.execute_script("return document.querySelectorAll('*').length") < MOST_ELEMENTS
    browser.execute_script("document.querySelector('.plot').scrollIntoView()")
    wait(browser, "return document.querySelector('.plot .main-svg') !== null")
    print(f"ready after {ready_s:.2f} s, first plots after {time.perf_counter() - begin:.2f} s")
    assert browser.execute_script("return document.querySelectorAll('.js-plotly-plot').length") <= MOST_PLOTS
    assert set(texts(browser, ".alarm h4")) == set(TEN)
    browser.execute_script("scrollTo(0, 0)")
    keep_picture(browser, "alarms")
    assert not errors_of(browser)


def test_an_alarm_leads_to_its_plot(page):
    alarm = next(
        each for each in page.find_elements("css selector", ".alarm") if "entropy collapse" in each.text
    )
    alarm.click()
    wait(page, "return document.querySelector('figure.found .main-svg') !== null")
    assert texts(page, "figure.found .name") == ["Entropy"]
    assert "entropy collapse" in "".join(texts(page, "figure.found svg text"))


def test_every_section_is_drawn_when_it_is_looked_at(page):
    sections = page.find_elements("css selector", "header nav a")
    assert [
        link.text.split()[0] for link in sections
    ] == "Alarms Summary Learning Updates Time Other Timeline Samples".split()
    for link in sections:
        page.execute_script("scrollTo(0, 0)")
        link.click()
        target = link.get_attribute("href").partition("#")[2]
        for place in page.find_elements("css selector", f"#{target} .plot, #{target} .timeline"):
            page.execute_script("arguments[0].scrollIntoView()", place)
        wait(
            page,
            f"return [...document.querySelectorAll('#{target} .plot, #{target} .timeline')]"
            ".every((place) => place.querySelector('.main-svg') !== null)",
        )
        keep_picture(page, target)
    assert not errors_of(page)


def test_plots_can_be_smoothed_zoomed_and_have_curves_taken_out(page):
    figure = "document.querySelector('.plot')"
    page.execute_script(f"{figure}.scrollIntoView()")
    wait(page, f"return {figure}.querySelector('.main-svg') !== null")
    curves = page.execute_script(f"return {figure}.data.length")
    page.execute_script(
        "const choice = document.getElementById('smoothing'); choice.value = '20';"
        "choice.dispatchEvent(new Event('change'))"
    )
    assert page.execute_script(f"return {figure}.data.length") == 2 * curves
    page.execute_script(f"Plotly.relayout({figure}, {{'xaxis.range[0]': 100, 'xaxis.range[1]': 200}})")
    wait(
        page,
        "return [...document.querySelectorAll('.plot.js-plotly-plot')]"
        ".every((plot) => plot.layout.xaxis.range[1] === 200)",
    )
    page.find_element("css selector", "figure .log").click()
    wait(page, f"return {figure}.layout.yaxis.type === 'log'")
    legend = page.find_element("css selector", ".plot .legendtoggle")
    page.execute_script(
        "for (const name of ['mousedown', 'mouseup']) arguments[0].dispatchEvent(new MouseEvent(name))",
        legend,
    )
    wait(page, f"return {figure}.data.some((curve) => curve.visible === 'legendonly')")
    assert not errors_of(page)


def test_a_group_of_samples_is_shown_and_a_script_in_a_response_stays_text(page):
    title = page.title
    page.execute_script("document.getElementById('samples').scrollIntoView()")
    wait(page, "return document.querySelectorAll('#group tbody tr').length === 8")
    assert any(HOSTILE in text for text in texts(page, "#group .response"))
    assert page.title == title and not texts(page, "main script, main img")
    coloured = "return document.querySelectorAll('#group span[style*=background]').length"
    assert page.execute_script(coloured) > 50
    keep_picture(page, "group")
    buttons = page.find_elements("css selector", "#groups button")
    assert len(buttons) == 6 + 4
    buttons[1].click()
    assert texts(page, "#group .prompt")[0].startswith("Question 1")
    buttons[-1].click()
    assert texts(page, "#group thead th") == ["iteration", "score", "tokens", "response"]
    assert not errors_of(page)


def test_several_runs_an_empty_one_and_the_dark_page(browser, tmp_path):
    runs = [
        read_run(write_run(tmp_path / f"seed-{seed}", healthy_rows(200, seed=seed))) for seed in (1, 2, 3)
    ]
    (tmp_path / "metrics.jsonl").touch()
    write_report(tmp_path / "report.html", [*runs, read_run(tmp_path)])
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    browser.get((tmp_path / "report.html").as_uri())
    browser.execute_script("document.querySelector('.plot').scrollIntoView()")
    wait(browser, "return document.querySelector('.plot .main-svg') !== null")
    assert (
        browser.execute_script(
            "return document.querySelector('.plot').data.filter((curve) => curve.x[0] !== null).length"
        )
        == 6
    )
    browser.find_element("css selector", ".runs input").click()
    wait(
        browser,
        "return document.querySelector('.plot').data.filter((curve) => curve.x[0] !== null).length === 4",
    )
    keep_picture(browser, "several")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert not errors_of(browser)


def test_the_picture_of_the_documents(browser, tmp_path, pictures):
    rows = healthy_rows(300)
    for name in ("zero-variance groups", "gap off its history", "gradient norm off its history"):
        ILLNESSES[name](rows)
    folder = write_run(tmp_path / "grpo-8b-math", rows)
    write_report(folder / "report.html", [read_run(folder)])
    browser.set_window_size(1280, 2000)
    browser.get((folder / "report.html").as_uri())
    wait(browser, "return document.querySelectorAll('.plot .main-svg').length >= 6")
    part = {"x": 0, "y": 0, "width": 1280, "height": 1500, "scale": 0.8}
    found = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": part})
    picture = base64.b64decode(found["data"])
    assert 20_000 < len(picture) <= 200_000
    (pictures / "report.png").write_bytes(picture)
