"""Cost of blocking keys for the twins: of whole rows after a clean pass, and step by step under
every protocol.
"""

# B batch, S columns, T steps, V vocabulary, M masked positions
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklab.core.probing import InterventionLog, intervene
from sinklab.lab.measures import PROTOCOLS, MaskSinks, by_protocol

KEYS = (1, 2, 4, 8, 16, 24, 32, 40)
"""Keys blocked in every head of whole rows: the doses."""
STEP_KEYS = (1, 2, 4, 8, 16)
"""Keys blocked in every head when rows are revealed; their given part must have more."""
ARMS: dict[str, dict[str, Any]] = {
    "matched": {"matched": True},
    "equal_mass": {"control": "equal_mass"},
    "random": {"control": "random"},
}
"""Arms beside the most attended keys, for one key: these on the heads with a control of equal mass,
that control, and a key drawn from the others.
"""
REVEALED = 128
"""Rows that are revealed."""


def _cell(task: str, protocol: str, k: int, control: str, loss: float) -> dict[str, Any]:
    """First columns of a line of the table ``masking``."""
    return {"task": task, "protocol": protocol, "k": k, "control": control, "loss": loss}


@torch.no_grad()
def hidden(model: Any, rows: Any) -> list[dict[str, Any]]:
    """Loss of whole rows (`Rows` of run.py) by number of keys blocked and control, and the dose.

    Keys are chosen in a clean pass, per row, layer and head, by the attention they receive from all
    queries, and blocked for all queries, in a causal model and a diffusion model alike.
    """
    cells = [_cell("rows", "clean", 0, "none", float(rows.loss(model)))]
    asked: list[tuple[int, str, dict[str, Any]]] = [(k, "sinks", {}) for k in KEYS]
    asked += [(1, arm, fields) for arm, fields in ARMS.items()]
    for k, arm, fields in asked:
        with intervene(model, MaskSinks(k=k, source="clean_pass", **fields)) as log:
            with log.probing():
                rows.loss(model)
            loss = float(rows.loss(model))
        cells.append(_cell("rows", "clean", k, arm, loss) | log.dose().row())
    return cells


@torch.no_grad()
def revealed(model: Any, rows: Any, seed: int) -> list[dict[str, Any]]:
    """Loss of the second half of rows as their true tokens are revealed one a step, by protocol and
    number of keys.

    The first half is given. A causal model goes from left to right; in a diffusion model all that
    is not revealed is masked, and the order of each row is drawn from the seed, inside blocks if it
    has them. The loss is that of each token at the step that reveals it: the chain rule in one
    order, with the same least expected value for all orders.
    """
    ids_BS = rows.ids_BS[:REVEALED]
    half = ids_BS.shape[1] // 2
    order_BT = half + torch.arange(ids_BS.shape[1] - half).expand(len(ids_BS), -1)
    if rows.canvas is not None:
        drawn_BT = torch.rand(order_BT.shape, generator=torch.Generator().manual_seed(seed))
        if rows.block_length is not None:
            drawn_BT += order_BT // rows.block_length
        order_BT = half + drawn_BT.argsort(1)
    step = _steps(model, ids_BS, order_BT, None if rows.canvas is None else rows.canvas.mask_id)
    cells = [_cell("steps", "clean", 0, "none", _revealed(step, order_BT, None))]
    for protocol, k in itertools.product(PROTOCOLS, STEP_KEYS):
        with intervene(model, by_protocol(protocol, k)) as log:
            loss = _revealed(step, order_BT, log if protocol == "clean" else None)
        cells.append(_cell("steps", protocol, k, "sinks", loss) | log.dose().row())
    return cells


def _revealed(
    step: Callable[[int], Tensor], order_BT: Tensor, probed: InterventionLog | None
) -> float:
    """Mean loss over the steps; a clean pass before each if a log is given."""
    losses = []
    for number in range(order_BT.shape[1]):
        if probed is not None:
            with probed.probing():
                step(number)
        losses.append(float(step(number)))
    return sum(losses) / len(losses)


def _steps(
    model: Any, ids_BS: Tensor, order_BT: Tensor, mask_id: int | None
) -> Callable[[int], Tensor]:
    """The loss of the tokens that a step reveals; without a mask of a causal model."""

    def step(number: int) -> Tensor:
        if mask_id is None:
            place = int(order_BT[0, number])
            logits_BV = model(ids_BS[:, :place], causal=True).logits[:, -1]
            return cross_entropy(logits_BV, ids_BS[:, place])
        open_BS = torch.zeros_like(ids_BS, dtype=torch.bool).scatter(1, order_BT[:, number:], True)
        now_BS = torch.zeros_like(open_BS).scatter(1, order_BT[:, number : number + 1], True)
        logits_MV = model(ids_BS.masked_fill(open_BS, mask_id), logits_to_keep=now_BS).logits
        return cross_entropy(logits_MV, ids_BS[now_BS])

    return step
