"""The twin of speed: old and new by turns, and one file of results."""

from pathlib import Path

import pytest

from launched import ROOT, script

by_turns = script("benchmarks/by_turns")


@pytest.fixture
def turns(monkeypatch):
    """The turns that are taken, each of which costs what its tree costs."""
    taken = []

    def one_turn(name, tree, is_before, folder):
        taken.append((name, tree.name, is_before))
        seconds = {"old": 2.0, "new": 3.0}[tree.name] * len(taken)
        return {name: [seconds, 1.0], f"{name} again": [1.0, 1.0]}

    monkeypatch.setattr(by_turns, "one_turn", one_turn)
    return taken


def test_old_and_new_take_turns_and_a_ratio_is_that_of_medians(turns, capsys):
    found = by_turns.by_turns("decoding", (Path("old"), Path("new")), 3)
    assert [tree for _, tree, _ in turns] == ["old", "new", "new", "old", "old", "new"]
    assert [is_before for *_, is_before in turns] == [tree == "old" for _, tree, _ in turns]
    assert found["decoding"]["old_s"] == [2.0, 8.0, 10.0]
    assert found["decoding"]["ratio"] == 9 / 8
    assert found["decoding"]["range"] == [9 / 8, 3.0]
    assert found["decoding again"]["ratio"] == 1.0
    assert "decoding: 1.125 [1.125, 3.0]" in capsys.readouterr().out


@pytest.mark.slow
def test_a_case_is_a_process_with_the_code_of_its_tree(monkeypatch, tmp_path):
    shown = "import sinklab; raise SystemExit(sinklab.__file__)"
    monkeypatch.setitem(by_turns.WHOLE, "help", ("-c", shown))
    found = by_turns.one_turn("import", ROOT, False, tmp_path)
    assert all(seconds > 0 for seconds in found["import"])
    with pytest.raises(SystemExit, match=rf"(?s)help failed in .*{ROOT}/src/sinklab/__init__"):
        by_turns.one_turn("help", ROOT, True, tmp_path)
