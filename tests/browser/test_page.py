"""A sweep's page in a real browser: it sorts, filters, opens documents, fits a phone, can be read in the dark, runs nothing it shows."""

import copy
from pathlib import Path

import pytest

from evalkit.html import page
from evalkit.report import report
from evalkit.runs import Run
from tests import fakes

pytest.importorskip("selenium", reason="the page's tests drive Chromium with selenium, which is not installed")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from tests.browser.screen import asked_for, choose, click, column, contrasts, load, show, texts, widths

HOSTILE = '</script><img src="http://example.invalid/x" onerror="window.ran = 1"><b onclick="window.ran = 1">bold</b>'
POLICIES = ("full", "h2o", "random", f"kivi({HOSTILE})")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A made-up run under both protocols, whose documents and a policy's name hold markup."""
    folder = tmp_path_factory.mktemp("run")
    asked = fakes.question
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fakes, "question", lambda task, doc_id: {**asked(task, doc_id), "contexts": [f"{task} {doc_id} {HOSTILE}"] * 4}
        )
        fakes.write_run(folder, policies=POLICIES, protocols=("prompt", "stream"), worse=1)
    return Run.load(folder)


@pytest.fixture(scope="module")
def made(run) -> dict:
    return report(run).as_dict() | {"title": f"A run {HOSTILE}"}


@pytest.fixture(scope="module")
def file(run, made, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(run, made), "utf-8")
    return path


@pytest.fixture
def opened(browser, file):
    """The page, freshly loaded on a wide screen in the light."""
    return load(browser, file)


@pytest.fixture
def other(browser, run, made, tmp_path):
    """Another page, of the report as a function has changed it."""

    def opener(change=lambda report: None, documents: bool = True):
        changed = copy.deepcopy(made)
        change(changed)
        (tmp_path / "other.html").write_text(page(run, changed, documents), "utf-8")
        return load(browser, tmp_path / "other.html")

    return opener


def open_all(browser) -> None:
    """Open what can be opened: the first documents, and every list."""
    browser.execute_script("for (const one of [...document.querySelectorAll('details')].slice(0, 3)) one.open = true;")
    assert browser.find_elements(By.CSS_SELECTOR, "#answers .choices")


def test_the_table_holds_every_cell_and_sorts_by_a_column_both_ways(opened, made) -> None:
    accuracies = [f"{100 * cell['mean']['accuracy']:.1f}" for cell in made["groups"][0]["cells"]]
    assert column(opened, 3) == accuracies
    click(opened, "#cells [data-column=mean]")
    assert column(opened, 3) == sorted(accuracies, key=float)
    click(opened, "#cells [data-column=mean]")
    assert column(opened, 3) == sorted(accuracies, key=float, reverse=True)
    head = opened.find_element(By.CSS_SELECTOR, "#cells [aria-sort]")
    assert (head.get_attribute("aria-sort"), head.text) == ("descending", "mean")


def test_budgets_sort_by_size_and_policies_by_name(opened) -> None:
    click(opened, "#cells [data-column=Budget]")
    assert column(opened, 2) == ["2%"] * 3 + ["10%"] * 3 + ["50%"] * 3 + ["100%"] * 4
    click(opened, "#cells [data-column=Policy]")
    assert column(opened, 1)[0] == "full"
    assert column(opened, 1)[-1] == "random"


def test_a_policy_and_a_task_can_be_left_out_everywhere(opened) -> None:
    click(opened, "#policies [value=random]")
    click(opened, "#tasks [value=boolq]")
    assert "random" not in column(opened, 1)
    assert "random" not in texts(opened, "#knees-table tbody th")
    assert "random" not in texts(opened, "#lines li")
    assert "boolq" not in texts(opened, "#cells thead th")
    assert texts(opened, "#panels figcaption") == ["mean", "piqa", "hellaswag"]
    click(opened, "#policies [value=random]")
    assert "random" in column(opened, 1)


def test_the_other_protocol_is_chosen_by_name(opened, made) -> None:
    Select(opened.find_element(By.CSS_SELECTOR, "#filters [name=protocol]")).select_by_value("stream")
    assert column(opened, 3) == [f"{100 * cell['mean']['accuracy']:.1f}" for cell in made["groups"][1]["cells"]]
    assert not opened.find_element(By.ID, "models").is_displayed()


@pytest.mark.parametrize(
    ("shown", "read"),
    [
        ("acc_norm", lambda cell: f"{100 * cell['tasks']['piqa']['acc_norm']:.1f}"),
        ("held", lambda cell: f"{100 * cell['tasks']['piqa']['held']:.1f}"),
        ("read", lambda cell: f"{100 * cell['tasks']['piqa']['read']:.1f}"),
        (
            "difference",
            lambda cell: f"{100 * cell['tasks']['piqa']['difference']:+.1f}".replace("-", "\u2212").replace("+0.0", "0.0"),
        ),
    ],
)
def test_the_table_shows_what_is_asked_for(opened, made, shown, read) -> None:
    click(opened, f"#shows [value={shown}]")
    assert column(opened, 4)[1:] == [read(cell) for cell in made["groups"][0]["cells"][1:]]


