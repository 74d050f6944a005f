"""The conformance suite of interventions."""

# B batch, L layers, H query heads, S keys, M keys taken away
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sinklab.core.instrument import (
    BlockKeys,
    Intervention,
    InterventionLog,
    Recording,
    intervene,
    trace,
)
from sinklab.core.registry import interventions
from sinklab.lab.checkpoints.loading import load
from sinklab.lab.checks import check_text
from sinklab.lab.scoring.hidden_states import state_records


@torch.no_grad()
def check_intervention(edit: Intervention | str, model: Any = None) -> None:
    """Hold a registered intervention to the contract of traces, studies and run folders.

    It is written as text and read again; it changes the model's outputs inside the block, twice the
    same way, measured or not; afterwards weights, outputs and hooks are as before; its log names
    it, counts the affected keys, and a key that it blocks for all queries receives nothing.

    Args:
        edit: a value such as ``MaskSinks(k=2)``, or its text, that acts within three forwards of 16
            tokens.
        model: a `DiffusionLM`; None for the packaged "tiny".

    Raises:
        AssertionError: naming the part that does not hold.
        ValueError: if its class is not registered.
    """
    edit = check_text(interventions, edit)
    name, model = interventions.as_text(edit), load("tiny").model.eval() if model is None else model
    hooks = _hooks(model)
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    plain = [model(ids_BS).logits for ids_BS in _three_texts(model)]
    logits, recording, log = _edited(model, edit)
    assert all(one.isfinite().all() for one in logits), f"{name} gives logits that are not finite"
    for measure in (True, False):
        again, *_ = _edited(model, edit, measure=measure)
        assert all(map(torch.equal, again, logits)), (
            f"{name}: outputs differ from run to run, with measure={measure}"
        )
    after = [model(ids_BS).logits for ids_BS in _three_texts(model)]
    assert all(map(torch.equal, plain, after)), (
        f"{name} changes what the model gives after the block"
    )
    kept = all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
    assert kept, f"{name} changes the weights"
    assert _hooks(model) == hooks, f"{name} leaves a hook"
    assert not all(map(torch.equal, plain, logits)), f"{name} changes no output"
    _check_log(name, edit, log, recording)


def _three_texts(model: Any) -> list[Tensor]:
    """Ids (2, 16) of three steps, among them masks and one row of its own, the same every time."""
    generator = torch.Generator().manual_seed(0)
    whole_BS = torch.randint(1, model.config.vocab_size - 2, (2, 16), generator=generator)
    return [
        whole_BS.masked_fill(
            torch.rand(whole_BS.shape, generator=generator) < share, model.config.mask_token_id
        )
        for share in (0.7, 0.5, 0.3)
    ]


def _hooks(model: Any) -> int:
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    )


def _edited(
    model: Any, edit: Any, *, measure: bool = True
) -> tuple[list[Tensor], Recording, InterventionLog]:
    """Logits, recording and log of three forwards under an edit."""
    logits = []
    with intervene(model, edit, measure=measure) as log, trace(model) as recording:
        for ids_BS in _three_texts(model):
            if getattr(edit, "when", "") == "clean":
                with log.probing():
                    model(ids_BS)
            logits.append(model(ids_BS).logits)
    return logits, recording, log


def _check_log(name: str, edit: Any, log: InterventionLog, recording: Recording) -> None:
    entries = [*log.removals, *state_records(log)]
    assert log.forwards == 3 and entries, (
        f"{name}: {len(entries)} entries in the log of {log.forwards} steps"
    )
    # an edit that leaves open when keys are chosen is logged with what was used
    given = replace(edit, when="previous") if getattr(edit, "when", "") is None else edit
    for entry in log.removals:
        assert entry.edit == given and entry.label == interventions.name_of(edit), (
            f"{name}: logged as {entry.label}"
        )
        columns_BLHM, keys_BLH = entry.columns_BLHM, entry["keys"]
        rows = (len(columns_BLHM), len(entry.layers), len(entry.heads))
        shares = [entry["held"], entry["removed"], entry["overlap"]]
        for part in (*shares, entry["left"], keys_BLH, columns_BLHM.sum(-1)):
            assert part.shape == rows, f"{name}: shapes in the log"
        for share_BLH in shares:
            known = share_BLH[~share_BLH.isnan()]
            assert ((known > -1e-4) & (known < 1 + 1e-4)).all(), (
                f"{name}: a share in the log outside 0 to 1"
            )
        if columns_BLHM.shape[-1]:
            assert torch.equal((columns_BLHM >= 0).sum(-1), keys_BLH.long()), (
                f"{name}: columns and counts differ"
            )
            if isinstance(edit, BlockKeys) and edit.how.blocks and not edit.by_query:
                received_BLHS = recording.received[entry.forward][:, list(entry.layer_numbers)][
                    :, :, list(entry.heads)
                ]
                left_BLHM = received_BLHS.gather(-1, columns_BLHM.clamp(min=0))
                assert not left_BLHM[columns_BLHM >= 0].any(), (
                    f"{name}: keys that are logged as gone receive attention"
                )
