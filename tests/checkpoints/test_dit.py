"""MDLM and BD3-LM on tiny fakes: loading, tracing, editing, scoring, decoding, and what is refused
by name.
"""

from pathlib import Path

import pytest
import torch

import published_toys as toys
from launched import launch
from refusals import refused
from sinklab import open_run
from sinklab.core.models import DiffusionLM
from sinklab.core.probing.tracing import trace
from sinklab.core.sampling import Canvas
from sinklab.extras.zoo import ddpm_cache, published_loss, published_noise, semi_ar
from sinklab.lab.checkpoints import describe, load, untrained_twins
from sinklab.lab.cli import main
from sinklab.lab.measures import MaskSinks
from sinklab.lab.scoring.heldout import row_losses
from tiny_diffusion import tiny_tokenizer

KINDS = ["mdlm", "bd3lm"]
IDS = torch.tensor(
    [[5, 9, 61, 61, 3, 61, 7, 2, 61, 61, 11, 4], [61, 8, 6, 61, 61, 61, 30, 31, 32, 61, 61, 61]]
)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def toy(folder, kind, **fields):
    return load(getattr(toys, kind)(folder / kind, **fields)[0])


def test_the_config_says_what_it_is(tmp_path, kind, capsys):
    folder, tensors = getattr(toys, kind)(tmp_path)
    facts = describe(folder)
    sizes = (
        facts.layers,
        facts.heads,
        facts.head_dim,
        facts.hidden,
        facts.intermediate,
        facts.vocabulary,
    )
    assert (*sizes, facts.context) == (2, 4, 8, 32, 128, 62, 64)
    unread = ("inv_freq", "sampling_eps_min", "sampling_eps_max")
    assert facts.parameters == sum(
        tensor.numel() for name, tensor in tensors.items() if not name.endswith(unread)
    )
    assert (facts.published_family, facts.backbone, facts.special.mask) == (kind, "sinklab_dit", 61)
    assert main(["info", str(folder)]) == 0
    assert f"diffusion, {kind} ({kind.upper()}) on sinklab_dit" in capsys.readouterr().out


@pytest.mark.slow
def test_saved_ones_load_through_transformers_too(tmp_path, python):
    lines = (
        "import sys; from sinklab.core.models import DiffusionLM; "
        "print(*[DiffusionLM.from_pretrained(one).dtype for one in sys.argv[1:]])"
    )
    folders = [tmp_path / f"own-{kind}" for kind in KINDS]
    for kind, folder in zip(KINDS, folders, strict=True):
        own = toy(tmp_path, kind).model
        own.save_pretrained(folder)
        model = DiffusionLM.from_pretrained(folder).eval()
        assert torch.allclose(model(IDS).logits, own(IDS).logits, atol=1e-4)
    done = launch(python, "-c", lines, *folders)
    assert done.stdout.split() == ["torch.float32"] * 2, done.stderr


def test_the_denoiser_never_proposes_the_mask_and_padding_is_not_seen(tmp_path, kind):
    model = toy(tmp_path, kind).model
    masked = IDS == 61
    logits_MV = model.denoiser()(IDS, masked)
    assert torch.equal(logits_MV, model(IDS).logits[masked])
    assert logits_MV.softmax(-1)[:, 61].max() == 0
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), IDS], 1)
    real = torch.cat([torch.zeros(2, 4), torch.ones(IDS.shape)], 1).long()
    assert torch.allclose(
        model(padded, real).logits[:, 4:, :61], model(IDS).logits[..., :61], atol=1e-4
    )
    written = model.generate(IDS, rule="entropy")
    assert not (written == 61).any()
    with trace(model) as recording:
        assert torch.equal(model.generate(IDS, rule="entropy"), written)
    assert recording.array("received").shape[2:4] == (2, 4)


def test_decoding_with_a_cache(tmp_path, kind):
    model = toy(tmp_path, kind).model
    ids, options = IDS[:, 5:], {"max_new_tokens": 9, "block_length": 4}
    ids = ids.clamp(max=60)
    written = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache="dual", refresh_every=1, **options), written)
    assert model.generate(ids, cache="prefix", **options).shape == written.shape
    if kind == "bd3lm":
        # blocks that are written do not change: their keys and values are computed once
        assert torch.equal(model.generate(ids, cache="committed", **options), written)


def test_the_loss_is_that_of_a_plain_twin(tmp_path, kind):
    model, ids = toy(tmp_path, kind).model, IDS.clamp(max=60)
    real = torch.ones_like(ids)
    real[1, 9:] = 0
    loss = published_loss(model, ids, real, generator=torch.Generator().manual_seed(3))
    noisy, masked, t = published_noise(
        model.config, ids, generator=torch.Generator().manual_seed(3)
    )
    total, counted = 0.0, 0
    for row in range(2):
        clean = {} if kind == "mdlm" else {"clean": ids[row : row + 1]}
        logits_SV = model(noisy[row : row + 1], **clean).logits[0, :, :61]
        for place in range(ids.shape[1]):
            if not real[row, place] or (kind == "bd3lm" and place == 0):
                continue
            counted += 1
            if masked[row, place]:
                total -= (
                    logits_SV[place].log_softmax(-1)[ids[row, place]].item() / t[row, place].item()
                )
    assert loss.item() == pytest.approx(total / counted, rel=1e-5)
    assert len({*t[0].tolist()}) == (1 if kind == "mdlm" else 3)
    assert not (kind == "bd3lm" and masked[:, 0].any())


