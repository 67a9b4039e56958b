"""A retention run's page in a real browser: tables, panels and lost answers, hidden texts, a phone, the dark, and nothing run of them."""

from pathlib import Path

import pytest

from evalkit.retention.page import MOST, lost, page
from evalkit.retention.report import Report, opened
from tests.recalled import BUCKETS, TURNS, write_run

pytest.importorskip("selenium", reason="the page's tests drive Chromium with selenium, which is not installed")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from tests.browser.screen import asked_for, choose, click, column, contrasts, load, show, texts, widths

HOSTILE = '</script><img src="http://example.invalid/x" onerror="window.ran = 1"><b onclick="window.ran = 1">bold</b>'
SHOWN = ("accuracy", "difference", "survival", "held", "scorers")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Report:
    """A made-up run whose model, source and answers bear markup."""
    folder = tmp_path_factory.mktemp("run") / "made"
    write_run(folder, answer=HOSTILE, model=f"m{HOSTILE}", source="talks.jsonl", conversations=24)
    return opened(folder)


@pytest.fixture(scope="module")
def file(report, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(report, show_text=True), "utf-8")
    return path


@pytest.fixture
def seen(browser, file):
    """The page, freshly loaded on a wide screen in the light."""
    return load(browser, file)


def row(report: Report, policy: str, bucket: str, turn="all") -> dict:
    (found,) = (row for row in report.rows if (row["policy"], row["bucket"], row["turn"]) == (policy, bucket, turn))
    return found


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def signed(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "\u2212").replace("+0.0", "0.0")


def test_the_table_holds_every_cell_and_sorts_by_a_context_length_both_ways(seen, report) -> None:
    shares = [percent(row(report, policy, "1k-2k")["accuracy"]) for policy in ("full", "control", "h2o", "random")]
    assert column(seen, 1) == ["full", "control", "h2o", "random"]
    assert column(seen, 3) == shares
    click(seen, "#cells [data-column='1k-2k']")
    assert column(seen, 3) == sorted(shares, key=float)
    click(seen, "#cells [data-column='1k-2k']")
    assert column(seen, 3) == sorted(shares, key=float, reverse=True)


@pytest.mark.parametrize(
    ("shown", "read"),
    [
        ("difference", lambda one: signed(one["difference"])),
        ("survival", lambda one: percent(one["survival"])),
        ("held", lambda one: percent(one["held"])),
        ("scorers", lambda one: percent(one["accuracy_fuzzy"])),
    ],
)
def test_the_table_shows_what_is_asked_for_after_any_turn_or_one(seen, report, shown, read) -> None:
    click(seen, f"#shows [value={shown}]")
    for turn in ("all", 4):
        Select(seen.find_element(By.CSS_SELECTOR, "#view [name=turn]")).select_by_value(str(turn))
        assert column(seen, 4)[2:] == [read(row(report, policy, "2k-4k", turn)) for policy in ("h2o", "random")]


def test_a_verdict_is_told_by_a_sign_and_in_words(seen, report) -> None:
    signs = {"ok": "\u2713", "worse": "\u25bc", "inconclusive": "?"}
    for label, policy in (("h2o 30 %", "h2o"), ("random 30 %", "random")):
        button = seen.find_element(By.CSS_SELECTOR, f"[data-cell='{label}'] td:nth-child(3) button")
        one = row(report, policy, "1k-2k")
        assert signs[one["verdict"]] in button.text
        assert ("*" in button.text) == one["significant"]
        assert one["verdict"] in button.get_attribute("aria-label")
    assert row(report, "random", "1k-2k")["significant"]


def test_the_keyboard_opens_a_values_numbers_and_leads_to_what_it_lost(seen, report) -> None:
    one = row(report, "random", "2k-4k")
    seen.find_element(By.CSS_SELECTOR, "[data-cell='random 30 %'] td:nth-child(4) button").send_keys(Keys.ENTER)
    assert texts(seen, "#detail h2") == ["random 30 %, 2k-4k, all turns"]
    assert {str(one["n"]), str(one["lost"])} <= set(texts(seen, "#detail dd"))
    assert "p after Holm" in texts(seen, "#detail dt")
    seen.find_element(By.ID, "detail-lead").send_keys(Keys.ENTER)
    left = sum(max(0, row(report, "random", "2k-4k", turn)["lost"] - MOST) for turn in TURNS)
    found = texts(seen, "#found")[0]
    assert found.startswith(f"{one['lost'] - left} lost answers, and {left} more that the page leaves out")
    assert left > 0
    assert all("random 30 %, 2k-4k" in text for text in texts(seen, "#answers summary"))


def test_full_and_the_control_lead_to_no_lost_answers(seen) -> None:
    for label in ("full", "control"):
        click(seen, f"[data-cell='{label}'] td:nth-child(3) button")
        assert not seen.find_element(By.ID, "detail-lead").is_displayed()
        seen.find_element(By.ID, "detail-close").click()


def test_a_policy_and_a_context_length_can_be_left_out_everywhere(seen) -> None:
    click(seen, "#policies [value='h2o 30 %']")
    click(seen, "#buckets [value='2k-4k']")
    assert "h2o" not in column(seen, 1)
    assert "h2o 30 %" not in texts(seen, "#lines li")
    assert "2k-4k" not in texts(seen, "#cells thead th")
    assert texts(seen, "#panels figcaption") == ["by context length", "1k-2k"]
    click(seen, "#policies [value='h2o 30 %']")
    assert "h2o" in column(seen, 1)