def test_a_verdict_is_told_by_a_sign_and_in_words_not_by_colour_alone(opened, made) -> None:
    signs = {"ok": "\u2713", "worse": "\u25bc", "inconclusive": "?"}
    cells = made["groups"][0]["cells"][1:]
    buttons = opened.find_elements(By.CSS_SELECTOR, "#cells tbody tr:not(.full) td:nth-child(4) button")
    for cell, button in zip(cells, buttons, strict=True):
        entry = cell["tasks"]["piqa"]
        assert signs[entry["verdict"]] in button.text
        assert ("*" in button.text) == entry["significant"]
        assert entry["verdict"] in button.get_attribute("aria-label")
    assert len({cell["tasks"]["piqa"]["verdict"] for cell in cells}) > 1


def test_the_keyboard_opens_a_values_numbers_and_leads_to_its_documents(opened, made) -> None:
    cell = made["groups"][0]["cells"][1]
    button = opened.find_element(By.CSS_SELECTOR, f'[data-cell="{cell["label"]}"] td:nth-child(4) button')
    button.send_keys(Keys.ENTER)
    dialog = opened.find_element(By.ID, "detail")
    assert dialog.is_displayed()
    assert texts(opened, "#detail h2") == [f"{cell['label']}, piqa"]
    assert f"{cell['tasks']['piqa']['lost']}" in texts(opened, "#detail dd")
    opened.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not dialog.is_displayed()
    button.send_keys(Keys.ENTER)
    opened.find_element(By.ID, "detail-lead").send_keys(Keys.ENTER)
    flipped = cell["tasks"]["piqa"]["lost"] + cell["tasks"]["piqa"]["gained"]
    assert texts(opened, "#found")[0].startswith(f"{flipped} flipped")
    assert all(f"{cell['label']}, piqa" in text for text in texts(opened, "#answers summary"))


def test_a_flipped_document_opens_and_shows_both_log_likelihoods(opened, run, made) -> None:
    full, cell = made["groups"][0]["cells"][:2]
    choose(opened, policy=cell["policy"], budget=cell["budget"], task="hellaswag", kind="lost")
    assert len(texts(opened, "#answers summary")) == cell["tasks"]["hellaswag"]["lost"]
    click(opened, "#answers summary")
    name = texts(opened, "#answers summary span:nth-child(2)")[0]
    doc_id = int(name.rpartition(" ")[2])
    shown = [[number.split("\n")[0] for number in texts(opened, f"#answers .choices td:nth-child({place})")] for place in (2, 3)]
    expected = [
        [f"{value:.2f}".replace("-", "\u2212") for value in run.answers[key, "hellaswag"].logprobs[doc_id]]
        for key in (full["key"], cell["key"])
    ]
    assert shown == expected
    assert texts(opened, "#answers pre") == [f"hellaswag {doc_id} {HOSTILE}"]
    rows = texts(opened, "#answers .choices tbody tr")
    assert [index for index, row in enumerate(rows) if "right answer" in row] == [doc_id % 4]
    assert sum("picked" in row for row in rows) == 2


def test_more_documents_come_when_asked_for(opened) -> None:
    assert len(texts(opened, "#answers details")) == 20
    click(opened, "#more")
    assert len(texts(opened, "#answers details")) == 40


def test_curves_are_drawn_for_the_mean_and_every_task_against_each_axis(opened) -> None:
    for axis, words in (("budget", "budget"), ("held", "bytes held"), ("read", "entries read")):
        click(opened, f"#axes [value={axis}]")
        labels = [drawing.get_attribute("aria-label") for drawing in opened.find_elements(By.CSS_SELECTOR, "#panels svg")]
        assert [label.split(":")[0] for label in labels] == ["mean", "piqa", "hellaswag", "boolq"]
        assert all(words in label for label in labels)
        assert len(opened.find_elements(By.CSS_SELECTOR, "#panels svg .line")) == 4 * 3
    places = opened.execute_script(
        "return [...document.querySelectorAll('#panels path, #front-panels path')].map((one) => one.getAttribute('d') ?? '')"
    )
    assert not any("NaN" in place or "undefined" in place for place in places)


