"""The 20 training losses of each recipe at toy size, and the held-out loss behind them.

Each run has two layers, 32 wide, and takes 20 steps of 8 rows of 32 tokens: the whole schedule of
the recipe, with its optimizer, objective, phases, order of rows and noise. Runs follow one another
as recipes say: fine-tuning goes on with the model that the recipe before it left, at the path that
it names. The text is drawn here. Besides: what each recipe sets at its real size, how it goes with
settings that no recipe has, and a run that is stopped and gone on with.

Training is in float32: of two processors, and of float32 and float64, losses differ by one unit in
the last place (2e-7).

Left out: recipes and variants that are others' runs at this size (their settings are held), and
those of the packaged models; compilation and a process that reads ahead, which change no loss.
"""

import json
import random
import tempfile
from collections.abc import Iterable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from frozen import Cells
from sinklab import open_run
from sinklab.lab.data import read_pairs, train_tokenizer
from sinklab.lab.training import RECIPES, VARIANTS, recipe, train

TOLERANCE = 1e-6

TOY = {
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "mlp_size": 48,
    "tokenizer": "400",
    "length": 32,
    "batch": 8,
    "steps": 20,
    "heldout_rows": 4,
    "bf16": False,
    "compile": False,
    "log_every": 1,
    "save_every": 1000,
    "monitor_every": 0,
}
"""What a run has of its own besides its recipe."""
TEXT = {"corpus": "text.jsonl"}
PAIRS = {"corpus": "sums.txt", "length": 64}
TWICE = {"micro_batch": 4}
"""Of runs in which gradients are accumulated."""
SHOWN = (
    "init_from",
    "backbone",
    "hidden_size",
    "layers",
    "heads",
    "kv_heads",
    "mlp_size",
    "sink_kind",
    "sink_count",
    "sink_side",
    "gate",
    "corpus",
    "only",
    "tokenizer",
    "pairs",
    "length",
    "streaming",
    "objective",
    "causal_start",
    "time_sampler",
    "train_only",
    "batch",
    "steps",
    "lr",
    "min_lr",
    "warmup",
    "weight_decay",
    "seed",
)
"""Settings of a recipe that are held at its real size."""

SCRATCH = "runs/laptop-scratch/model"
WORDS = TEXT | TWICE | {"tokenizer": "words"}
RUNS: dict[str, list[tuple[str, Iterable[str], dict[str, Any]]]] = {
    "laptop": [
        ("laptop-scratch", VARIANTS, TEXT),
        ("laptop-causal", ("plain",), TEXT),
        ("laptop-from-causal", ("sink",), TEXT),
        ("laptop-sft", ("plain",), PAIRS),
        ("laptop-sft-corrected", ("plain",), PAIRS),
        ("laptop-retrofit", ("kv",), TEXT | {"init_from": SCRATCH}),
    ],
    "paper": [
        ("scratch-472m", ("plain",), WORDS),
        ("qwen-0.5b", ("sink",), TEXT | TWICE | {"init_from": "qwen2"}),
        ("sft-gsm8k", ("plain",), PAIRS | TWICE),
        ("retrofit", ("sink",), TEXT | TWICE | {"init_from": "llama"}),
    ],
}
"""Recipes with their variants and changes. What a retrofit begins with, and the Qwen2.5 of the
paper, are small models here.
"""
BLOCKS = {"block_length": 8}
OTHER: dict[str, dict[str, Any]] = {
    "lora": {"init_from": "llama", "train_only": "lora", "lora_rank": 4},
    "autoregressive": {"init_from": "qwen2", "objective": "autoregressive", "causal_start": 0.0},
    "shifted": {"init_from": "qwen3", "logit_shift": True},
    "first alone": {"init_from": "llama", "attention": "first_alone"},
    "independent times": {"time_sampler": "iid"},
    **{
        f"{start}/row": BLOCKS | {"init_from": start, "causal_start": 0.0}
        for start in ("llama", "a2d-qwen3")
    },
}
"""Changes of laptop-scratch."""


def losses_of(folder: str) -> dict[str, Any]:
    """The losses of a run, and the held-out one."""
    run = open_run(folder)
    losses = run.table("history")["loss"].dropna().tolist()
    heldout = run.table("heldout").to_dict("records")[0]
    return {
        "losses": rounded(losses),
        "heldout": {name: rounded(value) for name, value in heldout.items()},
    }


def rounded(value: Any) -> Any:
    """A value with the digits that float32 has, in lists too."""
    if isinstance(value, list):
        return [*map(rounded, value)]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def trained(name: str, variant: str | None, changes: dict[str, Any]) -> dict[str, Any]:
    """The losses of a recipe with these changes, run at its own path."""
    settings = recipe(name, variant, **TOY | changes)
    if settings.init_from is not None:
        # the tokenizer of that model
        settings = replace(settings, tokenizer=changes.get("tokenizer"))
    train(settings)
    return losses_of(settings.out)


