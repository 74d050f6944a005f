"""What edits of attention choose and what a model writes under them: every removal of keys, chosen
at every time, for every kind of query, in every forward, with guidance and without; each
combination by one of four models, in turn.

A cell of a model is `<model>/<forward>/<guidance>/<when>/<how>/<queries>`. It holds the keys that
each row, layer and head lost at each evaluation, the tokens that stood at the open positions after
each step, sums of the confidences, in which a change of any logit shows, and the dose. Keys and
tokens are single characters, digits and then letters; a dot is a mask. Rows are padded on the left
and on the right, each by numbers of its own. Edits that are refused before there is a model stand
once, in `extras/refused`. Models are of random weights, in float64; doses are kept in float32.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig

from frozen import Cells
from sinklab import (
    BlockKeys,
    Canvas,
    DiffusionLM,
    DiffusionLMConfig,
    EqualMass,
    Random,
    SinkKeys,
    TopKeys,
    intervene,
)
from sinklab.core.instrument import Positions
from sinklab.core.registry import interventions, removals
from sinklab.lab.files import load_plugin
from sinklab.lab.measures.controls import Others
from sinklab.lab.scoring import removal_table

PLUGIN = Path(__file__).parents[2] / "studies" / "what_sinks_do" / "plugin.py"
TOLERANCE = 1e-6
"""doses are kept in float32"""
MODELS = {
    "gqa": {},
    "sink": {"sink_kind": "token", "sink_count": 1},
    "gate": {"gate": "elementwise"},
    "logit": {"sink_kind": "logit", "sink_count": 1},
}
BLOCK = 3
PARTS = {"steps": 3, "block_length": BLOCK}
FORWARDS = {
    "whole": {"steps": 3},
    "parts": PARTS,
    "prefix": {**PARTS, "cache": "prefix"},
    "dual": {**PARTS, "cache": "dual"},
    "blocks": {"steps": 3},
    "committed": {"steps": 3, "cache": "committed"},
}
"""how a canvas is decoded; the last two by a model that attends in blocks"""
IN_BLOCKS = ("blocks", "committed")
SHARED = ("whole", "prefix", "dual", "blocks")
"""forwards of every model; the others stand among the extras"""
GUIDANCE = {"plain": {}, "guided": {"cfg_scale": 0.5, "steps": 2}}
"""guidance reads twice, and has fewer steps for it"""
WHEN = ("now", "previous", "clean", "kept")
HOW = ("mask", "zero_value", "shuffle_value", "mean_value")
QUERIES = ("default", "all", "from8", "masked", "committed", "prompt")
PAD, MASK, VOCABULARY = 0, 1, 32
ROWS = ("...abc######hi.", "efghab######j..")
"""two texts: # is a mask, a dot padding on the left and on the right"""
UNEVEN = ("..abc###d##....", "efghijk#####l..")
"""likewise, with masks in other columns of each"""
FIGURES = "0123456789abcdefghijklmnopqrstuvwxyz"
SELECTORS = {
    "top": TopKeys(1),
    "sinks": SinkKeys(),
    "gu": SinkKeys("gu:weight=0.2", 2),
    "zscore": SinkKeys("excess:epsilon=1.5,scale=zscore"),
    "positions": Positions((2, 7)),
    "random": Random(TopKeys(2)),
    "random of sinks": Random(SinkKeys("gu:weight=0.2"), fewer=True),
    "equal mass": EqualMass(TopKeys(1)),
    "equal mass by a rule": EqualMass(TopKeys(1), "gu:weight=0.2"),
    "matched": EqualMass(TopKeys(1), arm="keys"),
    "others": Others(TopKeys(9)),
}
EDITS = {
    "one head": "block_keys:keys=top:k=2,when=now,layers=0,heads=1",
    "last layer": "block_keys:keys=top:k=2,layers=-1,heads=0+3",
    "some steps": "block_keys:keys=top:k=2,when=now,steps=1+2",
    "from a step on": "block_keys:keys=top:k=2,when=kept,steps=2+none",
    "limit": "block_keys:keys=top:k=2,when=kept,limit=3",
    "last row": "block_keys:keys=top:k=2,scores=last_row",
    "counted": "block_keys:keys=top:k=2,when=now,counted_by=gu:weight=0.1",
    "seed": "block_keys:keys=random:like=top:k=2,when=now,seed=7",
    "few neighbours": "block_keys:keys=others:like=top:k=2,when=now,beyond=2",
    "lone rows": "lone_rows:rows=5+9",
    "lone rows of a head": "lone_rows:rows=0,heads=2,layers=1",
    "window": "window_attention:radius=3",
    "window and first": "window_attention:radius=2,keep=3+4,heads=0+1",
    "first added sink": "block_keys:keys=positions:added=0,when=now",
    "clipped": "clip_channel:channels=1+5,limit=0.5,layers=0",
    "zeroed": "clip_channel:channels=2,limit=0",
}
OTHERS = {
    "kv": {"sink_kind": "kv", "sink_count": 2},
    "zero": {"sink_kind": "zero", "sink_count": 1},
    "behind": {"sink_kind": "token", "sink_count": 2, "sink_side": "end"},
    "shifted": {"logit_shift": True},
}
"""further models, of whom a few cells are held"""


