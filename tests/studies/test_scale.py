"""The runbook for one GPU at toy size: what is packed, planned and pruned, resumed after a kill,
and said of seeds.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from launched import ROOT, script
from refusals import refused
from tiny_diffusion import TEXT

pytestmark = pytest.mark.ring("extras")


runbook, answers = script("studies/scale/runbook"), script("studies/scale/answers")
REAL = runbook.Runbook(Path("nowhere"))
TOY = """
[limits]
seconds = 1000
command = 100
reserve = 10
jobs = 2
fewest_tokens = 0.5
[measure]
steps = 3
log_every = 1
[tokenizer]
vocab_size = 300
[train]
length = 16
batch = 4
lr = 1e-2
bf16 = false
heldout_rows = 4
monitor_every = 4
monitor_rows = 2
monitor_rule = "gu"
log_every = 1
eval_every = 1000
save_every = 2
log_to = "none"
threads = 1
[shapes.10M]
hidden_size = 16
layers = 1
heads = 2
mlp_size = 16
[[stages]]
name = "variants"
shape = "10M"
tokens = 384
kinds = ["plain", "sink"]
seeds = 6
fewest = 6
[[stages]]
name = "twins"
shape = "10M"
tokens = 384
kinds = ["causal", "diffusion"]
seeds = 2
fewest = 2
train = { row_start = true }
[masking]
rows = 4
batch = 2
ks = [1, 2, 4]
"""


@pytest.fixture
def toy(tmp_path):
    """A packed runbook of models that are nothing."""
    settings = tmp_path / "toy.toml"
    settings.write_text(TOY)
    heldout = tmp_path / "text" / "heldout.txt"
    heldout.parent.mkdir()
    heldout.write_text(TEXT * 5)
    (heldout.parent / "learned.txt").write_text(TEXT * 20)
    book = runbook.Runbook(tmp_path / "out", settings)
    runbook.pack(book, str(heldout.parent), str(heldout), None)
    return book


def speeds(tokens_per_second, start=20.0):
    return {
        shape: {"tokens_per_second": tokens_per_second, "start": start}
        for shape in REAL.settings["shapes"]
    }


@pytest.mark.parametrize(
    ("speed", "seeds", "share"),
    [
        (5e6, (6, 6, 3), 1),
        # the last stage gives up seeds first, and what would be one seed alone is left out
        (1.5e6, (6, 6, 2), 1),
        (1.3e6, (6, 6, 0), 1),
        (1.12e6, (6, 4, 0), 1),
        (0.96e6, (6, 2, 0), 1),
        (0.9e6, (6, 0, 0), 1),
        # the verdict keeps its six seeds and gets fewer tokens
        (0.6e6, (6, 0, 0), None),
        (0.3e6, (0, 0, 0), None),
    ],
)
def test_the_plan_keeps_what_has_a_verdict_and_fits(speed, seeds, share):
    plan = runbook.planned(REAL, speeds(speed), spent=120)
    assert tuple(plan["stages"][name]["seeds"] for name in ("variants", "twins", "size")) == seeds
    assert plan["seconds"] <= plan["left"] == 2700 - 240 - 120
    tokens = plan["stages"]["variants"]["tokens"] / 75e6
    assert tokens == share if share else tokens < 1
    assert (tokens >= 0.5) is (seeds[0] == 6)


def test_runs_come_seed_by_seed_and_those_that_cannot_be_are_refused():
    runs = REAL.runs(runbook.planned(REAL, speeds(1.3e6), spent=0))
    assert [run.name for run in runs[:5]] == [
        "variants-plain-0",
        "variants-sink-0",
        "variants-zero-0",
        "variants-gate-0",
        "variants-plain-1",
    ]
    assert [run.name for run in runs[24:26]] == ["twins-causal-0", "twins-diffusion-0"]
    refused(r"plan\.json is not there; run", REAL.plan)


def test_of_a_seed_all_kinds_see_the_same(tmp_path):
    from dataclasses import asdict

    plan = runbook.planned(REAL, speeds(5e6), spent=0)
    made = [asdict(runbook.settings_of(REAL, run)) for run in REAL.runs(plan)[:4]]
    differing = {name for name in made[0] if len({one[name] for one in made}) > 1}
    assert differing == {"sink_kind", "sink_count", "gate", "out"}
    twins = [asdict(runbook.settings_of(REAL, run)) for run in REAL.runs(plan)[24:26]]
    assert {name for name in twins[0] if twins[0][name] != twins[1][name]} == {"objective", "out"}
    assert twins[0]["row_start"] and not made[0]["row_start"]
    assert made[0]["steps"] == 1144 and made[0]["causal_start"] == 0 and made[0]["seed"] == 0


def test_what_is_packed_says_what_it_is_and_must_travel(toy, monkeypatch, tmp_path):
    data = toy.out / "data"
    packed = json.loads((data / "packed.json").read_text())
    assert packed["texts"]["heldout"]["documents"] == packed["texts"]["train"]["documents"] == 1
    assert len(packed["sha256"]) >= 4
    assert packed["bytes"] == sum(
        path.stat().st_size for path in data.rglob("*") if path.is_file()
    ) - ((data / "packed.json").stat().st_size)
    monkeypatch.setattr(runbook, "LARGEST", 100)
    refused(
        r"must fit .* MiB, but are",
        runbook.pack,
        toy,
        str(tmp_path / "text"),
        str(tmp_path / "text" / "heldout.txt"),
        str(data / "tokenizer"),
    )


PLAN = {"stages": {"variants": {"seeds": 1, "tokens": 2560}, "twins": {"seeds": 1, "tokens": 384}}}


STANDING = """
import os, signal, sys
from pathlib import Path
Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
sys.path.insert(0, {folder!r})
import runbook
from sinklab.lab.training import checkpoints

