"""What each of several processes sees of models that they hold together, beside the undivided
model: run by torchrun.

    torchrun --nproc-per-node N divided_twin.py FOLDER COUNT

FOLDER holds models, a folder each; COUNT processes hold one together. Every process writes
``rank<i>.json``: by model, differences in float64 and float32, whether texts are equal, and how
many numbers were held and read.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from sinklab.core.probing import intervene, trace
from sinklab.lab.checkpoints import load, weights
from sinklab.lab.measures import MaskPositions, MaskSinks, WindowAttention
from sinklab.lab.scoring.hidden_states import ClipChannel

STATISTICS = (
    "received",
    "value_norm",
    "key_norm",
    "row_entropy",
    "row_logsumexp",
    "output_norm",
    "noop_bound",
)
STATISTICS += ("last_row", "massive_activations")
NOW = {"source": "now"}
EDITS = {
    "sinks of each head": MaskSinks(k=2, source="clean_pass"),
    "sinks of a layer": MaskSinks(k=2, shared="layer", **NOW),
    "random keys": MaskSinks(k=2, control="random", seed=3, **NOW),
    "random keys of a layer": MaskSinks(k=2, control="random", shared="layer", seed=5, **NOW),
    "equal mass": MaskSinks(k=1, control="equal_mass", counted_by="gu", **NOW),
    "some heads": MaskSinks(k=2, heads=(0, -1), **NOW),
    "values of zero": MaskSinks(k=2, removal="zero_value", **NOW),
    "positions": MaskPositions((3, 5), heads=(1,)),
    "window": WindowAttention(4),
    "channels": ClipChannel(channels=(1, 7)),
}
CACHES = (None, "prefix", "dual")


def apart(one, other):
    """The greatest difference; NaN stands where NaN stands."""
    one, other = (np.asarray(value, dtype=np.float64) for value in (one, other))
    np.testing.assert_equal(np.isnan(one), np.isnan(other))
    return float(np.nanmax(np.abs(one - other), initial=0.0))


@torch.no_grad()
def edited(model, edit, ids, real):
    with intervene(model, edit) as log:
        if getattr(edit, "when", None) == "clean":
            with log.probing():
                model(ids, real)
        logits = model(ids, real).logits
    return logits, log.table(keys=True)


@torch.no_grad()
def compared(whole, divided, ids, real, edits=EDITS):
    found = {"logits": apart(whole(ids).logits, divided(ids).logits)}
    plain = whole(ids, real).logits
    maps = [(0, 1, getattr(whole.config, "backbone", whole.config).num_attention_heads - 1)]
    recordings = []
    for model in (whole, divided):
        with trace(model, STATISTICS, maps=maps) as recording:
            model(ids, real)
        recordings.append(recording)
    one, other = recordings
    assert one.head_indices == other.head_indices
    found |= {name: apart(one.array(name), other.array(name)) for name in (*STATISTICS, "visible")}
    found["map"] = apart(one.map(*maps[0]), other.map(*maps[0]))
    for name, edit in edits.items():
        (here, log), (there, their_log) = (
            edited(model, edit, ids, real) for model in (whole, divided)
        )
        assert apart(here, plain) > 1e-3, f"{name} changes nothing"
        assert log.pop("key_list", None) == their_log.pop("key_list", None), f"{name}: other keys"
        found[name] = max(
            apart(here, there), *(apart(log[key], their_log[key]) for key in log if key != "edit")
        )
    return found


def texts(whole, divided, ids):
    """Whether what both write is equal, token by token, and with a trace, what it saw."""
    how = {
        "max_new_tokens": 8,
        "seed": 4,
        "temperature": 0.7,
        "block_length": 4,
        "steps": 4,
    }
    same = {}
    for cache in CACHES:
        same[f"{cache}"] = torch.equal(
            *(model.generate(ids, cache=cache, **how) for model in (whole, divided))
        )
    for cache in CACHES[2:]:
        written, seen = [], []
        for model in (whole, divided):
            with trace(model, ("received",)) as recording:
                written.append(model.generate(ids, cache=cache, **how))
            seen.append(recording.array("received"))
        same[f"{cache}, traced"] = torch.equal(*written) and apart(*seen) < 1e-9
    return same


def divided_and_read(folder, count):
    """The model, and how many numbers this process read of divided tensors and of the others, and
    holds.
    """
    read, pieces = {"read": 0}, weights.Safetensors.pieces

    def counting(self, *given):
        for rows, piece in pieces(self, *given):
            read["read"] += piece.numel()
            yield rows, piece

    weights.Safetensors.pieces = counting  # type: ignore[method-assign]
    try:
        model = load(folder, dtype="float64", tensor_parallel=count).model
    finally:
        weights.Safetensors.pieces = pieces  # type: ignore[method-assign]
    # what is tied is one
    every = list({id(one): one for one in model.state_dict(keep_vars=True).values()}.values())
    here = sum(getattr(one, "_local_tensor", one).numel() for one in every)
    return model, read | {"held": here, "whole": sum(one.numel() for one in every)}


def of_transformers(folder, count):
    """A model that `from_pretrained` divides is traced and edited as the whole one too."""
    whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    how = {"distributed_config": DistributedConfig(tp_size=count)}
    divided = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, **how)
    ids = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    edits = {name: EDITS[name] for name in ("sinks of a layer", "random keys", "values of zero")}
    return compared(whole, divided, ids, torch.ones_like(ids), edits)


def main(folder, count):
    torch.set_num_threads(1)
    # what the caller draws in each process is another number
    torch.manual_seed(int(os.environ["RANK"]))
    results = {}
    logging.disable_progress_bar()
    for path in sorted(one for one in folder.iterdir() if one.is_dir()):
        if path.name == "causal":
            # transformers has no second model beside the first
            results["causal"] = (
                of_transformers(path, count) if distributed.get_world_size() == count else {}
            )
            continue
        whole, (divided, read) = load(path, dtype="float64").model, divided_and_read(path, count)
        place = distributed.get_rank() // count
        # the processes of one model read the same text, those of another one another
        ids = torch.randint(5, 200, (2, 14), generator=torch.Generator().manual_seed(place))
        real = torch.ones_like(ids)
        real[1, :3] = 0
        about = {"float64": compared(whole, divided, ids, real)} | read
        about["float64"]["gradients on"] = apart(
            whole(ids).logits.detach(), divided(ids).logits.detach()
        )
        about["texts"] = texts(whole, divided, ids[:1])
        # the same without a seed: one is drawn
        about["unseeded"] = divided.generate(ids[:1], max_new_tokens=6, temperature=2.0).tolist()
        narrow = [load(path, **how).model for how in ({}, {"tensor_parallel": count})]
        with torch.no_grad():
            about["float32"] = apart(*(model(ids).logits for model in narrow))
        greedy = [model.generate(ids[:1], max_new_tokens=8, steps=4) for model in narrow]
        about["equal tokens in float32"] = float((greedy[0] == greedy[1]).double().mean())
        results[path.name] = about
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
