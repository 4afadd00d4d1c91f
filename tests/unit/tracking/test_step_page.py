"""The page of a recorded step: its numbers are those of the record, and a record is inert in it."""

import base64
import hashlib
import json
import re

import numpy as np
import pytest

from gspo.data.step_record import ACTIVE
from gspo.data.step_record_files import find_record, read_record, record_file
from gspo.io.escaping import UNSAFE_CHARACTERS
from gspo.io.untrusted import Unreadable
from gspo.tracking import run_report, step_excerpts, step_tokens
from gspo.tracking.step_page import View, recorded_view, step_page, write_step_page
from gspo.tracking.step_tokens import Passes, color_scale, shade
from pages import Page
from recorded_runs import HEALTHY, write
from spoiled_runs import ESCAPE, MARKUP
from step_records import hostile_record, make_episode, step_record, write_step

HALF = 2.0**-11  # the relative error of float16


def content_of(page: str) -> dict:
    text = page.split('id="content">')[1].split("</script>")[0]
    assert not set("<>&") & set(text) and text.isascii()
    return json.loads(text)


def arrays_of(page: str) -> dict[str, np.ndarray]:
    """The arrays of a page by their names. Those that are constant have a number per segment."""
    encodings = content_of(page)["encodings"]
    dtypes = {"half": "<f2", "constant": "<f4", "uint8": "u1", "uint16": "<u2", "uint32": "<u4"}
    arrays = {}
    for name, text in re.findall(r'id="array-(\w+)">([^<]*)</script>', page):
        encoding = encodings[name]
        values = np.frombuffer(base64.b64decode(text, validate=True), dtypes[encoding["encoding"]])
        if encoding["encoding"] == "half":
            values = values.astype(np.float64) * encoding["scale"]
        arrays[name] = values
    assert arrays.keys() == encodings.keys()
    return arrays


def page_of(record, *others: View) -> str:
    return step_page(record, [recorded_view(record), *others], "a step")


def position_of(record, row: int, number: int) -> int:
    """The position of a row's first token among the tokens of all passes."""
    before = sum(len(update.logp) for update in record.updates[: number - 1])
    rows = record.updates[number - 1].rows
    index = rows.tolist().index(row)
    return before + int(record.response_lengths[rows[:index]].sum())


def test_each_view_has_its_own_tokens_in_the_loss():
    record = step_record(rows=3, length=5, updates=1)
    in_other_loss = np.arange(len(record.trained)) % 3 == 0
    other = View("other", record.advantages, None, None, trained=in_other_loss)
    page = page_of(record, other)
    flags = arrays_of(page)["flags"]
    np.testing.assert_array_equal(flags, record.sampled + 2 * record.trained + 4 * in_other_loss)
    assert content_of(page)["has_untrained"]


def test_the_numbers_of_every_token_are_those_of_the_record():
    record = step_record(rows=9, length=7, updates=2, layers=3)
    make_episode(record, 1)
    page = page_of(record)
    content, arrays = content_of(page), arrays_of(page)
    token_ids = np.array(content["token_ids"])
    np.testing.assert_array_equal(token_ids[arrays["tokens"]], record.token_ids)
    assert content["texts"] == [f" w{token}" for token in token_ids]
    np.testing.assert_array_equal(arrays["flags"], record.sampled + 2 * record.trained)
    for number, update in enumerate(record.updates, start=1):
        offset = 0
        for row in update.rows:
            begin, length = record.tokens_of(row).start, int(record.response_lengths[row])
            position = position_of(record, row, number)
            _, ids = record.prompt_and_response(row)
            assert len(ids) == length
            for i in range(length):
                token = begin + i
                expected = {
                    "log_ratio": update.logp[offset + i] - record.old_logp[token],
                    "entropy": update.entropy[offset + i],
                    "changed": changed(record, update, row, i, offset + i),
                }
                of_loss = {"weight_0": update.weight[offset + i]}
                for name, value in expected.items():
                    value = value if record.sampled[token] else np.nan
                    np.testing.assert_allclose(arrays[name][position + i], value, rtol=HALF)
                for name, value in of_loss.items():
                    value = value if record.trained[token] else np.nan
                    np.testing.assert_allclose(arrays[name][position + i], value, rtol=HALF)
                bits = update.clipped[offset + i] if record.trained[token] else 0
                assert arrays["clip_0"][position + i] == bits
            offset += length
    difference = np.where(record.sampled, record.old_logp - record.engine_logp, np.nan)
    np.testing.assert_allclose(arrays["mismatch"], difference, rtol=HALF, atol=1e-9)
    # a number per response, because all tokens of a response have the same advantage
    assert content["encodings"]["advantage_0"]["encoding"] == "constant"
    first_tokens = record.ends - record.response_lengths
    np.testing.assert_array_equal(arrays["advantage_0"], record.advantages[first_tokens])