settle, settled = checkpoints.settle, []

def stand_at_the_second(folder):
    if settled:
        signal.pause()
    settled.append(folder)
    settle(folder)

checkpoints.settle = stand_at_the_second
sys.exit(runbook.main())
"""
"""The runbook, which never gets beyond its first checkpoint."""


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_from_its_checkpoint_to_the_same_end(
    toy, tmp_path, monkeypatch, python
):
    (toy.out / "plan.json").write_text(json.dumps(PLAN))
    run = toy.runs(PLAN)[1]
    standing = tmp_path / "standing.py"
    standing.write_text(STANDING.format(folder=str(ROOT / "studies/scale")))
    with monkeypatch.context() as patched:
        patched.setattr(runbook, "__file__", str(standing))
        patched.setattr(sys, "executable", python)
        process = runbook.started(toy, run.name, "one", run.name)
    folder = toy.out / "runs" / run.name
    while not [*folder.glob("checkpoints/checkpoint-*/history.json")]:
        assert process.poll() is None, (toy.out / "logs" / f"{run.name}.txt").read_text()
        time.sleep(0.005)
    runbook.ended(process)
    assert process.returncode == -signal.SIGKILL and not (folder / "model").exists()
    # a fork that stands in for a Python ends a moment later
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(int(standing.with_suffix(".pid").read_text()), 0)
            time.sleep(0.005)
    line = runbook.one(toy, run)
    whole = runbook.Runbook(tmp_path / "whole", toy.file)
    whole.out.mkdir()
    (whole.out / "data").symlink_to(toy.out / "data")
    uninterrupted = runbook.one(whole, run)
    for own in (line, uninterrupted):
        del own["seconds"], own["tokens_per_second"]
    assert line == uninterrupted and line["steps"] == 40 and len(line["rows"]) == 4


@pytest.mark.slow
def test_the_commands_measure_train_and_report_and_leave_out_what_is_done(
    toy, capsys, monkeypatch, python
):
    monkeypatch.setattr(sys, "executable", python)
    runbook.main(["--out", str(toy.out), "--settings", str(toy.file), "measure"])
    plan = toy.plan()
    assert (
        plan["stages"]["variants"] == {"seeds": 6, "tokens": 384}
        and plan["stages"]["twins"]["seeds"] == 2
    )
    assert toy.spent() > 0 and plan["speeds"]["10M"]["tokens_per_second"] > 0
    plan["stages"]["variants"]["seeds"] = 0
    plan["stages"]["twins"]["seeds"] = 1
    (toy.out / "plan.json").write_text(json.dumps(plan))
    made = {"name": "twins-causal-0", "stage": "twins", "kind": "causal", "seed": 0}
    toy.note(made)
    assert runbook.train_all(toy, 300) == 0
    line = toy.results()["twins-diffusion-0"]
    assert [cell["k"] for cell in line["masking"]] == [0, *[1] * 4, *[2] * 4, *[4] * 4]
    assert all(0 < cell["removed"] < 1 for cell in line["masking"] if cell["control"] == "sinks")
    assert line["monitor"]["step"] == [0, 4, 6]
    tokenizer = json.loads(
        (toy.out / "runs" / "twins-diffusion-0" / "model" / "tokenizer_config.json").read_text()
    )
    assert (
        tokenizer["bos_token"] and (toy.out / "runs" / "twins-diffusion-0" / "result.json").exists()
    )
    assert toy.results()["twins-causal-0"] == made
    assert (
        runbook.train_all(toy, 300) == 0
        and "every run of the plan is done" in capsys.readouterr().out
    )
    toy.note({"command": "train", "seconds": 10_000})
    assert toy.spent() > 10_000


def test_a_line_that_was_cut_short_is_left_out_and_the_next_stands_alone(toy):
    toy.note({"name": "a", "loss": 1.0})
    with (toy.out / "results.jsonl").open("a") as file:
        file.write('{"name": "b", "lo')
    toy.note({"name": "c", "loss": 2.0})
    assert list(toy.results()) == ["a", "c"]


def cells(costs, masses, matched=1.0):
    """What hiding 1, 2 and 4 keys cost a model of loss 4."""
    found = [{"k": 0, "control": "none", "loss": 4.0, "removed": 0.0}]
    for k, cost, mass in zip((1, 2, 4), costs, masses, strict=True):
        arms = {"sinks": cost, "matched": cost, "equal_mass": cost / 2, "random": 0.0}
        found += [
            {"k": k, "control": arm, "loss": 4 + value, "removed": mass, "matched": matched}
            for arm, value in arms.items()
        ]
    return found


def finished(
    book, seeds, kinds=("plain", "sink", "zero", "gate"), gap=0.01, rate=0.5, stage="variants"
):
    """Lines of made-up runs: every kind after the first is worse by a gap."""
    noise = (0.001, -0.001, 0.002, -0.002, 0.0, 0.0)
    for seed in range(seeds):
        for number, kind in enumerate(kinds):
            line = {
                "name": f"{stage}-{kind}-{seed}",
                "stage": stage,
                "kind": kind,
                "seed": seed,
                "tokens": 75_000_000,
            }
            line |= {"loss": 4 + bool(number) * (gap + noise[seed]), "bits_per_byte": 1.8}
            rates = [0.0, rate + noise[seed] if number == 0 else 0.02]
            line["monitor"] = {"step": [0, 100], "main_first": rates, "first_share": rates}
            line["masking"] = (
                cells((0.2, 0.3, 0.4), (0.5, 0.6, 0.7), 0.0)
                if number == 0
                else (cells((0.05 + noise[seed], 0.2, 0.4), (0.1, 0.3, 0.7)))
            )
            book.note(line)


def test_six_seeds_make_a_verdict_and_five_do_not(tmp_path):
    book = runbook.Runbook(tmp_path)
    finished(book, 5)
    text = answers.report(book)
    assert (
        "held-out loss, sink less plain: no verdict, since 5 of 6 seeds are complete (+0.0110, "
        "+0.0090" in text
    )
    # a sixth seed of which one kind is missing is not complete
    for kind in ("plain", "sink", "zero"):
        line = book.results()[f"variants-{kind}-4"]
        book.note(line | {"seed": 5, "name": f"variants-{kind}-5"})
    assert "no verdict, since 5 of 6 seeds" in answers.report(book)
    book.note(book.results()["variants-gate-4"] | {"seed": 5, "name": "variants-gate-5"})
    text = answers.report(book)
    assert "held-out loss, sink less plain: worse (+0.0100 nats, 95 %" in text
    assert "or more would have shown" in text and (tmp_path / "report.md").read_text() == text


def test_no_difference_is_told_with_what_would_have_shown(tmp_path):
    book = runbook.Runbook(tmp_path)
    finished(book, 6, gap=0.0)
    assert "held-out loss, zero less plain: inconclusive (+0.0000 nats" in answers.report(book)


def test_twins_are_contrasted_where_the_causal_one_has_its_sink(tmp_path):
    book = runbook.Runbook(tmp_path)
    finished(book, 6, ("causal", "diffusion"), stage="twins")
    text = answers.report(book)
    assert "Gu's rate, diffusion less causal: less (-0.48" in text
    words = "cost of blocking the 1 most attended keys, causal less diffusion: more (+0.1500 nats"
    assert words in text
    # at half of the attention the diffusion model pays 0.3, the causal one 0.2
    assert (
        "at equal removed attention (50 %, 50 %, 50 %, 50 %, 50 %, 50 %), causal less diffusion: "
        "less (-0.1" in text
    )
    assert (
        "causal: the most attended key less keys that are no sinks and hold as much: inconclusive, "
        "since 0 %" in text
    )
    assert (
        "diffusion: the most attended key less keys that are no sinks and hold as much: more "
        "(+0.025" in text
    )
    book = runbook.Runbook(tmp_path / "without")
    book.out.mkdir()
    finished(book, 6, ("causal", "diffusion"), rate=0.03, stage="twins")
    text = answers.report(book)
    assert (
        "inconclusive: the precondition is not met, since the causal model's sink on the first "
        "token did not" in text
    )
    assert "cost of blocking" not in text


def test_equal_attention_is_not_reached_beyond_the_doses_of_a_model():
    one, other = cells((0.2, 0.3, 0.4), (0.5, 0.6, 0.7)), cells((0.1, 0.2, 0.3), (0.1, 0.2, 0.3))
    assert all(value != value for value in answers.at_equal_mass(one, other))
    mass, gap = answers.at_equal_mass(one, cells((0.1, 0.2, 0.3), (0.1, 0.2, 0.6)))
    assert mass == 0.5 and gap == pytest.approx(0.2 - 0.275)
    mass, _ = answers.at_equal_mass(other, one[:1] + cells((0.2, 0.3, 0.4), (0.25, 0.6, 0.7))[1:])
    assert mass == 0.25
