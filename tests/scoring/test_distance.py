"""Paired distance of what is written with and without edits, against loops written out."""

from dataclasses import replace

import pytest
import torch

from refusals import refused
from sinklab.core.probing import intervene
from sinklab.core.sampling.settings import DecodingSettings
from sinklab.lab.measures import MaskPositions, MaskSinks, by_protocol
from sinklab.lab.scoring.distance import output_distances
from sinklab.lab.scoring.writing import Writing, WritingRequest
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama

NEW = 6
PROMPTS = [[5, 9, 40, 7, 31], [12, 77, 3, 8, 150]]


def texts(loaded, **settings):
    requests = [WritingRequest(tuple(ids)) for ids in PROMPTS]
    return Writing(loaded, requests, DecodingSettings(seed=0, **settings), NEW, ends=False)


def moments_of(loaded):
    """Canvas and committed position (row, place) of every step: most confident first, one a step in
    each row.
    """
    ids_BS = torch.tensor([[*ids, *[loaded.model.config.mask_token_id] * NEW] for ids in PROMPTS])
    found = []
    for _ in range(NEW):
        with torch.no_grad():
            logits_BSV = loaded.model(ids_BS).logits.float()[
                ..., : loaded.model.config.text_vocab_size
            ]
        logits_BSV[..., loaded.model.config.mask_token_id] = -torch.inf
        best_BS, token_BS = logits_BSV.softmax(-1).max(-1)
        place_B = best_BS.masked_fill(ids_BS != loaded.model.config.mask_token_id, -1).argmax(1)
        found.append((ids_BS, place_B))
        ids_BS = ids_BS.scatter(1, place_B[:, None], token_BS.gather(1, place_B[:, None]))
    return [*found, (ids_BS, place_B)]


def divergence(clean_BV, edited_BV):
    clean_BV, edited_BV = (part.double().log_softmax(-1) for part in (clean_BV, edited_BV))
    return (clean_BV.exp() * (clean_BV - edited_BV)).sum(-1)


@pytest.mark.parametrize("protocol, sink", [("paper", 1), ("clean", 0), ("positions", 1)])
def test_of_a_diffusion_model_canvases_are_those_of_the_clean_run(protocol, sink):
    loaded = tiny_loaded(sink)
    edit = MaskPositions((1, 6)) if protocol == "positions" else by_protocol(protocol, 2)
    clean, one = output_distances(texts(loaded), [(), (edit,)])
    *steps, (final_BS, _) = moments_of(loaded)
    assert [list(text) for text in clean.texts] == final_BS[:, 5:].tolist()
    kl_BT, rows = [], torch.arange(2)
    with torch.no_grad(), intervene(loaded.model, edit, allow_idle=True) as log:
        for ids_BS, place_B in steps:
            with log.probing():
                clean_BV = loaded.model(ids_BS).logits[rows, place_B]
            kl_BT.append(divergence(clean_BV, loaded.model(ids_BS).logits[rows, place_B]))
    assert torch.allclose(one.kl_B, torch.stack(kl_BT).mean(0), atol=1e-4)
    assert (one.kl_B > 1e-3).all()
    assert torch.allclose(clean.kl_B, torch.zeros(2).double(), atol=1e-6)
    assert clean.agreement_B.tolist() == clean.same_B.tolist() == [1, 1]
    equal = [
        [a == b for a, b in zip(*pair, strict=True)]
        for pair in zip(clean.texts, one.texts, strict=True)
    ]
    assert one.agreement_B.tolist() == pytest.approx([sum(row) / NEW for row in equal])
    if protocol != "positions":
        # a closed loop leaves the first step whole
        assert one.dose(0).weight == (NEW - (protocol == "paper")) * 2 * 4
        assert one.dose(0).keys == 2
    assert clean.dose(0).weight == 0


def test_of_an_autoregressive_model_the_clean_text_is_read_token_after_token():
    loaded, edit = tiny_llama(), MaskPositions((1, 3))
    clean, one = output_distances(texts(loaded), [(), (edit,)])
    ids_BS = torch.tensor([[*ids, *text] for ids, text in zip(PROMPTS, clean.texts, strict=True)])
    with torch.no_grad():
        clean_BSV = loaded.model(ids_BS).logits[:, 4:-1]
        assert clean_BSV.argmax(-1).tolist() == ids_BS[:, 5:].tolist()
        with intervene(loaded.model, edit):
            edited_BSV = loaded.model(ids_BS).logits[:, 4:-1]
    assert torch.allclose(one.kl_B, divergence(clean_BSV, edited_BSV).mean(1), atol=1e-4)
    same_B = (edited_BSV.argmax(-1) == ids_BS[:, 5:]).double().mean(1)
    assert one.same_B.tolist() == pytest.approx(same_B.tolist())
    loop, held = output_distances(
        texts(loaded),
        [[by_protocol(name, 2, scores="last_row")] for name in ("clean", "held")],
    )
    assert (loop.kl_B > 0).all() and (held.kl_B > 0).all()
    assert loop.dose(1).keys == 2


def test_a_canvas_alone_does_not_repeat_guidance_or_a_cache():
    loaded = tiny_loaded()
    for settings in ({"cfg_scale": 1.0}, {"cache": "dual", "block_length": 3}):
        refused("without guidance and cache", output_distances, texts(loaded, **settings), [()])
    whole = texts(loaded)
    (alone,) = output_distances(replace(whole, edits=(MaskSinks(k=2),)), [()])
    assert alone.agreement_B.tolist() == [1, 1]
