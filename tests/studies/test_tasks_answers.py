"""Numbers are found in what models write."""

import pytest

from sinklab.lab.studies.benchmarks.two_stage import marked_answer, number_of, same_answer


@pytest.mark.parametrize(
    ("text", "answer", "published"),
    [
        ("Answer: 3 #### 18", "18", "18"),
        ("#### 18\n", "18", "18"),
        ("#### 1 and #### 2", "2", "1 and #### 2"),
        ("#### 18\nI hope this helps", "18", None),
        ("####18", "18", None),
        ("#### ", None, ""),
        ("no mark 18", None, None),
        ("", None, None),
    ],
)
def test_the_answer_behind_the_last_mark(text, answer, published):
    assert marked_answer(text) == answer
    assert marked_answer(text, published=True) == published


@pytest.mark.parametrize(
    ("one", "other", "same", "published"),
    [
        ("18", "18", True, True),
        ("18.0", "18", True, False),
        ("$1,080.00", "1080", True, False),
        ("$1,080", "1080", True, True),
        ("-5", "5", False, False),
        ("- 5", "-5", True, False),
        (".5", "0.50", True, False),
        ("18 eggs", "18", True, False),
        ("18.", "18", True, False),
        ("eggs", "18", False, False),
        ("eggs", "eggs", True, True),
    ],
)
def test_answers_are_compared_as_numbers_or_as_published(one, other, same, published):
    assert same_answer(one, other) is same
    assert same_answer(one, other, published=True) is published


def test_text_is_no_number():
    assert number_of("about 5") is None