def cells(group: str) -> Cells:
    """The cells of a model, or the others."""
    with tempfile.TemporaryDirectory() as folder:
        part = extras if group == "extras" else of_model
        for name, value in part(group, Path(folder)):
            yield f"{group}/{name}", value


def of_model(group: str, folder: Path) -> Cells:
    """Of the combinations that are not refused as they are written every fourth, other ones of
    each model.
    """
    models = {length: tiny(block_length=length, **MODELS[group]) for length in (None, BLOCK)}
    files = {length: folder / f"{length}.safetensors" for length in models}
    for length, model in models.items():
        save_values(model, files[length])
    first = list(MODELS).index(group)
    for place, (forward, guidance) in enumerate(product(SHARED, GUIDANCE), first):
        length = BLOCK if forward in IN_BLOCKS else None
        made = [(name, edit) for name, edit in edits(files[length]) if edit is not None]
        for name, edit in made[-place % 4 :: 4]:
            how = {**FORWARDS[forward], **GUIDANCE[guidance]}
            yield f"{forward}/{guidance}/{name}", cell_of(models[length], edit, how)


def edits(file: Path) -> Iterator[tuple[str, BlockKeys | None]]:
    """Each combination of when, how and for which queries; None for one that is refused."""
    for when, how, queries in product(WHEN, HOW, QUERIES):
        text = f"mean_value:file={file}" if how == "mean_value" else how
        given = None if queries == "default" else queries
        try:
            edit = BlockKeys(TopKeys(2), when=when, how=text, queries=given)
        except ValueError:
            edit = None
        yield f"{when}/{how}/{queries}", edit


def extras(_: str, folder: Path) -> Cells:
    """What is refused, other selectors, edits of some layers, heads or steps, and other edits."""
    for name, edit in edits(folder / "none"):
        if edit is None:
            yield f"refused/{name}", "refused: ValueError"
    model, added = tiny(), tiny(**MODELS["sink"])
    for name, keys in SELECTORS.items():
        yield f"selectors/{name}", cell_of(model, BlockKeys(keys), PARTS)
        yield f"selectors with an added sink/{name}", cell_of(added, BlockKeys(keys), PARTS)
    for name, text in EDITS.items():
        yield f"edits/{name}", cell_of(model, text, PARTS)
        yield f"edits with an added sink/{name}", cell_of(added, text, PARTS)
    for name, settings in OTHERS.items():
        other = tiny(**settings)
        for when in WHEN:
            yield f"models/{name}/{when}", cell_of(other, BlockKeys(TopKeys(2), when=when), PARTS)
    for forward, when in product(FORWARDS, ("now", "previous")):
        own = tiny(block_length=BLOCK) if forward in IN_BLOCKS else model
        edit, how = BlockKeys(TopKeys(2), when=when), {**FORWARDS[forward], "steps": None}
        yield f"uneven/{forward}/{when}", cell_of(own, edit, how, UNEVEN)


