"""Twins on Bigram-Backcopy: trained, and measured on rows that none of them has seen."""

# B batch, S columns, L layers, H heads, K keys = added sinks + S
from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, get_scheduler

from sinklab.core.diffusion import corrupt, masked_token_loss, sample_times
from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.models.sinks import tensors_of
from sinklab.core.probing import intervene, trace
from sinklab.core.sampling.canvas import Canvas
from sinklab.core.sinks import Gu
from sinklab.extras.backcopy.masking import hidden, revealed
from sinklab.extras.backcopy.source import Source
from sinklab.extras.backcopy.study import BLOCKS, BackcopySettings
from sinklab.lab.measures import MaskPositions
from sinklab.lab.records.storage import write_beside
from sinklab.lab.studies.base import Work
from sinklab.lab.training import VARIANTS, causal_loss

STAGES = {name: (name,) for name in ("causal", "diffusion", *BLOCKS)} | {
    "converted": ("causal", "diffusion")
}
# of one seed neither the rows to learn from nor those to measure on share a stream of numbers with
# the source
LEARNED, MEASURED = 1_000_000, 2_000_000
TRAINED_BY = (
    "layers",
    "heads",
    "width",
    "mlp_size",
    "steps",
    "batch",
    "lr",
    "muon_lr",
    "concentration",
)
"""Settings that a trained model depends on."""
FEWEST_MASKED = 8
"""Least number of masked queries in a row that counts in measures of attention; in blocks of fewer
than twice as many, half a block.
"""


def train_and_measure(work: Work) -> None:
    """Write a part of the tables ``models`` and ``heads`` for every model that is missing."""
    settings, count = work.settings, work.progress.counter(len(work.samples))
    for part in work.samples:
        seed, objective, variant = work.plan[part]
        work.progress.stage(f"seed {seed}, {objective}, {variant}: {settings.steps} steps")
        source = Source(seed, concentration=settings.concentration)
        model = twin(source, objective, variant, settings)
        rows = Rows.of(
            source,
            settings.rows,
            STAGES[objective][-1],
            torch.Generator().manual_seed(MEASURED + seed),
        )
        of_model = {"seed": seed, "objective": objective, "variant": variant}
        if settings.masking:
            cells = [*hidden(model, rows.by_block()), *revealed(model, rows, seed)]
            work.run.table("masking", [of_model | cell for cell in cells], part=part)
        states = {"trained": model} | untrained(source, variant, settings, model)
        lines = {state: of_model | {"state": state} for state in states}
        scores = [lines[state] | scored(one, source, rows) for state, one in states.items()]
        work.run.table("models", scores, part=part)
        looks = [
            lines[state] | head
            for state, one in states.items()
            for head in heads(one, rows.by_block())
        ]
        work.run.table("heads", looks, part=part)
        count()


def untrained(
    source: Source, variant: str, settings: BackcopySettings, model: DiffusionLM
) -> dict[str, DiffusionLM]:
    """Controls of a trained model, which discount any finding that they show as well: "fresh",
    before its training, and "permuted", with its weights permuted within each tensor.
    """
    size = model.config.block_length
    twins = {
        state: new_model(source, variant, settings, size).eval() for state in ("fresh", "permuted")
    }
    generator = torch.Generator().manual_seed(source.seed)
    twins["permuted"].load_state_dict(
        {
            name: weight.flatten()[torch.randperm(weight.numel(), generator=generator)].view_as(
                weight
            )
            for name, weight in model.state_dict().items()
        }
    )
    return twins


def new_model(
    source: Source, variant: str, settings: BackcopySettings, block_length: int | None = None
) -> DiffusionLM:
    """A twin before training; weights that the variant does not add depend on the source's seed and
    the sizes alone.
    """
    backbone = LlamaConfig(
        vocab_size=source.mask_id + 1,
        hidden_size=settings.width,
        intermediate_size=settings.mlp_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=source.length + 1,
        bos_token_id=source.start_id,
        eos_token_id=None,
    )
    torch.manual_seed(source.seed)
    fields = {"mask_token_id": source.mask_id, "block_length": block_length} | VARIANTS[variant]
    return DiffusionLM(DiffusionLMConfig(backbone, **fields))


def twin(source: Source, objective: str, variant: str, settings: BackcopySettings) -> DiffusionLM:
    """A trained twin: from ``settings.models`` if it is there, else trained and put there; a
    converted one goes on from the causal one in there.

    Raises:
        ValueError: if the model that is there was trained with other settings.
    """
    if settings.models is None:
        return trained(source, objective, variant, settings)
    path = Path(settings.models) / f"{objective}-{variant}-{source.seed}.safetensors"
    how = json.dumps({name: getattr(settings, name) for name in TRAINED_BY})
    if not path.exists():
        begun = twin(source, "causal", variant, settings) if objective == "converted" else None
        model = trained(source, objective, variant, settings, begun)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_beside(
            path, lambda part: save_file(model.state_dict(), part, metadata={"settings": how})
        )
        return model
    with safe_open(path, "pt") as file:
        before = file.metadata()["settings"]
    if before != how:
        raise ValueError(
            f"{path} was trained with {before}, and the settings are {how}; name another folder "
            "--models"
        )
    model = new_model(source, variant, settings, BLOCKS.get(objective))
    model.load_state_dict(load_file(path))
    return model.eval()


