"""The page of a recorded step in a real Chromium, opened from disk."""

import re
import shutil

import numpy as np
import pytest

from gspo.data.step_record import DUAL
from gspo.tracking.step_page import View, recorded_view, step_page, write_step_page
from spoiled_runs import MARKUP
from step_records import hostile_record, make_episode, step_record, write_step

pytestmark = pytest.mark.browser
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TOKENS = "#views [data-token]"


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    # else playwright's own
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, tmp_path):
    """A function that opens a page. At the end, no page has complained or asked for anything."""
    tabs, requests, complaints = [], [], []

    def open_page(text: str, address: str = "", width: int = 1300):
        path = tmp_path / f"{len(tabs)}.html"
        path.write_text(text)
        tab = chromium.new_page(viewport={"width": width, "height": 900})
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: complaints.append(dialog.message))
        tab.goto(path.as_uri() + address)
        tabs.append((tab, path.as_uri()))
        return tab

    yield open_page
    assert complaints == []
    assert requests == [address for _, address in tabs]
    for tab, _ in tabs:
        tab.close()


def page_of(record, *others: View) -> str:
    return step_page(record, [recorded_view(record), *others], "a step")


def numbers_of(tab) -> str:
    return re.sub(r"\s+", " ", tab.locator("#numbers").inner_text())


def listed(tab) -> list[int]:
    return [int(row) for row in tab.locator("#rows tbody button").all_inner_texts()]


def test_the_list_sorts_by_what_matters(opened):
    record = step_record(rows=12)
    tab = opened(page_of(record))
    rows = tab.evaluate("JSON.parse(document.getElementById('content').textContent).rows")
    expected = sorted(range(12), key=lambda row: -rows["clipped"][0][row])
    assert listed(tab) == expected, "the most clipped response comes first"
    assert tab.locator("#response-title").inner_text() == (
        f"Response {expected[0]}, group {expected[0] // 4}"
    )
    for key, values in (
        ("weight_0", rows["weight"][0]),
        ("mismatch", rows["mismatch"]),
        ("reward", rows["reward"]),
    ):
        tab.click(f"[data-sort={key}]")
        assert listed(tab) == sorted(range(12), key=lambda row: -values[row])
        tab.click(f"[data-sort={key}]")
        assert listed(tab) == sorted(range(12), key=lambda row: values[row])
        assert tab.locator("th[aria-sort=ascending]").count() == 1
    tab.click("[data-sort=row]")
    assert listed(tab) == list(range(12))


def test_a_chosen_response_is_marked_with_its_group(opened):
    tab = opened(page_of(step_record(rows=12)), "#6")
    assert tab.locator("tr[aria-current]").get_attribute("data-row") == "6"
    marked = tab.locator("tr.same-group").evaluate_all("rows => rows.map(r => +r.dataset.row)")
    assert sorted(marked) == [4, 5, 6, 7]
    tab.check("#only-group")
    assert sorted(listed(tab)) == [4, 5, 6, 7]
    tab.click("[data-sort=row]")
    tab.click("#next")
    assert tab.locator("#response-title").inner_text() == "Response 7, group 1"
    tab.click("#next")
    tab.click("#previous")
    assert tab.locator("#response-title").inner_text() == "Response 6, group 1"


def test_a_token_under_the_pointer_shows_its_numbers(opened):
    record = step_record(rows=4, updates=1, layers=2)
    update = record.updates[0]
    update.clipped[2] = 3
    tab = opened(page_of(record), "#0")
    tab.locator(TOKENS).nth(2).hover()
    _, ids = record.prompt_and_response(0)
    words = numbers_of(tab)
    assert f"token 3 of 6, text w{ids[2]}, token id {ids[2]}, update 1, in the loss" in words
    assert "clipped: no gradient, outside the clip range" in words
    for name, value in (
        ("log-ratio", update.logp[2] - record.old_logp[2]),
        ("entropy", update.entropy[2]),
        ("engine mismatch", record.old_logp[2] - record.engine_logp[2]),
        ("weight", update.weight[2]),
        ("advantage", record.advantages[2]),
        ("advantage × weight", record.advantages[2] * update.weight[2]),
    ):
        number = re.search(rf"(?:^| ){name} (-?[\d.e-]+)", words)
        assert number and float(number[1]) == pytest.approx(float(value), rel=2e-3), name
    assert re.search(r"changed experts (0|0.5|1)\b", words)