def changed(record, update, row: int, token: int, position: int) -> float:
    """The share of layers with other experts at the position before a token."""
    begin = int((record.prompt_lengths + record.response_lengths)[:row].sum())
    old = record.old_experts[begin + record.prompt_lengths[row] + token - 1]
    layers = list(zip(old.tolist(), update.experts[position].tolist(), strict=True))
    return float(np.mean([sorted(before) != sorted(after) for before, after in layers]))


def test_extreme_numbers_keep_their_size():
    record = step_record(rows=4, updates=1)
    weight = record.updates[0].weight
    weight[:5] = [3e8, np.inf, -1.0, np.nan, 0.0]
    values = arrays_of(page_of(record))["weight_0"][:5]
    np.testing.assert_allclose(values, weight[:5], rtol=HALF)
    record.rewards[:2] = [np.nan, -np.inf]
    assert content_of(page_of(record))["rows"]["reward"][:3] == ["nan", "-inf", 0.0]


def test_a_weight_per_response_takes_a_number_per_response():
    record = step_record(rows=6, updates=2)
    for update in record.updates:
        lengths = record.response_lengths[update.rows]
        update.weight = np.repeat(np.arange(len(lengths), dtype=np.float32), lengths)
    make_episode(record, 0)  # tokens out of the loss do not matter
    page = page_of(record)
    assert content_of(page)["encodings"]["weight_0"]["encoding"] == "constant"
    np.testing.assert_array_equal(arrays_of(page)["weight_0"], [0, 1, 2, 0, 1, 2])


def test_ratios_that_are_1_by_definition_have_log_ratio_0():
    record = step_record(updates=2)
    first = len(record.updates[0].logp)
    assert step_tokens.log_ratios(record, Passes(record))[:first].all()
    record.header.state = {"starts_at_old_policy": True}
    log_ratio = step_tokens.log_ratios(record, Passes(record))
    assert not log_ratio[:first].any() and log_ratio[first:].all()
    record.header.settings["policy"] = {"old_logprobs": "engine"}
    assert step_tokens.log_ratios(record, Passes(record))[:first].all()


@pytest.mark.parametrize("how", ["skipped", "engine"])
def test_the_mismatch_is_that_of_the_first_update_if_the_engine_is_the_old_policy(how):
    record = step_record(updates=2)
    if how == "skipped":
        record.header.state = {"skips_old_pass": True}
    else:
        record.header.settings["policy"] = {"old_logprobs": "engine"}
    mismatch = step_tokens.mismatches(record, Passes(record))
    for update, is_first in zip(record.updates, (True, False), strict=True):
        offset = 0
        for row in update.rows:
            tokens = record.tokens_of(row)
            length = tokens.stop - tokens.start
            expected = update.logp[offset : offset + length] - record.engine_logp[tokens]
            expected = expected if is_first else np.full(length, np.nan)
            np.testing.assert_array_equal(mismatch[tokens], expected)
            offset += length
    # the age of the weights is no mismatch of the engine
    record.header.state["starts_at_old_policy"] = False
    assert np.isnan(step_tokens.mismatches(record, Passes(record))).all()