def test_times_are_spread_over_what_has_one(tmp_path, kind):
    config = toy(tmp_path, kind).model.config
    ids = torch.zeros(5, 12, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        _, masked, t = published_noise(config, ids, times=(0.2, 0.7), generator=generator)
        times = t[:, ::4].flatten() if kind == "bd3lm" else t[:, 0]
        share = ((times - 0.2) / 0.5 * len(times)).floor().long().sort().values
        assert share.tolist() == list(range(len(times)))
        assert masked.any()


def test_samplers_fill_every_mask_and_follow_from_the_seed(tmp_path, kind):
    model = toy(tmp_path, kind).model
    canvas = Canvas.infill(IDS, mask_id=61)

    def run(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        if kind == "mdlm":
            return [*ddpm_cache(model.denoiser(), canvas, steps=5, generator=generator)]
        return [*semi_ar(model.denoiser(), canvas, block_length=4, generator=generator, **options)]

    for options in [{}] if kind == "mdlm" else [{}, {"steps": 6}, {"top_p": 0.5}]:
        steps = run(0, **options)
        assert [step.index for step in steps] == list(range(len(steps)))
        last = steps[-1].ids_BS
        assert not (last == 61).any()
        assert torch.equal(last[IDS != 61], IDS[IDS != 61])
        assert torch.equal(run(0, **options)[-1].ids_BS, last)
        assert not torch.equal(run(1, **options)[-1].ids_BS, last)
        committed = torch.stack([step.committed_BS for step in steps]).sum(0)
        assert torch.equal(committed, (IDS == 61).long())
        before = IDS
        for step in steps:
            assert torch.equal(step.before_BS, before)
            assert torch.equal(step.masked_BS, before == 61)
            assert step.confidence_BS[step.committed_BS].isfinite().all()
            before = step.ids_BS
    if kind == "bd3lm":
        assert all(int(step.committed_BS.sum(1).max()) == 1 for step in run(0))


def test_untrained_twins(tmp_path, kind):
    loaded = toy(tmp_path, kind)
    twins = untrained_twins(loaded)
    assert [*twins] == ["initialised", "permuted"]
    for twin in twins.values():
        logits = twin.model(IDS).logits
        assert logits.isfinite().all()
        assert (logits - loaded.model(IDS).logits)[..., :61].abs().max() > 1e-3
        assert logits.softmax(-1)[..., 61].max() == 0
    fresh = twins["initialised"].model
    assert all(not layer.modulation.weight.any() for layer in fresh.model.layers)


REFUSED = {
    "sink": (
        lambda folder: load(folder, sink_kind="token", sink_count=1),
        r"a DiT \(MDLM, BD3-LM\) takes no added sink .* sink_kind='token'",
    ),
    "gate": (
        lambda folder: load(folder, gate="elementwise"),
        "takes no added sink and no gate, got .* gate='elementwise'",
    ),
    "training": (
        lambda folder: load(folder).model.train(),
        r"DiT\) can be loaded, .* but not trained",
    ),
    "resizing": (
        lambda folder: load(folder).model.resize_token_embeddings(70),
        r"ends with \[MASK\] and is not",
    ),
    "as_diffusion": (
        lambda folder: load(folder, as_diffusion=True),
        "denoises already; leave it out",
    ),
    "liger": (
        lambda folder: load(folder).model(IDS, labels=IDS % 61, liger=True),
        "Liger's loss has no bias",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_built_is_refused_by_name(tmp_path, kind, what):
    act, message = REFUSED[what]
    folder = getattr(toys, kind)(tmp_path)[0]
    refused(message, act, folder)


def test_samplers_and_losses_refuse_what_they_cannot_do(tmp_path):
    mdlm, bd3lm = toy(tmp_path, "mdlm").model, toy(tmp_path, "bd3lm").model
    generator = torch.Generator()
    padded = Canvas.infill(IDS[:, 2:], mask_id=61, attention_BS=torch.arange(10).expand(2, 10) > 0)
    refused(
        "knows no padding", next, ddpm_cache(mdlm.denoiser(), padded, steps=3, generator=generator)
    )
    refused(
        "steps must be at least 1",
        next,
        ddpm_cache(mdlm.denoiser(), Canvas.infill(IDS, mask_id=61), steps=0, generator=generator),
    )
    refused(
        "blocks of 4 tokens, but has 10",
        published_loss,
        bd3lm,
        IDS[:, :10].clamp(max=60),
        generator=generator,
    )


def write_with_tokenizer(folder, kind):
    """A folder with a tokenizer that has no [MASK], as GPT-2's has none: its id is the one behind
    the tokens.
    """
    tokenizer = tiny_tokenizer()
    written = getattr(toys, kind)(folder, vocab_size=len(tokenizer) + 1)[0]
    tokenizer.save_pretrained(written)
    (Path(written) / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    return written


def test_held_out_loss_of_text(tmp_path, kind):
    loaded = load(write_with_tokenizer(tmp_path, kind))
    assert loaded.special.mask == len(loaded.needed_tokenizer())
    rows = torch.randint(5, 200, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = row_losses(loaded, rows)
    assert losses.isfinite().all()
    assert not torch.equal(row_losses(loaded, rows, edits=[MaskSinks(k=1)]), losses)


@pytest.mark.slow
def test_trace_from_the_command_line(tmp_path, kind):
    folder = write_with_tokenizer(tmp_path / "model", kind)
    # one block of attention, or a part of it, is decoded at a time
    command = [
        "trace",
        "The old man",
        "--model",
        str(folder),
        "--new-tokens",
        "8",
        "--out",
        str(tmp_path / "run"),
    ]
    command += ["--block-length", "4"]
    assert main(command) == 0
    run = open_run(tmp_path / "run")
    columns = len(tiny_tokenizer()("The old man")["input_ids"]) + 8
    assert run.array("attention", "received", part=0).shape[-1] == columns