def test_the_switch_changes_the_colours(opened):
    record = step_record(rows=4, updates=1)
    clipped = record.updates[0].clipped
    clipped[:6] = [0, 2, 3, 4, DUAL | 1, 0]
    tab = opened(page_of(record), "#0")

    def classes(key: str) -> list[str]:
        tab.check(f"input[value={key}]")
        return tab.locator(TOKENS).evaluate_all("tokens => tokens.map(t => t.className)")

    marks = ["", " outside", " active", " bounded", " dual", ""]
    assert classes("clip") == [
        f"token shade-{shade}{mark}" for shade, mark in zip((5, 3, 9, 1, 10, 5), marks, strict=True)
    ]
    scales = tab.evaluate("JSON.parse(document.getElementById('content').textContent).quantities")
    scale = {quantity["key"]: quantity["scale"] for quantity in scales}
    update = record.updates[0]
    for key, values in (
        ("log_ratio", update.logp[:6] - record.old_logp[:6]),
        ("entropy", update.entropy[:6]),
        ("pull", update.weight[:6] * record.advantages[:6]),
    ):
        found = classes(key)
        for token, (name, value) in enumerate(zip(found, values, strict=True)):
            exact = 5 + 5 * float(np.clip(value / scale[key], -1, 1))
            shade = int(name.split("shade-")[1].split()[0])
            assert abs(shade - exact) <= 0.51, (key, token)
            assert name.endswith(marks[token] or f"shade-{shade}")
    legend = tab.locator("#legend").inner_text()
    assert "99th percentile of |advantage × weight|" in legend
    assert "beyond the numerical bound" in legend and "dual clip" in legend
    assert "environment" not in legend, "no token is the environment's"


def test_two_views_stand_side_by_side_and_narrow_ones_one_below_the_other(opened):
    record = step_record(rows=4, updates=1)
    view = recorded_view(record)
    other = View(
        "grpo <b>",
        view.advantages,
        [2 * weight for weight in view.weights],
        [np.zeros_like(clipped) for clipped in view.clipped],
    )
    page = page_of(record, other)
    for width, beside in ((1300, True), (420, False)):
        tab = opened(page, "#0", width)
        assert tab.locator("#views h3").all_inner_texts() == ["gspo", "grpo <b>"]
        left, right = (tab.locator("#views section").nth(i).bounding_box() for i in (0, 1))
        assert (left["y"] == right["y"]) == beside and (left["x"] == right["x"]) != beside
        tab.locator(TOKENS).nth(1).hover()
        twins = tab.locator(".twin").evaluate_all("tokens => tokens.map(t => t.dataset.token)")
        assert twins == ["1", "1"]
        words = numbers_of(tab)
        weights = [float(x) for x in re.findall(r"(?<!× )weight (-?[\d.]+)", words)]
        assert weights == pytest.approx(
            [float(view.weights[0][1]), 2 * float(view.weights[0][1])], rel=2e-3
        )
        overflow = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, "nothing lies beyond the edge"


def test_the_keyboard_reaches_rows_and_tokens(opened):
    tab = opened(page_of(step_record(rows=8, length=6)))
    order = listed(tab)

    def focused(script: str):
        return tab.evaluate(f"document.activeElement.{script}")

    tab.locator("tr[aria-current] button").focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowDown")
    assert focused("closest('tr').dataset.row") == str(order[2])
    assert f"Response {order[2]}," in tab.locator("#response-title").inner_text()
    tab.keyboard.press("ArrowUp")
    assert f"Response {order[1]}," in tab.locator("#response-title").inner_text()
    for _ in range(12):  # the list and the tokens are one stop each
        tab.keyboard.press("Tab")
        if focused("dataset.token") is not None:
            break
    assert focused("dataset.token") == "0"
    tab.keyboard.press("ArrowRight")
    assert focused("dataset.token") == "1" and "token 2 of" in numbers_of(tab)
    tab.keyboard.press("End")
    last = tab.locator(TOKENS).count() - 1
    assert focused("dataset.token") == str(last) and f"token {last + 1} of" in numbers_of(tab)
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowLeft")
    assert focused("dataset.token") == "0"


