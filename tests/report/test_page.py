"""The report page in a real Chromium: clicked through, by keyboard, with hostile text, at 10,000 traces."""

import os
import re
import shutil
from contextlib import contextmanager

import pytest
from playwright.sync_api import sync_playwright

from spiral_mega.errors import UserError
from spiral_mega.report.write_page import write_report
from tests.report.runs_by_hand import (
    HOSTILE,
    SETS,
    write_large_run,
    write_metrics,
    write_results,
    write_small_run,
)

pytestmark = pytest.mark.browser

FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
FLAGS += "--disable-component-update --disable-sync"


@pytest.fixture(scope="module")
def chromium():
    path = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        yield browser
        browser.close()


@contextmanager
def opened(chromium, path, **options):
    """The page; that it asks for no other file, logs nothing and raises nothing is seen at the end."""
    page = chromium.new_page(viewport={"width": 1280, "height": 800}, **options)
    complaints = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
    page.on(
        "request",
        lambda request: (
            complaints.append(request.url) if not request.url.startswith(("file:", "data:")) else 0
        ),
    )
    page.goto(f"file://{path}")
    page.wait_for_selector("html[data-ready]")
    yield page
    page.close()
    assert complaints == []


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The report of two runs: one with everything, one with metrics and an evaluation."""
    folder = tmp_path_factory.mktemp("small")
    one = write_small_run(folder / "one")
    write_metrics(folder / "two", [0.1, 0.25])
    write_results(folder / "two" / "evaluation", {1: [0.5, 0.0], 4: [0.75, 0.25]})
    write_report([one, folder / "two"], folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def page(chromium, small):
    with opened(chromium, small) as page:
        yield page


def tab(page, name):
    page.get_by_role("tab", name=name).click()


def chart(page, title):
    return page.locator(
        "figure.chart", has=page.locator("h3", has_text=re.compile(f"^{re.escape(title)}"))
    )


def test_every_part_opens_by_click_without_network_or_error(page):
    for name, expected in [
        ("Training", "Reward"), ("Evaluation", "pass@k"), ("Analysis", "spiral-mega analyze"),
        ("Time", "Time of a step by stage"), ("Episodes", "Search traces (3)"),
    ]:  # fmt: skip
        tab(page, name)
        page.get_by_text(expected).first.wait_for()
        assert page.get_by_role("tab", name=name).get_attribute("aria-selected") == "true"


def test_runs_lie_over_each_other_and_each_can_be_taken_away(page):
    label = chart(page, "Reward").locator("svg[role=img]").get_attribute("aria-label")
    assert "one search ends at 0.375" in label
    assert "two search ends at 0.25" in label
    assert "aggregation" not in label, "what is nan in every step is no curve"
    page.get_by_role("checkbox", name="two").uncheck()
    assert (
        chart(page, "Reward").locator("svg[role=img]").get_attribute("aria-label")
        == "Reward: search ends at 0.375"
    )


def test_the_cursor_of_a_plot_reads_values_by_keyboard(page):
    plot = chart(page, "Reward").locator("svg[role=img]")
    plot.focus()
    page.keyboard.press("End")
    tip = chart(page, "Reward").locator(".tip")
    assert tip.inner_text().splitlines()[0] == "step 3"
    assert "one search: 0.375" in tip.inner_text()
    page.keyboard.press("ArrowLeft")
    assert "two search: 0.25" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_every_measure_is_in_the_table_with_its_interval(page):
    tab(page, "Evaluation")
    row = page.locator("tr", has_text="pass_at_k").filter(has_text="k 1").first
    cells = row.locator("td").all_inner_texts()
    assert cells[:3] == ["pass_at_k", "pass", "k 1"]
    assert cells[3].split() == ["50.0%", "0.0", "to", "100.0"]
    assert cells[4].split()[0] == "25.0%"
    rsa = (
        page.locator("tr", has_text="rsa").filter(has_text="step 1").locator("td").all_inner_texts()
    )
    assert rsa[3].split() == ["75.0%", "75.0", "to", "75.0"]
    assert "1,600 · 1,600" in rsa


def test_the_efficiency_is_how_many_times_fewer_responses_reach_the_same(page):
    """two has 50 % at k = 4, which one has at k = 1."""
    tab(page, "Evaluation")
    rows = (
        page.locator("h2:has-text('Scaling efficiency') ~ .scroll")
        .first.locator("tbody tr")
        .all_inner_texts()
    )
    assert [row.split("\t") for row in rows] == [["one", "two", "4.0 ×", "k = 4"]]


def test_time_is_shared_out_over_the_stages_and_the_rest(page):
    tab(page, "Time")
    rows = [row.split("\t") for row in page.locator("tbody tr").all_inner_texts()]
    assert rows[:3] == [
        ["one", "rollout", "3", "66.7%"],
        ["", "update", "1", "22.2%"],
        ["", "other", "0.5", "11.1%"],
    ]


def rows(page):
    return page.locator(".row div:first-child").all_inner_texts()


def heading(page):
    return page.locator("#detail h2").first.inner_text()


def test_an_episode_shows_its_traces_credit_and_what_each_set_was_made_of(page):
    tab(page, "Episodes")
    page.locator(".row", has_text="plain2").click()
    page.locator("#detail h2", has_text="plain2").wait_for()
    assert page.locator("#detail .problem").inner_text() == "problem plain2"
    first = page.locator("#detail .trace").first
    assert first.locator(".chip").all_inner_texts() == [
        "reward 1",
        "advantage -0.25",
        "2 tokens",
        "in set 0",
        "in set 2",
    ]
    assert "right" in first.get_attribute("class")
    assert page.locator("#set-0 > .head").inner_text().split("\n") == [
        "set 0",
        "of #0, #2",
        "score 1",
        "set advantage +0.6667",
    ]
    for l, members in enumerate(SETS):
        page.locator(f"#set-{l} > .head [data-set]").click()
        marked = page.locator(".trace.member").evaluate_all(
            "cards => cards.map(card => Number(card.dataset.position))"
        )
        assert marked == sorted(members)
        dim = page.locator(".trace.dim").count()
        assert dim == 6 - len(members) - 1, "all but the members and the answer"
    page.locator("#set-2 > .head [data-set]").click()
    assert page.locator(".trace.member, .trace.dim").count() == 0


@pytest.mark.parametrize(
    ("flag", "name"),
    [("truncated", "truncated"), ("gated", "gated"), ("failed verification", "failed")],
)
def test_each_filter_leaves_the_episodes_it_names(page, flag, name):
    tab(page, "Episodes")
    page.locator("#count", has_text="8 of 8").wait_for()
    page.get_by_label(flag, exact=True).check()
    page.locator("#count", has_text="1 of 8 episodes").wait_for()
    assert rows(page) == [f" problem {name}"]
    page.locator("#detail h2", has_text=name).wait_for()
    assert page.locator("#detail .chip.flag").count() == 1


def test_effective_leaves_out_what_had_no_credit_and_filters_add_up(page):
    tab(page, "Episodes")
    page.get_by_label("effective", exact=True).check()
    page.locator("#count", has_text="7 of 8").wait_for()
    assert " problem idle" not in rows(page)
    page.get_by_label("Step or evaluation").select_option("step 1")
    page.locator("#count", has_text="1 of 8").wait_for()
    page.get_by_label("Search problems").fill("nothing like it")
    page.get_by_text("No episode passes the filters").wait_for()


def test_everything_can_be_done_by_keyboard(page):
    page.keyboard.press("2")
    assert page.get_by_role("tab", name="Evaluation").get_attribute("aria-selected") == "true"
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", name="Analysis").get_attribute("aria-selected") == "true"
    page.keyboard.press("/")
    page.keyboard.type("plain")
    page.locator("#count", has_text="3 of 8").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.locator("#detail h2", has_text="plain2").wait_for()
    page.keyboard.press("k")
    page.locator("#detail h2", has_text="plain1").wait_for()
    page.locator("#episodes").focus()
    page.keyboard.press("End")
    page.locator("#detail h2", has_text="plain3").wait_for()
    page.keyboard.press("s")
    assert page.locator(".trace.member").count() == 2
    assert page.locator(".set.selected").get_attribute("id") == "set-0"
    page.keyboard.press("Shift+S")
    assert page.locator(".set.selected").get_attribute("id") == "set-2"
    page.keyboard.press("Escape")
    assert page.locator(".trace.member").count() == 0
    page.keyboard.press("x")
    assert page.locator(".trace.open").count() == 6
    page.keyboard.press("?")
    assert page.get_by_role("dialog", name="Keyboard").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog", name="Keyboard").is_visible()


def test_light_and_dark_follow_the_system_and_the_key(chromium, small):
    def contrast(page):
        """Of body text to paper, as WCAG 2 defines it; 7 is its strictest demand."""
        colors = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        light = sorted(
            luminance([int(part) / 255 for part in re.findall(r"\d+", color)[:3]])
            for color in colors
        )
        return (light[1] + 0.05) / (light[0] + 0.05), luminance_of(colors[1])

    def luminance(rgb):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def luminance_of(color):
        return luminance([int(part) / 255 for part in re.findall(r"\d+", color)[:3]])

    for scheme in ("light", "dark"):
        with opened(chromium, small, color_scheme=scheme) as page:
            first, paper = contrast(page)
            assert (paper < 0.2) == (scheme == "dark")
            page.keyboard.press("t")
            second, other = contrast(page)
            assert (other < 0.2) != (paper < 0.2)
            assert min(first, second) > 7


def test_text_of_models_and_data_stays_text(page):
    tab(page, "Episodes")
    page.locator(".row", has_text="onerror").click()
    page.locator("#detail .problem", has_text="onerror").wait_for()
    assert page.locator("#detail .problem").inner_text() == f"problem {HOSTILE}"
    assert f"{HOSTILE} search 0" in page.locator("#detail pre").first.inner_text()
    assert page.locator("img").count() == 0
    assert page.title() == "spiral_mega: one, two"


def test_ten_thousand_traces_put_no_more_into_the_page_than_is_seen(chromium, tmp_path):
    """Of 416 episodes only the rows in view are elements, and only blocks that were looked at are unpacked."""
    write_report(
        [write_large_run(tmp_path / "large", 10_000)], tmp_path / "report.html", max_traces=10_000
    )
    with opened(chromium, tmp_path / "report.html") as page:
        page.keyboard.press("5")
        page.locator("#count", has_text="416 of 416 episodes").wait_for()
        page.locator("#detail h2", has_text="large/0").wait_for()
        assert page.locator(".row").count() < 60
        assert page.evaluate("blocks.size") == 1
        page.locator("#episodes").focus()
        page.keyboard.press("End")
        page.locator("#detail h2", has_text="large/415").wait_for()
        assert page.locator(".trace").count() == 24
        assert page.evaluate("blocks.size") == 2
        page.get_by_label("Search problems").fill("problem 77")
        page.locator("#count", has_text="1 of 416").wait_for()


def test_what_is_left_out_is_said_and_what_is_kept_is_evenly_spaced(chromium, tmp_path):
    write_report(
        [write_large_run(tmp_path / "large", 2400)], tmp_path / "report.html", max_traces=240
    )
    with opened(chromium, tmp_path / "report.html") as page:
        page.keyboard.press("5")
        page.get_by_text("large: 90 more are in its folder").wait_for()
        assert [row.strip() for row in rows(page)] == [f"problem {10 * i}" for i in range(10)]


def test_a_folder_with_nothing_to_show_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(UserError, match="is not a folder"):
        write_report([tmp_path / "none"], tmp_path / "report.html")