def write_texts() -> list[str]:
    """Sums in words, of two sources of which one recipe takes one, and as questions, some of which
    are too long for a row; runs read all of them more than once. Returns the texts.
    """
    dice = random.Random(0)
    texts, lines, sums = [], [], []
    for _ in range(60):
        text = ""
        while dice.random() < 0.8 or not text:
            name, thing = dice.choice(("Ann", "Ben", "Cleo")), dice.choice(("apples", "books"))
            first, second = dice.randint(2, 9), dice.randint(2, 9)
            text += f"{name} has {first} {thing}. {name} gets {second} more. "
        source = dice.choice(("RedPajamaGithub", "RedPajamaBook"))
        texts.append(text)
        lines.append(json.dumps({"text": text, "meta": {"redpajama_set_name": source}}))
        question = f"{name} has {first} and {second}? " * dice.choice((1, 1, 1, 9))
        sums.append(f"{question}||<<{first}+{second}={first + second}>> #### {first + second}")
    Path("text.jsonl").write_text("\n".join(lines))
    Path("sums.txt").write_text("\n".join(sums))
    return texts


def write_starts(texts: list[str]) -> None:
    """Causal models to begin with, also under the names that dLLM gives converted ones; and a
    tokenizer that puts a start token and has no [MASK], as Llama's.
    """
    tokenizer = train_tokenizer(texts, int(TOY["tokenizer"]))
    for kind in ("llama", "qwen2", "qwen3"):
        config = AutoConfig.for_model(
            kind,
            vocab_size=int(TOY["tokenizer"]) + 8,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=kind == "qwen2",
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for folder in (kind, f"a2d-{kind}"):
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        path = Path(f"a2d-{kind}", "config.json")
        name = {"llama": "A2DLlama", "qwen2": "A2DQwen2", "qwen3": "A2DQwen3"}[kind]
        said = {"architectures": [f"{name}LMHeadModel"], "model_type": f"a2d-{kind}"}
        said["mask_token_id"] = tokenizer.mask_token_id
        path.write_text(json.dumps(json.loads(path.read_text()) | said))
    words = (
        "<unk> <s> </s> Question Answer : . ? < << >> > # #### + = has gets more and Ann Ben Cleo"
    )
    words += " apples books " + " ".join(map(str, range(20)))
    ids = {word: number for number, word in enumerate(words.split())}
    inner = Tokenizer(models.WordLevel(ids, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", ids["<s>"])]
    )
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **named).save_pretrained("words")


def settings_cells() -> Cells:
    """What recipes and variants set, and the first of the sums that are invented."""
    for name in RECIPES:
        chosen = recipe(name)
        yield (
            f"settings/{name}",
            {field: getattr(chosen, field) for field in SHOWN} | {"out": chosen.out},
        )
    yield "settings/variants", VARIANTS
    for name, variant in (("qwen-0.5b", "gate"), ("laptop-sft", "sink"), ("retrofit", "kv")):
        chosen, plain = recipe(name, variant), recipe(name)
        changed = {
            field: getattr(chosen, field)
            for field in (*SHOWN, "out")
            if getattr(chosen, field) != getattr(plain, field)
        }
        yield f"settings/{name}/{variant}", changed
    sums = [*read_pairs("arithmetic")]
    yield "settings/sums", {"count": len(sums), "first": [one.texts() for one in sums[:4]]}


def stopped_cells() -> Cells:
    """Runs that stop behind step 13, of rows in memory and of a stream, and go on from step 10."""

    def stop(said: str) -> None:
        if said.startswith("step 13 "):
            raise KeyboardInterrupt

    for name, streaming in (("memory", False), ("stream", True)):
        settings = recipe(
            "laptop-scratch",
            "sink",
            **TOY | TEXT | {"save_every": 5, "streaming": streaming, "out": f"runs/{name}"},
        )
        try:
            train(settings, progress=stop)
        except KeyboardInterrupt:
            before = open_run(settings.out)
            steps = before.table("history")["step"].tolist()
            yield f"stopped/{name}", {"status": before.info.status, "steps": steps}
        train(settings)
        yield f"stopped/{name}/resumed", losses_of(settings.out)


def cells(group: str) -> Cells:
    """The cells of a group; its runs follow one another in a folder of their own."""
    if group == "settings":
        yield from settings_cells()
        return
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        write_starts(write_texts())
        if group == "stopped":
            yield from stopped_cells()
        for name, variants, changes in RUNS.get(group, ()):
            for variant in variants:
                yield f"{group}/{name}/{variant}", trained(name, variant, changes)
        for name, changes in OTHER.items() if group == "other" else ():
            changed = TEXT | {"out": f"runs/{name}"} | changes
            yield f"{group}/{name}", trained("laptop-scratch", None, changed)