def test_turns_and_tokens_out_of_the_loss_are_told_apart(opened):
    record = step_record(rows=4, length=9, updates=1)
    make_episode(record, 1)
    tab = opened(page_of(record), "#1")
    titles = tab.locator(".turn").all_inner_texts()
    length = int(record.response_lengths[1])
    assert titles == [
        "policy, 1 tokens",
        "environment, 2 tokens",
        f"policy, {length - 3} tokens, reward 0.5",
    ]
    classes = tab.locator(TOKENS).evaluate_all("tokens => tokens.map(t => t.className)")
    assert classes[1:3] == ["token written"] * 2 and "untrained" in classes[-1]
    tab.locator(TOKENS).nth(1).hover()
    assert "written by the environment" in numbers_of(tab)
    tab.locator(TOKENS).last.hover()
    assert "out of the loss" in numbers_of(tab) and "weight –" in numbers_of(tab)
    assert "environment" in tab.locator("#legend").inner_text()


def test_white_space_can_be_seen(opened):
    record = step_record(rows=4, updates=1, words=3)
    record.header.vocabulary = {"0": "a\n", "1": "  ", "2": "\t"}
    record.token_ids[:] = np.resize([0, 1, 2], len(record.token_ids))
    tab = opened(page_of(record), "#0")
    texts = tab.locator(TOKENS).evaluate_all("tokens => tokens.map(t => t.textContent)")
    assert texts[:3] == ["a↵\n", "␣␣", "⇥"]
    lines = tab.locator(TOKENS).evaluate_all("tokens => tokens.map(t => t.offsetTop)")
    assert lines[1] > lines[0], "a newline breaks the line"
    assert tab.locator("#prompt").inner_text() == "a↵\n␣␣⇥"


def test_a_row_of_several_updates_shows_each(opened):
    record = step_record(rows=4, updates=1)
    (first,) = record.updates
    second = step_record(rows=4, updates=1, seed=1).updates[0]
    record.updates.append(second)
    tab = opened(page_of(record), "#0")
    for number, update in ((1, first), (2, second)):
        tab.select_option("#update", label=str(number))
        tab.locator(TOKENS).nth(0).hover()
        words = numbers_of(tab)
        assert f"update {number}," in words
        weight = re.search(r" weight (-?[\d.]+)", words)
        assert weight and float(weight[1]) == pytest.approx(float(update.weight[0]), rel=2e-3)


def test_a_record_that_ended_before_an_update_is_shown(opened):
    tab = opened(page_of(step_record(updates=0, complete=False, error="out of memory")))
    assert "out of memory" in tab.locator("body").inner_text()
    assert "in no recorded update" in tab.locator("#response-about").inner_text()
    assert tab.locator(TOKENS).count() > 0 and "no update" in numbers_of(tab)


def test_a_hostile_record_does_nothing(opened):
    record = hostile_record()
    view = recorded_view(record)
    tab = opened(step_page(record, [view, view], MARKUP))
    for _ in range(3):
        tab.click("#next")
    assert tab.locator("img").count() == 0
    assert tab.locator("script").count() == tab.evaluate(
        "2 + document.querySelectorAll('script[id^=array]').length"
    )
    assert any(
        "<script>" in text
        for text in tab.evaluate("""
        JSON.parse(document.getElementById("content").textContent).texts
    """)
    )


def test_without_scripts_the_page_says_what_is_needed(chromium, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page_of(step_record()))
    context = chromium.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(path.as_uri())
    assert "Allow scripts for this file" in tab.locator("body").inner_text()
    assert not tab.locator("#page").is_visible()
    context.close()


def test_a_large_record_has_only_the_chosen_response_in_the_page(opened, tmp_path):
    """1,000 responses of up to 2,000 tokens."""
    record = step_record(rows=1000, prompt=50, length=2000, updates=2, layers=1, words=5000)
    write_step(tmp_path, record)
    path = write_step_page(tmp_path, 3)
    assert path.stat().st_size < 24 * len(record.trained)
    tab = opened(path.read_text(), "#0")
    for row in (0, 999, 500):
        tab.evaluate(f"location.hash = '{row}'")
        tab.get_by_role("heading", name=f"Response {row},").wait_for()
        assert tab.locator(TOKENS).count() == record.response_lengths[row]
        tab.locator(TOKENS).nth(3).hover()
        _, ids = record.prompt_and_response(row)
        assert f"token id {ids[3]}," in numbers_of(tab)
    assert tab.locator("#rows tbody tr").count() == 1000


def test_a_very_long_response_is_drawn_in_parts(opened):
    record = step_record(rows=4, length=30_000, updates=1)
    tab = opened(page_of(record), "#0")
    assert tab.locator(TOKENS).count() == 20_000
    tab.click("#more")
    assert tab.locator(TOKENS).count() == 30_000
    assert not tab.locator("#more").is_visible()