def test_a_run_with_more_to_say_says_it(other) -> None:
    def change(report: dict) -> None:
        report.update(reference={"source": "A study, table 2", "rows": []}, incomplete=["smol/prompt/copa/0000"])
        group = report["groups"][0]
        group["noise"] = {"flips": 3, "n": 288, "furthest": 0.25}
        group["pareto"]["seconds"] = [group["cells"][1]["key"]]
        group["cells"][1]["floor"] = True
        group["cells"][1]["tasks"]["piqa"].update(reference=0.785, acted=0.1)
        for cell in group["cells"]:
            cell["seconds"] = 12.5

    browser = other(change)
    assert "1 pack missing" in browser.find_element(By.ID, "unfinished").text
    assert "A study, table 2" in browser.find_element(By.ID, "published").text
    assert "flips 3 of 288 answers" in browser.find_element(By.ID, "noise").text
    assert texts(browser, "#front-panels figcaption") == ["Bytes held", "Entries read", "Seconds"]
    assert column(browser, 1)[1] == "h2o\u2021"
    assert len(browser.find_elements(By.CSS_SELECTOR, "#cells td.greyed")) == 1
    assert len(browser.find_elements(By.CSS_SELECTOR, "#panels .mark.hollow")) == 1
    click(browser, "#cells td.greyed button")
    assert "78.5 %" in texts(browser, "#detail dd")
    assert browser.get_log("browser") == []


def test_budgets_in_tokens_have_an_axis_of_their_own(other) -> None:
    def change(report: dict) -> None:
        for cell in report["groups"][0]["cells"][1:]:
            cell.update(share=None, budget=cell["budget"].replace("%", "0"))

    browser = other(change)
    labels = [drawing.get_attribute("aria-label") for drawing in browser.find_elements(By.CSS_SELECTOR, "#panels svg")]
    assert all("budget, tokens" in label for label in labels)
    assert "1000" in texts(browser, "#panels svg text")


def test_a_ring_marks_the_smallest_budget_that_is_ok(other) -> None:
    def change(report: dict) -> None:
        knees = report["groups"][0]["knees"]
        for knee in knees:
            knee.update(budget=None, note="none of those measured; not counted: 2%")
        knees[0].update(budget="10%", note="a larger one is not")

    browser = other(change)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#panels .ring")) == 1
    assert texts(browser, "#knees-table .ok") == ["10%\na larger one is not"]
    assert set(texts(browser, "#knees-table .none")) == {"none measured\nnot counted: 2%"}


def test_a_page_without_documents_says_so(other) -> None:
    browser = other(documents=False)
    assert texts(browser, "#found") == ["This page was made without documents."]
    assert not browser.find_element(By.ID, "choose").is_displayed()
    assert browser.get_log("browser") == []


def test_nothing_is_asked_of_a_network_and_nothing_complained_of(browser, file) -> None:
    asked_for(browser)
    opened = load(browser, file)
    open_all(opened)
    assert asked_for(opened) == {file.as_uri()}
    assert opened.get_log("browser") == []


def test_markup_in_titles_names_and_documents_is_shown_and_does_nothing(opened) -> None:
    open_all(opened)
    assert HOSTILE in opened.find_element(By.TAG_NAME, "h1").text
    assert HOSTILE in opened.find_element(By.CSS_SELECTOR, "#answers pre").text
    assert any(HOSTILE in text for text in column(opened, 1))
    assert opened.find_elements(By.CSS_SELECTOR, "img, b") == []
    assert opened.execute_script("return window.ran") is None


def test_a_phone_needs_no_sideways_scrolling_but_in_the_tables(opened) -> None:
    show(opened, width=360)
    open_all(opened)
    for shown in ("accuracy", "acc_norm", "difference", "held", "read"):
        click(opened, f"#shows [value={shown}]")
        assert widths(opened) == [360, 360], shown
    boxes = opened.execute_script("const box = document.getElementById('cells'); return [box.clientWidth, box.scrollWidth]")
    assert boxes[0] <= 360 < boxes[1]
    click(opened, "#cells td button")
    assert opened.find_element(By.ID, "detail").rect["width"] <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(opened, scheme) -> None:
    show(opened, scheme=scheme)
    open_all(opened)
    seen = contrasts(opened)
    opened.execute_script("document.querySelector('td.value button').click()")
    seen += contrasts(opened)
    assert len(seen) > 300
    assert [each for each in seen if each[1] < 4.5] == []


def test_the_dark_has_a_dark_ground(opened) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = opened.execute_script(ground)
    show(opened, scheme="dark")
    assert (light, opened.execute_script(ground)) == ("rgb(255, 255, 255)", "rgb(20, 22, 26)")


def test_on_paper_there_are_no_controls_and_the_ground_is_white_even_in_the_dark(opened) -> None:
    show(opened, width=720, scheme="dark", media="print")
    assert opened.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not any(form.is_displayed() for form in opened.find_elements(By.CSS_SELECTOR, "form, nav"))
    width, needed = opened.execute_script("const page = document.documentElement; return [page.clientWidth, page.scrollWidth]")
    assert needed == width
