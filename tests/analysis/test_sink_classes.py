import numpy as np
import pytest

from refusals import refused
from sinklab.lab.analysis import (
    AGES,
    CLASSES,
    STATES,
    characters,
    token_ages,
    token_class,
    token_classes,
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("\n", "newline"),
        ("Ċ", "newline"),
        (" ", "whitespace"),
        ("Ġ", "whitespace"),
        ("▁▁", "whitespace"),
        (",", "punctuation"),
        (".\n", "punctuation"),
        ("Ġ(", "punctuation"),
        ("$", "punctuation"),
        ("7", "digits"),
        (" 3.14", "digits"),
        ("the", "words"),
        ("x1", "words"),
        ("don't", "words"),
        ("हिंदी", "words"),
        ("\ufffd", "words"),
        (" <0xE2><0x80>", "words"),
        ("<0x41>", "words"),
        ("", "special"),
    ],
)
def test_classes_of_text(text, name):
    assert token_class(text) == name in CLASSES
    # Inside the chat format the same text belongs to the format.
    assert token_class(text, template=True) == "template"


@pytest.mark.parametrize(
    ("text", "role", "name", "in_template"),
    [
        ("<|mdm_mask|>", "mask", "mask", "mask"),
        ("<|startoftext|>", "bos", "bos", "bos"),
        ("<|endoftext|>", "eos", "eos", "eos"),
        ("<|eot_id|>", "eot", "eos", "eos"),
        ("<pad>", "pad", "special", "template"),
        ("<|start_header_id|>", "template", "template", "template"),
        ("[gMASK]", "other", "special", "template"),
        ("", "image", "image", "image"),
        ("<sink>", "sink", "sink", "sink"),
    ],
)
def test_classes_of_special_tokens(text, role, name, in_template):
    assert token_class(text, role) == name and token_class(text, role, True) == in_template
    refused(r"'\[MASK\]'.* but is 'masked'", token_class, "[MASK]", "masked")


def test_classes_of_arrays():
    texts = np.array(
        [["the", None, ",", "assistant"], ["<s>", "the", "[MASK]", "\n"]], dtype=object
    )
    roles = np.array([["", "", "", ""], ["bos", "", "mask", ""]], dtype=object)
    flags = np.array([False, False, False, True])
    assert token_classes(texts, roles, flags).tolist() == [
        ["words", None, "punctuation", "template"],
        ["bos", "words", "mask", "template"],
    ]
    assert token_classes(["a", " "]).tolist() == ["words", "whitespace"]


def test_ages_follow_the_states():
    assert STATES == ("masked", "committed", "prompt")
    # Prompt, a position committed before step 1, one committed before step 2, one that is masked to
    # the end.
    states = np.array([[2, 0, 0, 0], [2, 1, 0, 0], [2, 1, 1, 0]])
    ages = token_ages(states)
    assert ages.tolist() == [
        ["prompt", "masked", "masked", "masked"],
        ["prompt", "just committed", "masked", "masked"],
        ["prompt", "committed", "just committed", "masked"],
    ]
    assert {age for row in ages for age in row} == set(AGES)
    assert token_ages(np.stack([states, states]))[1].tolist() == ages.tolist()


def test_ages_of_a_growing_sequence():
    # The decoder appends: a new token was not there before. The first step knows of nothing before
    # it.
    ages = token_ages([[2, 1, -1, -1], [2, 1, 1, -1], [2, 1, 1, 1]])
    assert ages[0].tolist() == ["prompt", "committed", None, None]
    assert ages[1].tolist() == ["prompt", "committed", "just committed", None]
    assert ages[2].tolist() == ["prompt", "committed", "committed", "just committed"]
    refused(r"codes \[0, 3\]", token_ages, [[0, 3]])
    refused(r"got shape \(2,\)", token_ages, [0, 1])


@pytest.mark.parametrize(
    ("texts", "read"),
    [
        (["na", "<0xC3>", "<0xAF>", "ve"], ["na", "ï", "◌", "ve"]),
        ([" <0xE2><0x80>", "<0x9C>", "q"], [" “", "◌", "q"]),
        (["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"] * 2, ["😀", "◌", "◌", "◌"] * 2),
        # what is not whole stays: at the end, before a mask, in old run folders
        (["a", "<0xC3>"], ["a", "<0xC3>"]),
        (["<0xC3>", "<|mask|>", "<0xAF>"], ["<0xC3>", "<|mask|>", "<0xAF>"]),
        (["<0x9F>", "<0xC3>", "<0xAF>"], ["<0x9F>", "ï", "◌"]),
        (["\ufffd", "\ufffd", ""], ["\ufffd", "\ufffd", ""]),
        # the text of a program, and no byte of a character
        (["<0x41>", "b", "\ud800", "<0xC3>"], ["<0x41>", "b", "\ud800", "<0xC3>"]),
    ],
)
def test_bytes_of_neighbours_are_read_as_characters(texts, read):
    assert characters(texts) == read
