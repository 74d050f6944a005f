"""A screen of heads in one pass, before keys are blocked: which depend on their strongest key?

Blocking a key of weight p and value v changes a row's output o to o + p (o − v) / (1 − p). To first
order the loss rises by the product of that change with the gradient of the loss, summed over rows:
attribution patching (arXiv 2310.10348; its errors: AtP*, arXiv 2403.00745) of an edit with a closed
form. One forward and one backward serve all heads, and each keeps O(S) numbers. It is worst where
p is large, which is at sinks: block the first ones for real. A head that needs but a part of its
key's weight is missed (studies/what_sinks_do.md, question 10).
"""

# B batch, R rows (a text under one mask), T texts, L layers, H query heads, Q queries, S keys,
# D head dim
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.received import row_logsumexp
from sinklab.core.instrument import Call, Listener
from sinklab.core.instrument.routes import tapped
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.scoring.arms import BATCH, Together, together


class _Screen(Listener):
    """Keeps the output of every attention call, and the change of it by a blocked key."""

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.changes_BHQD: dict[str, Tensor] = {}

    def observe(self, call: Call, out: Tensor) -> None:
        self.outputs[call.layer] = out
        with torch.no_grad():
            strongest_BHS = call.top(call.received_BHS, 1)
            without = call.block(strongest_BHS)
            lse_BHQ, left_BHQ = (
                row_logsumexp(one.q_BHQD, one.k_BKSD, **one.masking) for one in (call, without)
            )
            # p / (1 − p); a row that sees nothing else stays as it is
            weight_BHQ = torch.expm1(lse_BHQ - left_BHQ).nan_to_num(posinf=0.0)
            o_BHQD = call.by_head(out.detach())
            v_BH1D = strongest_BHS.unsqueeze(2).to(o_BHQD) @ call.expand_kv(call.v_BKSD)
            change_BHQD = weight_BHQ.to(o_BHQD).unsqueeze(-1) * (o_BHQD - v_BH1D)
            self.changes_BHQD[call.layer] = change_BHQD


def first_order_costs(model: Any, losses: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The rise of each row's loss, to first order, if the strongest key of one head alone is
    blocked: by layer, (B, H).

    Args:
        model: the model.
        losses: runs it once, without `torch.no_grad`, and returns the loss of each row, (B,).

    Raises:
        ValueError: if an attention call has no gradient.
    """
    screen = _Screen()
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    hooks = []
    if embeddings is not None:
        hooks.append(embeddings.register_forward_hook(lambda *given: given[-1].requires_grad_()))
    try:
        with torch.inference_mode(False), torch.enable_grad(), tapped(model, screen):
            total = losses().sum()
            outputs = [*screen.outputs.values()]
            if not (outputs and all(out.requires_grad for out in outputs)):
                raise ValueError(
                    "the screen takes gradients of every attention call, but one has none: give a "
                    "model with get_input_embeddings() and losses that it computes"
                )
            gradients = torch.autograd.grad(total, outputs)
    finally:
        for hook in hooks:
            hook.remove()
    found = {}
    for (layer, change_BHQD), own in zip(screen.changes_BHQD.items(), gradients, strict=True):
        own_BHQD = own.reshape(change_BHQD.shape)
        found[layer] = (own_BHQD * change_BHQD).sum((-2, -1)).float()
    return found


def screen(
    loaded: Loaded, texts: Sequence[Sequence[int]], *, batch: int = BATCH, **how: Any
) -> Tensor:
    """First-order costs of all heads in the loss of each text, (T, L, H): the losses of
    `arm_losses`, which takes the same arguments (read, samples, seed, first).
    """
    found = []
    for rows in together(loaded, texts, batch=batch, **how):
        read_RS = rows.read_TS[rows.text_R]
        weight_RS = rows.weight_R[:, None] * read_RS / read_RS.sum(1, keepdim=True)
        costs = []
        for start in range(0, len(rows.places), batch):
            part = slice(start, start + batch)

            def losses(
                rows: Together = rows, part: slice = part, weight_RS: Tensor = weight_RS
            ) -> Tensor:
                return (rows.nats(part, gradient=True) * weight_RS[part]).sum(1)

            costs.append(torch.stack([*first_order_costs(loaded.model, losses).values()], 1))
        costs_RLH = torch.cat(costs).double().cpu()
        total_TLH = costs_RLH.new_zeros(len(rows.numbers), *costs_RLH.shape[1:])
        found.append(total_TLH.index_add_(0, rows.text_R, costs_RLH))
    return torch.cat(found)