def test_the_list_has_the_numbers_of_each_response():
    record = step_record(rows=9, length=7, updates=2)
    make_episode(record, 1)
    rows = content_of(page_of(record))["rows"]
    pulls = np.zeros(9)
    for number, update in enumerate(record.updates, start=1):
        for row in update.rows:
            tokens = record.tokens_of(row)
            before = sum(len(other.logp) for other in record.updates[: number - 1])
            begin = position_of(record, row, number) - before
            own = slice(begin, begin + tokens.stop - tokens.start)
            trained = record.trained[tokens]
            clipped = (update.clipped[own][trained] & ACTIVE).astype(bool)
            assert rows["clipped"][0][row] == pytest.approx(clipped.mean(), rel=1e-5)
            pull = (record.advantages[tokens] * update.weight[own])[trained]
            pulls[row] = np.abs(pull).sum()
    np.testing.assert_allclose(rows["weight"][0], pulls / pulls.sum(), rtol=1e-5)
    for row, mismatch in enumerate(rows["mismatch"]):
        tokens = record.tokens_of(row)
        difference = np.abs(record.old_logp[tokens] - record.engine_logp[tokens])
        largest = difference[record.sampled[tokens]].max()
        assert mismatch == pytest.approx(float(largest), rel=1e-5)
    assert rows["turns"] == {"1": [["policy", 1, 0.0], ["environment", 2, 0.0], ["policy", 3, 0.5]]}


def test_a_row_of_two_updates_has_two_passes():
    record = step_record(rows=4, updates=1)
    record.updates.append(record.updates[0])
    content = content_of(page_of(record))
    assert content["passes"]["rows"] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert content["passes"]["updates"] == [1] * 4 + [2] * 4
    assert content["passes"]["begins"][4] == len(record.trained)


def test_a_record_without_updates_has_a_page():
    record = step_record(updates=0, complete=False, error="out of memory")
    page = page_of(record)
    assert "log_ratio" not in arrays_of(page)
    assert "The step ended with: out of memory" in " ".join(Page(page).words)


def test_quantities_that_a_record_lacks_are_not_offered():
    def offered(record, *views):
        return [quantity["key"] for quantity in content_of(page_of(record, *views))["quantities"]]

    always = ["log_ratio", "clip", "pull"]
    assert offered(step_record(entropy=False)) == [*always, "mismatch"]
    assert offered(step_record(layers=2)) == [*always, "entropy", "mismatch", "changed"]
    record = step_record()
    view = recorded_view(record)
    view.gradients = view.weights
    assert "gradient" not in offered(record, view), "one of two views has gradients"
    content = content_of(step_page(record, [view], ""))
    assert "gradient" in [quantity["key"] for quantity in content["quantities"]]


def test_a_record_of_another_framework_may_know_neither_weights_nor_clips(tmp_path):
    record = step_record(notes=["It has no <weights>."], vocabulary={})
    for update in record.updates:
        update.weight = update.clipped = None
    page = page_of(record)
    content = content_of(page)
    keys = [quantity["key"] for quantity in content["quantities"]]
    assert keys == ["log_ratio", "entropy", "mismatch"] and "clip_0" not in content["encodings"]
    assert set(content["rows"]["clipped"][0] + content["rows"]["weight"][0]) == {"nan"}
    assert content["texts"][0] == f"⟨{content['token_ids'][0]}⟩"
    assert "It has no <weights>." in " ".join(Page(page).words)
    folder = write(tmp_path, "gspo", HEALTHY)
    write_step(folder, record)
    words = " ".join(Page(run_report.write_page(folder).read_text()).words)
    assert "a large mismatch" in words and "nan" not in words.split("Recorded steps")[1]


