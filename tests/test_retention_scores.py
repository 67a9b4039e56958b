"""What counts as a right answer: text made alike, the three scorers, and facts that no conversation gives away."""

import pytest

from evalkit.errors import UsageError
from evalkit.retention.facts import load
from evalkit.retention.scores import contains, judged, nearly, normalised, rank, similarity


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The  Velvet-Turnips!", "velvet turnips"),
        ("It's a crème brûlée", "its creme brulee"),
        ("twenty-one, thirty and seven", "21 30 and 7"),
        ("one hundred", "1 hundred"),
        ("1,200 and 07:30", "1200 and 07 30"),
        ("fifty fifty", "50 50"),
        ("in Tampere\u2014in May", "in tampere in may"),
        ("your great\u2011aunt, Kumasi\u2013yes", "your great aunt kumasi yes"),
        ("rock\u2019n\u2019roll, co\u00adop\u200b", "rocknroll coop"),
        ("\u0414\u043e\u043c\u20142", "\u0434\u043e\u043c 2"),
        ("", ""),
    ],
)
def test_texts_are_made_alike(text, plain):
    assert normalised(text) == plain


def test_an_answer_counts_where_it_stands_as_words_of_its_own():
    assert contains("You said it was the Blue Door, I think.", ["blue door"])
    assert contains("Room seven", ["9", "7"])
    assert not contains("You said bluedoor", ["blue door"])
    assert not contains("It was 4521", ["452"])
    assert not contains("", ["blue"])


def test_a_misspelt_answer_is_near_and_a_part_of_one_is_not():
    assert similarity("You called it Bartlebey.", ["Bartleby"]) > 85
    assert similarity("B", ["Bartleby"]) < 50
    assert similarity("nothing of the kind", ["Bartleby"]) < 60
    assert similarity("Bartleby", ["Mortimer", "bartleby"]) == 100


@pytest.mark.parametrize("fact", load(), ids=lambda fact: fact.id)
def test_what_else_it_might_have_been_is_no_misspelling(fact):
    near = lambda text: judged(text, fact.answers, fact.distractors, 85.0)["fuzzy"]  # noqa: E731
    said = ("{}", "It is {}.", "You told me: {}, I think.")
    assert all(near(how.format(answer)) for answer in fact.answers for how in said)
    assert not any(near(how.format(other)) for other in fact.distractors for how in said)


def test_the_figures_of_a_nearly_right_answer_are_right():
    assert nearly("It was the fourtenth of Februry, 14", ["14 of February"], ["3 of March"], 70.0)
    assert not nearly("It was the 13 of February", ["14 of February"], ["3 of March"], 70.0)
    assert nearly("You called it Bartlebey.", ["Bartleby"], ["Mortimer"], 85.0)
    assert not nearly("You called it Bartlebey.", ["Bartleby"], ["Bartlebee"], 85.0)


def test_the_rank_counts_those_that_are_as_likely():
    assert rank([-1.0, -2.0, -3.0]) == 1
    assert rank([-2.0, -1.0, -3.0]) == 2
    assert rank([-2.0, -2.0, -1.0]) == 3
    assert rank([-2.0]) == 1


def test_a_fact_collides_with_a_text_that_holds_an_answer_or_a_distractor():
    fact = load()[1]
    assert fact.collides(normalised(f"My cat is called {fact.answers[0].upper()}?"))
    assert fact.collides(normalised(f"{fact.distractors[0]}, of course"))
    assert not fact.collides(normalised("My cat is called Tom."))


def test_what_is_told_is_the_spelling_in_the_statement():
    assert all(fact.told.lower() in fact.statement.lower() for fact in load())


def test_a_line_that_is_no_fact_is_named(tmp_path):
    file = tmp_path / "facts.jsonl"
    file.write_text('{"id": "a"}\n')
    with pytest.raises(UsageError, match=r"facts.jsonl, line 1: no fact: give a JSON object with id, kind"):
        load(file)
