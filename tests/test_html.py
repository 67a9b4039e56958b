"""The page: that it needs nothing else, that data in it stays data, and which flipped documents it holds."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from evalkit import html
from evalkit.report import report
from evalkit.runs import Run
from tests import fakes

HOSTILE = '</script><script>window.ran = 1</script><img src="x" onerror="window.ran = 1"> {{data}}'


class Elements(HTMLParser):
    """What a browser would find in a page: elements with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.found.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    fakes.write_run(folder, worse=1.5)
    return Run.load(folder)


@pytest.fixture(scope="module")
def made(loaded) -> dict:
    return report(loaded).as_dict()


@pytest.fixture(scope="module")
def flips(loaded, made) -> dict:
    return html.flips(loaded, made)


def run_of(folder: Path, monkeypatch, documents: int = 12, **changed) -> Run:
    """A small run whose documents ask what `changed` says."""
    asked = fakes.question
    monkeypatch.setattr(fakes, "question", lambda task, doc_id: asked(task, doc_id) | changed)
    fakes.write_run(folder, documents=documents, worse=2)
    return Run.load(folder)


def data_in(text: str) -> dict:
    """The JSON that a page holds."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_asks_for_no_other_file(loaded, made) -> None:
    page = html.page(loaded, made)
    elements = Elements(page)
    addresses = [
        value for _, attributes in elements.found for name, value in attributes.items() if name in ("src", "href", "action")
    ]
    assert {address[0] for address in addresses if address != "data:,"} == {"#"}
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|import\(", page)


def test_a_browser_runs_the_pages_own_script_and_no_other(loaded, made) -> None:
    page = html.page(loaded, made)
    (policy,) = (meta["content"] for meta in Elements(page).all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    style, script = (re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1] for tag in ("style", "script"))
    names = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    assert policy == f"default-src 'none'; img-src data:; style-src 'sha256-{names[0]}'; script-src 'sha256-{names[1]}'"


@pytest.mark.parametrize("name", ["page.js", "sweep.js", "retention.js"])
def test_the_scripts_make_no_markup_of_data(name) -> None:
    script = (html.PARTS / name).read_text("utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script)


def test_whatever_documents_titles_and_names_say_stays_data(tmp_path, monkeypatch) -> None:
    run = run_of(tmp_path, monkeypatch, contexts=[HOSTILE] * 4, choices=[HOSTILE] * 4)
    made = report(run).as_dict() | {"title": HOSTILE}
    page = html.page(run, made)
    elements = Elements(page)
    assert len(elements.all("script")) == 2
    assert elements.all("img") == []
    assert data_in(page)["report"]["title"] == HOSTILE
    (text, *_) = data_in(page)["flips"]["texts"]["piqa"].values()
    assert text["prompts"] == [HOSTILE]


def test_the_same_run_gives_the_same_page(loaded, made) -> None:
    assert html.page(loaded, made) == html.page(loaded, report(loaded).as_dict())


def test_what_is_no_number_is_null() -> None:
    assert json.loads(html.embedded({"a": [float("-inf"), float("nan"), 1.5]})) == {"a": [None, None, 1.5]}


def test_the_page_holds_the_report_as_it_is(loaded, made) -> None:
    assert data_in(html.page(loaded, made))["report"] == made


def test_flips_are_as_many_as_the_report_counts(made, flips) -> None:
    for cell in made["groups"][0]["cells"][1:]:
        for task, entry in cell["tasks"].items():
            shown = [flip["kind"] for flip in flips["flips"] if (flip["cell"], flip["task"]) == (cell["key"], task)]
            rest = [one for one in flips["left_out"] if (one["cell"], one["task"]) == (cell["key"], task)]
            assert len(shown) <= html.MOST
            for kind in ("lost", "gained"):
                assert shown.count(kind) + sum(one[kind] for one in rest) == entry[kind]


def test_some_cells_have_more_flips_than_the_page_holds(flips) -> None:
    assert flips["left_out"]
    assert all(one["lost"] + one["gained"] > 0 for one in flips["left_out"])


def test_a_flip_shows_the_log_likelihoods_of_its_document_under_both(loaded, made, flips) -> None:
    full = made["groups"][0]["cells"][0]["key"]
    for flip in flips["flips"][::37]:
        for key, side in ((full, "full"), (flip["cell"], "other")):
            answers = loaded.answers[key, flip["task"]]
            (place,) = np.flatnonzero(answers.doc_ids == flip["document"])
            assert flip[side] == pytest.approx(answers.logprobs[place].tolist(), abs=6e-4)
        right = flips["texts"][flip["task"]][flip["document"]]["gold"]
        assert (int(np.argmax(flip["full"])) == right) == (flip["kind"] == "lost")


def test_only_flipped_documents_are_told(flips) -> None:
    told = {(task, doc_id) for task, texts in flips["texts"].items() for doc_id in texts}
    assert told == {(flip["task"], flip["document"]) for flip in flips["flips"]}


def test_a_page_without_documents_holds_no_text_of_theirs(loaded, made) -> None:
    page = html.page(loaded, made, documents=False)
    assert data_in(page)["flips"] is None
    assert "of piqa" not in page


def test_prompts_that_differ_by_choice_are_all_kept(tmp_path, monkeypatch) -> None:
    run = run_of(tmp_path, monkeypatch, contexts=["Sarah was", "Maria was", "Ann was", "Eve was"])
    texts = html.flips(run, report(run).as_dict())["texts"]["hellaswag"]
    assert all(text["prompts"] == ["Sarah was", "Maria was", "Ann was", "Eve was"] for text in texts.values())


def test_of_a_long_prompt_the_end_is_kept_and_the_rest_counted(tmp_path, monkeypatch) -> None:
    run = run_of(tmp_path, monkeypatch, contexts=["x" * 5000 + "the end"] * 4)
    (text, *_) = html.flips(run, report(run).as_dict())["texts"]["piqa"].values()
    (prompt,) = text["prompts"]
    assert prompt.startswith(f"[{5007 - html.LONGEST} characters left out] xxx")
    assert prompt.endswith("the end")


def test_a_run_that_is_not_finished_has_a_page_of_its_whole_tasks(tmp_path) -> None:
    fakes.write_run(tmp_path, skip=1)
    run = Run.load(tmp_path)
    data = data_in(html.page(run, report(run).as_dict()))
    assert len(data["report"]["incomplete"]) == 1
    assert {flip["task"] for flip in data["flips"]["flips"]} == {"piqa", "hellaswag"}