def test_two_views_share_a_scale():
    record = step_record()
    view = recorded_view(record)
    tenfold = View(
        "tenfold", view.advantages, [10 * weight for weight in view.weights], view.clipped
    )
    page = page_of(record, tenfold)
    content, arrays = content_of(page), arrays_of(page)
    assert content["views"] == ["gspo", "tenfold"]
    np.testing.assert_allclose(arrays["weight_1"], 10 * arrays["weight_0"], rtol=2 * HALF)
    (scale,) = [q["scale"] for q in content["quantities"] if q["key"] == "pull"]
    (alone,) = [q["scale"] for q in content_of(page_of(record))["quantities"] if q["key"] == "pull"]
    assert scale > 5 * alone


def test_views_that_do_not_fit_are_refused():
    record = step_record()
    view = recorded_view(record)
    with pytest.raises(ValueError, match="one or two views, not 3"):
        step_page(record, [view] * 3, "")
    with pytest.raises(ValueError, match="one or two views, not 0"):
        step_page(record, [], "")
    view.weights = view.weights[:1]
    with pytest.raises(ValueError, match="'gspo' do not fit the record"):
        step_page(record, [view], "")


def test_colours():
    values = np.arange(1, 1001.0)
    scale = color_scale([np.array([0.0] * 50 + [np.nan, np.inf]), -values[::2], values[1::2]])
    assert scale in (990.0, 991.0)
    assert color_scale([np.zeros(4)]) == 1.0
    assert [shade(x, 2.0) for x in (-9.0, -2.0, -0.1, 0.0, 1.2, 2.0, np.inf)] == [
        0, 0, 5, 5, 8, 10, 10,
    ]  # fmt: skip
    assert shade(float("nan"), 2.0) is None


def test_the_first_lines_tell_run_objective_and_metrics():
    words = " ".join(Page(page_of(step_record())).words)
    for part in (
        "Run: hand-made.",
        "8 responses in 2 groups, 41 response tokens, 41 of them in the loss; 2 updates.",
        "Objective of the run: gspo, with clip_low 0.1, clip_high 0.2.",
        "mean reward 0.5, clipped share of tokens 0.25",
        "Allow scripts for this file to see them.",
    ):
        assert part in words, part
    assert "not complete" not in words


def test_the_page_allows_its_own_script_and_nothing_else():
    page = page_of(step_record())
    policy = page.split('Content-Security-Policy" content="')[1].split('"')[0]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy and "http" not in policy and "style=" not in page
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "fetch("):
        assert word not in scripts[0]


def test_a_hostile_record_is_inert():
    record = hostile_record()
    views = [recorded_view(record), recorded_view(record)]
    page = step_page(record, views, MARKUP + ESCAPE)
    assert not UNSAFE_CHARACTERS.search(page)
    assert page.count("<script") == page.count("</script>") == 2 + len(arrays_of(page))
    assert "<script>alert" not in page and "<!--" not in page
    # quotes end no text in JSON's own element
    markup = page.split('id="content">')[0]
    assert "' onerror" not in markup and 'onerror="' not in markup
    texts = content_of(page)["texts"]
    assert max(map(len, texts)) < 500
    assert any(text.startswith("xxx") and text.endswith("(10,000 characters)") for text in texts)
    assert not any(UNSAFE_CHARACTERS.search(text) for text in texts)
    assert {r"\u2028\u2029", r"\u202eabc", r"\ud83d"} <= set(texts)
    assert len(page) < 200_000


# --------------------------------------------------------------------------------------------------
# in the run directory, and the page of the run
def test_the_page_lies_beside_the_record(tmp_path):
    write_step(tmp_path, step_record(step=3))
    path = write_step_page(tmp_path, 3)
    assert path == tmp_path / "steps" / "step_000003.html"
    assert f"{tmp_path.name}, step 3" in path.read_text()
    with pytest.raises(ValueError, match="no record of step 4; the nearest"):
        write_step_page(tmp_path, 4)