def trained(
    source: Source,
    objective: str,
    variant: str,
    settings: BackcopySettings,
    begun: DiffusionLM | None = None,
) -> DiffusionLM:
    """A twin, in evaluation mode. All of a seed see the same rows in the same order.

    begun: a model that has the stages of training but the last behind it; it is changed.
    """
    stages = STAGES[objective]
    if begun is None:
        model = new_model(source, variant, settings, BLOCKS.get(objective))
    else:
        model, stages = begun, stages[-1:]
    model.train()
    for stage in stages:
        optimizers = _optimizers(model, settings)
        schedules = [
            get_scheduler(
                "cosine_with_min_lr",
                optimizer,
                num_warmup_steps=settings.steps // 20,
                num_training_steps=settings.steps,
                scheduler_specific_kwargs={"min_lr_rate": 0.1},
            )
            for optimizer in optimizers
        ]
        generator = torch.Generator().manual_seed(LEARNED + source.seed)
        for ids_BS in source.rows(settings.steps * settings.batch, generator).split(settings.batch):
            loss = Rows.noised(source, ids_BS, stage, generator).loss(model)
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for part in (*optimizers, *schedules):
                part.step()
    return model.eval()


def _optimizers(model: DiffusionLM, settings: BackcopySettings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for all else: norms and added sinks do not
    decay.
    """
    matrices, tables, others = list[Tensor](), list[Tensor](), list[Tensor]()
    sink = tensors_of(model.config)
    for name, weight in model.named_parameters():
        if weight.ndim != 2 or name in sink:
            others.append(weight)
        elif ".layers." in name:
            matrices.append(weight)
        else:
            tables.append(weight)
    decayed = [{"params": tables, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(decayed, lr=settings.lr, betas=(0.9, 0.95))
    return [adam, torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=0.0)]


@dataclass(frozen=True)
class Rows:
    """Rows of the source, as an objective sees them."""

    ids_BS: Tensor
    canvas: Canvas | None
    """Canvas that a diffusion model reads; None for a causal model, which reads the rows
    themselves.
    """
    t_B: Tensor
    """Times of the rows, or with blocks (B, S)."""
    block_length: int | None = None
    """Tokens of a block if each block is denoised behind the clean ones before it."""
    own_BS: Tensor | None = None
    """Positions of the block, with one block of each row (`by_block`)."""

    @classmethod
    def of(cls, source: Source, count: int, stage: str, generator: torch.Generator) -> Rows:
        """New rows."""
        return cls.noised(source, source.rows(count, generator), stage, generator)

    @classmethod
    def noised(cls, source: Source, ids_BS: Tensor, stage: str, generator: torch.Generator) -> Rows:
        """These rows, with noise if the objective has some; the start token is never masked."""
        (count, length), size = ids_BS.shape, BLOCKS.get(stage)
        blocks = math.ceil(length / (size or length))
        t_B = sample_times(count * blocks, sampler="low_discrepancy", generator=generator)
        if stage == "causal":
            return cls(ids_BS, None, t_B)
        if size is not None:
            t_B = t_B.view(count, blocks).repeat_interleave(size, 1)[:, :length]
        noisy_BS, masked_BS = corrupt(
            ids_BS,
            t_B,
            mask_id=source.mask_id,
            maskable_BS=ids_BS != source.start_id,
            generator=generator,
        )
        return cls(
            ids_BS,
            Canvas(noisy_BS, torch.ones_like(masked_BS), masked_BS, source.mask_id),
            t_B,
            size,
        )

    def loss(self, model: Any) -> Tensor:
        """Nats a drawn token: of the next one, or the masked-token bound."""
        if self.canvas is None:
            return causal_loss(model, self.ids_BS)
        how = {"logits_to_keep": self.canvas.open_BS}
        if self.block_length is not None and self.own_BS is None:
            how["clean"] = self.ids_BS
        return self.bound(model(self.canvas.ids_BS, **how).logits)

    def bound(self, logits_MV: Tensor) -> Tensor:
        """The masked-token bound of these logits at the masks."""
        assert self.canvas is not None
        if self.own_BS is None:
            drawn_BS = torch.ones_like(self.canvas.open_BS)
        else:
            drawn_BS = self.own_BS.clone()
        drawn_BS[:, 0] = False
        return masked_token_loss(
            logits_MV, self.ids_BS, self.canvas.open_BS, self.t_B, maskable_BS=drawn_BS
        )

    def by_block(self) -> Rows:
        """Rows in blocks as they stand while one block of each is written, the next one in every
        row: clean before it, masks behind it. All others as they are.
        """
        if self.canvas is None or self.block_length is None:
            return self
        block_S = torch.arange(self.ids_BS.shape[1]) // self.block_length
        return self.at(torch.arange(len(self.ids_BS))[:, None] % (block_S[-1] + 1))

    def at(self, number_B1: Tensor) -> Rows:
        """These rows in blocks while the block with this number is written."""
        assert self.canvas is not None and self.block_length is not None
        block_S, canvas = torch.arange(self.ids_BS.shape[1]) // self.block_length, self.canvas
        own_BS = block_S == number_B1.expand(len(self.ids_BS), 1)
        noisy_BS = torch.where(
            own_BS, canvas.ids_BS, torch.where(block_S < number_B1, self.ids_BS, canvas.mask_id)
        )
        now = replace(canvas, ids_BS=noisy_BS, open_BS=canvas.open_BS & own_BS)
        return replace(self, canvas=now, own_BS=own_BS)

    def best(self, source: Source) -> float:
        """The loss on these rows, under this noise, of a model that knows the source."""
        canvas = self.canvas
        if canvas is None:
            return float(source.nats(self.ids_BS).mean())
        if self.block_length is None or self.own_BS is not None:
            return float(self.bound(source.posterior(canvas.ids_BS)[canvas.open_BS].log()))
        best_BSX = torch.zeros(*self.ids_BS.shape, source.tokens, dtype=torch.float64)
        for number in range(math.ceil(self.ids_BS.shape[1] / self.block_length)):
            # what a block is predicted from: the clean ones before it, and what is left of itself
            one: Any = self.at(torch.tensor([[number]]))
            best_BSX = torch.where(
                one.own_BS[..., None], source.posterior(one.canvas.ids_BS), best_BSX
            )
        return float(self.bound(best_BSX[canvas.open_BS].log()))


@torch.no_grad()
def scored(model: Any, source: Source, rows: Rows) -> dict[str, float]:
    """Loss, the best one on the same rows, the excess of the loss over it, and the loss without the
    start token's column.

    ``over``: loss / best − 1. ``hidden``: the loss with position 0 blocked for every query in every
    layer.
    """
    loss, best, looked = float(rows.loss(model)), rows.best(source), rows.by_block()
    clean = loss if looked is rows else float(looked.loss(model))
    with intervene(model, MaskPositions((0,))):
        hidden = loss + float(looked.loss(model)) - clean
    return {
        "loss": loss,
        "best": best,
        "floor": source.floor,
        "over": loss / best - 1,
        "hidden": hidden,
    }


@torch.no_grad()
def heads(model: Any, rows: Rows) -> list[dict[str, float]]:
    """Attention of every head, a line per layer and head.

    ``first``: mean weight on position 0 over the queries that count, all in a causal model, those
    under masks in a diffusion model (Gu et al.'s metric, arXiv 2410.10781). ``added``: the same of
    the added sinks together. ``strongest``: mean over rows of the largest share of these queries'
    attention that a column of text gets. ``gu``: share of rows in which that is above 0.3.
    ``norm``: value norm at position 0 over that of the other text that is not masked, mean of the
    layer's heads.
    """
    canvas, length = rows.canvas, rows.ids_BS.shape[1]
    if canvas is None:
        masked_BS = torch.zeros_like(rows.ids_BS, dtype=torch.bool)
        queries_B = torch.full((len(rows.ids_BS),), length)
        with trace(model, ("value_norm", "received")) as seen:
            model(rows.ids_BS, causal=True)
        received_BLHK = seen.received[0]
    else:
        masked_BS = canvas.open_BS
        queries_B = masked_BS.sum(1)
        with trace(model, ("value_norm", "received_by_state"), canvas=canvas) as seen:
            model.denoiser(plain=True)(canvas.ids_BS, masked_BS)
        received_BLHK = seen.values("received_by_state")[0][:, 0]
    # of few queries one column is always the strongest by far
    kept_B = queries_B >= min(FEWEST_MASKED, (rows.block_length or length) // 2)
    received_BLHK, queries_B = received_BLHK[kept_B].double(), queries_B[kept_B]
    added = seen.prefix
    strongest_BLH = received_BLHK[..., added:].amax(-1) / queries_B[:, None, None]
    norms_BLS = seen.values("value_norm")[0][..., added:].double()
    others_BS = ~masked_BS
    others_BS[:, 0] = False
    norm_L = (
        norms_BLS[..., 0].mean(0) / (norms_BLS * others_BS[:, None]).sum((0, 2)) * others_BS.sum()
    )
    found = {
        "first": received_BLHK[..., added].sum(0) / queries_B.sum(),
        "added": received_BLHK[..., :added].sum((0, -1)) / queries_B.sum(),
        "strongest": strongest_BLH.mean(0),
        "gu": (strongest_BLH > Gu().weight).double().mean(0),
        "norm": norm_L[:, None].expand(strongest_BLH.shape[1:]),
    }
    return [
        {"layer": layer, "head": head}
        | {name: float(values_LH[layer, head]) for name, values_LH in found.items()}
        for layer, head in itertools.product(*map(range, strongest_BLH.shape[1:]))
    ]