def test_panels_are_drawn_by_context_length_and_by_turn(seen) -> None:
    for line, words, lines, floors in (("accuracy", "accuracy", 6, 3), ("survival", "fact held", 6, 0)):
        click(seen, f"#axes [value={line}]")
        labels = [drawing.get_attribute("aria-label") for drawing in seen.find_elements(By.CSS_SELECTOR, "#panels svg")]
        assert len(labels) == 1 + len(BUCKETS) and all(words in label for label in labels)
        assert len(seen.find_elements(By.CSS_SELECTOR, "#panels .line")) == lines
        assert len(seen.find_elements(By.CSS_SELECTOR, "#panels .chance")) == floors
    places = seen.execute_script("return [...document.querySelectorAll('#panels path')].map((one) => one.getAttribute('d') ?? '')")
    assert places and not any("NaN" in place or "undefined" in place for place in places)


def test_what_conversations_are_made_of_is_counted(seen, report) -> None:
    rows = [row.text.split() for row in seen.find_elements(By.CSS_SELECTOR, "#making tbody tr")]
    assert rows == [["1k-2k", "24", "24", "0", "0", "400"], ["2k-4k", "24", "0", "0", "24", "400"]]
    notes = texts(seen, "#notes li")
    assert report.as_dict()["buckets"][1]["note"] in notes
    assert any("Cohen's kappa of contains and fuzzy" in note for note in notes)


def test_a_lost_answer_opens_and_shows_both_answers_and_what_was_held(seen, report) -> None:
    choose(seen, policy="h2o 30 %", bucket="1k-2k", turn="6")
    found = lost(report, True)["queries"]
    first = next(one for one in found if (one["label"], one["bucket"], one["turn"]) == ("h2o 30 %", "1k-2k", 6))
    click(seen, "#answers summary")
    told = dict(zip(texts(seen, "#answers dt"), texts(seen, "#answers dd"), strict=True))
    assert told["question"] == "What was it, at turn 6?"
    assert told["full (right answer ranked 1)"] == told["h2o 30 % (right answer ranked 3)"] == HOSTILE
    assert told["accepted"].split(" \u00b7 ") == first["accepted"]
    assert told["of the fact held"] == f"{100 * first['survival']:.1f} %"
    assert told["tokens of context"] == "600"
    assert told["conversation"] == f"{first['conversation']} (whole)"


def test_texts_of_others_conversations_are_hidden_unless_asked_for(browser, report, tmp_path) -> None:
    (tmp_path / "hidden.html").write_text(page(report), "utf-8")
    seen = load(browser, tmp_path / "hidden.html")
    assert "--show-text" in seen.find_element(By.ID, "hidden").text
    click(seen, "#answers summary")
    names = texts(seen, "#answers dt")
    assert "accepted" in names and "question" not in names and not any("ranked" in name for name in names)
    assert "What was it" not in seen.page_source and "bold" not in seen.find_element(By.ID, "answers").text


def test_nothing_is_asked_of_a_network_and_nothing_complained_of(browser, file) -> None:
    asked_for(browser)
    seen = load(browser, file)
    click(seen, "#answers summary")
    assert asked_for(seen) == {file.as_uri()}
    assert seen.get_log("browser") == []


def test_markup_in_names_and_answers_is_shown_and_does_nothing(seen) -> None:
    click(seen, "#answers summary")
    assert HOSTILE in seen.find_element(By.TAG_NAME, "h1").text
    assert HOSTILE in texts(seen, "#answers dd")
    assert seen.find_elements(By.CSS_SELECTOR, "img, b") == []
    assert seen.execute_script("return window.ran") is None


def test_a_phone_needs_no_sideways_scrolling_but_in_the_tables(seen) -> None:
    show(seen, width=360)
    click(seen, "#answers summary")
    for shown in SHOWN:
        click(seen, f"#shows [value={shown}]")
        assert widths(seen) == [360, 360], shown
    click(seen, "#cells td button")
    assert seen.find_element(By.ID, "detail").rect["width"] <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(seen, scheme) -> None:
    show(seen, scheme=scheme)
    click(seen, "#answers summary")
    told = contrasts(seen)
    seen.execute_script("document.querySelector('td.value button').click()")
    told += contrasts(seen)
    assert len(told) > 200
    assert [each for each in told if each[1] < 4.5] == []


def test_a_server_s_run_shows_what_it_has_and_offers_nothing_else(browser, tmp_path) -> None:
    unseen = dict.fromkeys(("rank", "logprobs", "survival", "survival_told", "tally"))
    write_run(tmp_path / "run", unseen=unseen)
    (tmp_path / "page.html").write_text(page(opened(tmp_path / "run")), "utf-8")
    seen = load(browser, tmp_path / "page.html")
    offered = lambda name: [one.get_attribute("value") for one in seen.find_elements(By.CSS_SELECTOR, f"#{name} input")]  # noqa: E731
    assert (offered("shows"), offered("axes")) == (["accuracy", "difference", "scorers"], ["accuracy"])
    click(seen, "#answers summary")
    assert texts(seen, "#answers summary .quiet")[0].endswith("not known what is held")
    assert seen.get_log("browser") == []


def test_an_unfinished_run_says_so_and_shows_what_is_there(browser, tmp_path) -> None:
    write_run(tmp_path / "run", skip=4)
    (tmp_path / "page.html").write_text(page(opened(tmp_path / "run")), "utf-8")
    seen = load(browser, tmp_path / "page.html")
    assert "4 packs missing" in seen.find_element(By.ID, "unfinished").text
    assert "test instrument" in seen.find_element(By.ID, "unfinished").text
    assert len(texts(seen, "#panels figure")) == 1 + len(BUCKETS)
    assert seen.get_log("browser") == []
