"""A retention run's page: that it needs nothing else, which lost answers it holds, and whose words it shows."""

import re

import pytest

from evalkit.retention import facts
from evalkit.retention.page import MOST, lost, page
from evalkit.retention.report import Report, opened
from tests.recalled import SAYS, TURNS, write_run
from tests.test_html import Elements, data_in


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Report:
    folder = tmp_path_factory.mktemp("run") / "made"
    write_run(folder, conversations=24)
    return opened(folder)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Report:
    """A run on somebody's conversations."""
    folder = tmp_path_factory.mktemp("run") / "others"
    write_run(folder, source="talks.jsonl")
    return opened(folder)


def test_the_page_asks_for_no_other_file_and_says_which_scripts_may_run(report) -> None:
    text = page(report)
    elements = Elements(text)
    addresses = [
        value for _, attributes in elements.found for name, value in attributes.items() if name in ("src", "href", "action")
    ]
    assert {address[0] for address in addresses if address != "data:,"} == {"#"}
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|import\(", text)
    assert any("default-src 'none'" in (meta.get("content") or "") for meta in elements.all("meta"))


def test_the_page_holds_the_report_as_it_is_and_is_the_same_again(report) -> None:
    assert data_in(page(report))["report"] == report.as_dict()
    assert page(report) == page(report)


def test_lost_answers_are_as_many_as_the_report_counts(report) -> None:
    found = lost(report, texts=True)
    for row in (row for row in report.rows if row["policy"] in ("h2o", "random") and row["turn"] in TURNS):
        at = {"label": f"{row['policy']} 30 %", "bucket": row["bucket"], "turn": row["turn"]}
        shown, left = (
            [one for one in found[name] if all(one[what] == value for what, value in at.items())]
            for name in ("queries", "left_out")
        )
        assert len(shown) == min(MOST, row["lost"])
        assert sum(one["count"] for one in left) == row["lost"] - len(shown)
    assert found["left_out"] and found["most"] == MOST


def test_a_lost_answer_has_what_is_accepted_and_what_was_held(report) -> None:
    known = {fact.id: list(fact.answers) for fact in facts.load()}
    for one in lost(report, texts=True)["queries"]:
        assert one["accepted"] == known[one["fact"]]
        assert (one["full_rank"], one["rank"], one["context_tokens"]) == (1, 3, 100 * one["turn"])
        assert 0 < one["survival"] < 1
    assert {one["label"] for one in lost(report, texts=True)["queries"]} == {"h2o 30 %", "random 30 %"}


def test_questions_and_answers_of_ones_own_conversations_are_shown(report) -> None:
    assert SAYS in page(report) and "What was it" in page(report)


def test_those_of_others_conversations_are_hidden_unless_asked_for(others) -> None:
    assert SAYS not in page(others) and "What was it" not in page(others)
    assert data_in(page(others))["lost"]["queries"]
    assert SAYS in page(others, show_text=True) and "What was it" in page(others, show_text=True)