def test_a_folder_of_records_that_is_a_link_is_refused(tmp_path):
    write_step(tmp_path, step_record(step=3))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "steps").symlink_to(tmp_path / "steps")
    with pytest.raises(Unreadable, match="is a link"):
        write_step_page(tmp_path / "run", 3)
    assert not (tmp_path / "steps" / "step_000003.html").exists()


@pytest.fixture
def recorded_run(tmp_path):
    folder = write(tmp_path, "gspo", HEALTHY)
    for step in (2, 4, 6, 8):
        record = step_record(rows=12, length=500, step=step, seed=step)
        make_episode(record, 1)
        write_step(folder, record)
    return folder


def test_the_page_of_a_run_links_to_its_newest_steps_and_shows_responses(recorded_run):
    page = Page(run_report.write_page(recorded_run).read_text())
    pages = sorted(path.name for path in (recorded_run / "steps").glob("*.html"))
    assert pages == ["step_000004.html", "step_000006.html", "step_000008.html"]
    links = [value for name, value in page.attributes if name == "href"]
    assert set(pages) <= {link.removeprefix("steps/") for link in links}
    record = read_record(find_record(recorded_run, 8))
    clipped = content_of(page_of(record))["rows"]["clipped"][0]
    highest = sorted(range(12), key=lambda row: (-clipped[row], row))[:3]
    assert {f"steps/step_000008.html#{row}" for row in highest} <= set(links)
    words = " ".join(page.words)
    assert "4 steps are recorded in full" in words and "Responses of step 8" in words
    assert "and 100 more tokens" in words
    titles = [value for name, value in page.attributes if name == "title"]
    assert all(re.match(r"token \d+, ", title) for title in titles) and len(titles) > 1000
    classes = {c for name, value in page.attributes if name == "class" for c in value.split()}
    assert {"token", "active", "outside", "shade-0", "shade-5", "shade-10"} <= classes


def test_a_static_token_has_the_numbers_of_the_record(tmp_path):
    record = step_record(rows=4, updates=1)
    section = step_excerpts.RecordedSteps(1, [], None, "", [], [])
    step_excerpts._add_responses(section, record, record_file(tmp_path, 3).with_suffix(".html"))
    for line, excerpt in zip(section.rows, section.excerpts, strict=True):
        row = int(line[0])
        begin = record.tokens_of(row).start
        for i, (_, words, text) in enumerate(excerpt.tokens):
            log_ratio = float(record.updates[0].logp[begin + i] - record.old_logp[begin + i])
            assert f"token {i + 1}, log-ratio {log_ratio:.4g}, weight " in words
            assert f"weight {record.updates[0].weight[begin + i]:.4g}," in words
            _, ids = record.prompt_and_response(row)
            assert text == f" w{ids[i]}"


def test_damaged_and_very_large_records_stop_no_page(recorded_run, monkeypatch):
    record_file(recorded_run, 8).write_bytes(b"\x08" * 100)
    words = " ".join(Page(run_report.write_page(recorded_run).read_text()).words)
    assert words.count("step_000008.safetensors is no record of a step") == 1
    assert "Responses of step 6" in words
    monkeypatch.setattr(step_excerpts, "MAX_RECORD_BYTES", 100)
    for path in (recorded_run / "steps").glob("*.html"):
        path.unlink()
    words = " ".join(Page(run_report.write_page(recorded_run).read_text()).words)
    assert "4 steps are recorded in full" in words and "Responses of step" not in words
    assert not list((recorded_run / "steps").glob("*.html"))


def test_a_run_without_records_has_no_such_section(tmp_path):
    folder = write(tmp_path, "gspo", HEALTHY)
    assert "Recorded steps" not in run_report.page(folder)


def test_a_hostile_record_is_inert_in_the_page_of_the_run(tmp_path):
    folder = write(tmp_path, "gspo", HEALTHY)
    write_step(folder, hostile_record())
    page = run_report.write_page(folder).read_text()
    assert not UNSAFE_CHARACTERS.search(page) and "<script" not in page
    assert "Responses of step 3" in " ".join(Page(page).words)