def tiny(**settings: Any) -> DiffusionLM:
    """Two layers with four query heads and two of keys; weights are wide, so that attention is
    uneven.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    ids = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": None}
    backbone = LlamaConfig(**sizes, **heads, **ids, eos_token_id=None, initializer_range=0.4)
    model = DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=MASK, **settings)).double()
    draw(model)
    return model.eval()


def draw(module: torch.nn.Module) -> None:
    """Wide weights, so that attention is uneven."""
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        if weight.ndim > 1:
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.data = drawn * 0.4


def canvas_of(rows: Sequence[str]) -> Canvas:
    """The canvas of such texts."""
    ids_BS = torch.tensor([[token(one) for one in row] for row in rows])
    return Canvas.infill(ids_BS, mask_id=MASK, attention_BS=ids_BS != PAD)


def token(one: str) -> int:
    """The id of a character of `ROWS`."""
    return {".": PAD, "#": MASK}.get(one) or FIGURES.find(one) + 1


def save_values(model: DiffusionLM, file: Path) -> None:
    """Write the mean values of sinks for `mean_value`: the one place to adapt to another one."""
    texts = [torch.arange(2, 14).view(1, -1), torch.arange(12, 30, 2).view(1, -1)]
    # what the plug-in registers is forgotten afterwards
    with mock.patch.dict(removals._all()), mock.patch.dict(interventions._all()):
        load_plugin(PLUGIN)
        plugin = sys.modules.pop("sinklab_plugin_plugin")
        plugin.save_reference_values(model, BlockKeys(TopKeys(1), when="now"), texts, file)


def steps_of(model: DiffusionLM, canvas: Canvas, how: dict[str, Any]) -> Iterator[Any]:
    """Steps of decoding a canvas: the one place to adapt to another one."""
    from sinklab.core.subject import DecodingSettings

    return model.denoise(canvas, DecodingSettings(seed=0, **how))


def cell_of(
    model: DiffusionLM, edit: BlockKeys | str, how: dict[str, Any], rows: Sequence[str] = ROWS
) -> Any:
    """The cell of an edit: keys, tokens, confidences and the dose; or that it is refused."""
    is_clean = isinstance(edit, BlockKeys) and edit.when == "clean"
    calls = 2 if how.get("cfg_scale") else 1
    texts, sure = [], []
    canvas = canvas_of(rows)
    ids_BS, real_BS = canvas.ids_BS, canvas.attention_BS
    try:
        with intervene(model, edit, forwards_per_step=calls) as log:
            steps = steps_of(model, canvas, how)
            while bool((ids_BS == MASK).any()):
                if is_clean:
                    with log.probing(), torch.no_grad():
                        model(ids_BS, real_BS)
                step = next(steps)
                ids_BS = step.ids_BS
                texts.append(" ".join(map(text_of, ids_BS, canvas.open_BS)))
                sure.append(round(float(step.score_M.sum()), 7))
    except ValueError as error:
        return f"refused: {type(error).__name__}"
    dose = {name: round(float(one), 7) for name, one in log.summary().items()}
    return {"keys": keys_of(log), "tokens": texts, "sure": sure, "dose": dose}


def text_of(ids_S: torch.Tensor, open_S: torch.Tensor) -> str:
    """Tokens at the open positions, a character each."""
    return "".join("." if one == MASK else FIGURES[one] for one in ids_S[open_S].tolist())


def keys_of(log: Any) -> list[str]:
    """The keys that went at each evaluation: rows apart by a space, layers by a stroke, heads by a
    comma.
    """
    table = removal_table(log)
    found: dict[int, dict[int, dict[int, list[str]]]] = {}
    places = zip(table["forward"], table["row"], table["layer"], table["key_list"], strict=True)
    for forward, row, layer, keys in places:
        heads = found.setdefault(forward, {}).setdefault(row, {}).setdefault(layer, [])
        heads.append("".join(FIGURES[key] for key in keys))
    return [
        f"{forward}: "
        + " ".join("/".join(map(",".join, layers.values())) for layers in rows.values())
        for forward, rows in found.items()
    ]
