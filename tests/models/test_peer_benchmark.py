"""Peers beside ours: pairs, folders, environments and result files, with a peer made here."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import sinklab
from sinklab.lab.checkpoints import load

pytestmark = pytest.mark.ring("extras")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# What another project would have: a loop without a cache, on the whole text at every step.
LOOP = """
import torch

def write(model, prompt, new, block, mask_id):
    ids_BS, length = torch.tensor([prompt + [mask_id] * new]), len(prompt)
    for start in range(length, length + new, block):
        for _ in range(block):
            logits_CV = model(ids_BS[:, : start + block]).logits[0, start:]
            probability_C, token_C = logits_CV.softmax(-1).max(-1)
            probability_C[ids_BS[0, start : start + block] != mask_id] = -1
            place = int(probability_C.argmax())
            ids_BS[0, start + place] = token_C[place]
    return ids_BS[0, length:].tolist()
"""
DRIVER = """
import sys
from sinklab.lab.checkpoints import load

def prepare(settings):
    sys.path.insert(0, settings["source"])
    from otherlab.loop import write
    ids = {"mask_token_id": settings["mask_id"], "block_length": settings["block"]}
    model = load(settings["checkpoint"], **ids).model
    new, block = settings["new_tokens"], settings["block"]
    print("what a peer prints is no answer")
    return lambda: (write(model, settings["prompt"], new, block, settings["mask_id"]), new)

def version(settings):
    return "otherlab 1"
"""


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import peers

    return peers


def environment(folder, line):
    """An interpreter where the environment of this folder has one."""
    python = folder.with_name(f"{folder.name}-environment") / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{line}\n")
    python.chmod(0o755)


def otherlab(peers, root, **changes):
    """A peer with a folder, an environment and a driver."""
    package = root / "source" / "otherlab"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "loop.py").write_text(LOOP)
    (root / "driver.py").write_text(DRIVER)
    environment(
        root / "source",
        f'PYTHONPATH={Path(sinklab.__file__).parents[1]} exec {sys.executable} "$@"',
    )
    return replace(
        peers.PEERS[1],
        name="otherlab",
        driver=root / "driver.py",
        cells=((4, 1, "committed"),),
        aim=0.0,
        **changes,
    )


@pytest.mark.slow
def test_a_peer_runs_beside_ours_and_one_that_does_not_is_left_out_by_name(
    peers, tmp_path, monkeypatch, python
):
    monkeypatch.setattr(sys, "executable", python)
    peer = otherlab(peers, tmp_path)
    broken = replace(peer, name="broken")
    (tmp_path / "broken").mkdir()
    environment(tmp_path / "broken", "echo no such kernel >&2; exit 1")
    sources = {
        "otherlab": tmp_path / "source",
        "broken": tmp_path / "broken",
        "away": tmp_path / "nowhere",
    }
    sizes = replace(peers.QUICK, new_tokens=8, prompts=(12,))
    results, left_out = peers.measured(
        (peer, broken, replace(peer, name="away")), sources, sizes, pairs=2
    )
    assert left_out.keys() == {"broken", "away"}
    assert "no such kernel" in left_out["broken"] and peer.repository in left_out["away"]
    ((name, cell),) = results["otherlab"]["cells"].items()
    assert name == "P12 block 4, 1 a step" and cell["pairs"] == 2
    assert cell["positions_that_differ"] == 0 and cell["met"]
    assert cell["ours"]["evaluations"] == cell["theirs"]["evaluations"] == 8
    # the prompt, then a block a step, and with the first of the second block the finished one
    assert (cell["ours"]["network_calls"], cell["ours"]["positions_run"]) == (8, 12 + 8 * 4 + 4)
    assert (cell["theirs"]["network_calls"], cell["theirs"]["positions_run"]) == (
        8,
        4 * 16 + 4 * 20,
    )
    assert cell["versions"]["code"] == "otherlab 1" and cell["versions"]["threads"] == 1


class Told:
    """A side that takes the seconds it is told to."""

    def __init__(self, name, seconds, tokens, log):
        counts = {"evaluations": 2, "network_calls": 3, "positions_run": 4}
        self.name, self.seconds, self.log = name, list(seconds), log
        self.found = {"tokens": tokens, **counts}

    def run(self):
        self.log.append(self.name)
        second = self.seconds.pop(0)
        return {"cpu_s": second, "wall_s": 2 * second, "tokens": self.found["tokens"]}


def test_ratios_are_taken_within_pairs_and_who_is_first_takes_turns(peers):
    log = []
    ours, theirs = Told("ours", [1, 10, 2], [5, 6], log), Told("theirs", [2, 15, 8], [5, 6], log)
    cell = peers.compared(ours, theirs, 3)
    assert log == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert (
        cell["times_faster_by_cpu"]
        == {"median": 2, "min": 1.5, "max": 4}
        == cell["times_faster_by_wall"]
    )
    assert cell["positions_that_differ"] == 0
    assert cell["theirs"]["cpu_s"] == 8 and cell["theirs"]["network_calls"] == 3
    other = Told("theirs", [1], [5, 7], log)
    assert peers.compared(Told("ours", [1], [5, 6], log), other, 1)["positions_that_differ"] == 1


@pytest.mark.parametrize("ran", [1, 2])
def test_a_result_file_has_two_peers(peers, monkeypatch, ran):
    written = []
    results = {peer.name: {} for peer in peers.PEERS[:ran]}
    monkeypatch.setattr(peers, "measured", lambda *given: (results, {}))
    monkeypatch.setattr(peers, "write_result", lambda name, result, device: written.append(result))
    monkeypatch.setattr(sys, "argv", ["peers.py"])
    if ran == 1:
        with pytest.raises(SystemExit, match="1 of 3 peers ran"):
            peers.main()
    else:
        peers.main()
    assert len(written) == ran - 1
    assert all(result["peers"] == results for result in written)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_both_sides_load_the_published_format(peers, tmp_path, number):
    peer = peers.PEERS[number]
    folder = peers.write_checkpoint(tmp_path / "model", peer, peers.QUICK)
    assert (
        json.loads((folder / "config.json").read_text())["architectures"]
        == peer.fields["architectures"]
    )
    lm = load(folder, **({"mask_token_id": 127, "block_length": 4} if number < 2 else {}))
    assert lm.published_family == ("a2d-qwen3", "sdar", "llada")[number]
    assert lm.model.config.mask_token_id == 127
    assert not lm.model.lm_head.weight[[126, 127]].any()
    if number == 2:
        deviation = lm.model.model.layers[1].mlp.down_proj.weight.std().item()
        assert deviation == pytest.approx(0.02, rel=0.1)
    assert lm.model.model.norm.weight.eq(1).all()


@pytest.mark.slow
def test_real_shapes_run_at_tiny_size(monkeypatch, python):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.setattr(sys, "executable", python)
    import real_shapes

    found = real_shapes.measured(["llada"], "cpu", quick=True)
    assert (
        found["llada"]["step"]["traced_equals_plain"] and found["llada"]["step"]["masked_differs"]
    )
    assert found["llada"]["page"]["page_mb"] > 0
