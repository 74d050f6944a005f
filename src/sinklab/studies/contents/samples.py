"""One text of `sinklab probe`: written under observation, states of sinks and of matched positions kept."""

# L layers, H heads, K keys (sink columns first), S text positions, P pairs
# N sampled states, D hidden size, L layers, S canvas positions, K keys, T sampled steps
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sinklab.errors import unknown
from sinklab.probing.recording import Recording
from sinklab.probing.tracing import trace
from sinklab.registry import rules
from sinklab.scoring.task import Task
from sinklab.scoring.writing import Moment
from sinklab.sinks.rules import DEFAULT, Excess, Rule, find_sinks
from sinklab.sinks.states import MASKED, PROMPT
from sinklab.studies.contents.lens import LogitLens, ResidualStates, residual_states
from sinklab.studies.contents.study import ContentsSettings

PLACES = ("block", "future", "committed", "prompt")
"""Where a position stands: masked in the block that is written, masked to the right of it, written, given."""
STRONGEST = "strongest"
"""Chosen in place of a rule."""


def chosen_rule(choose: str, epsilon: float) -> Rule | None:
    """The rule that is called ``choose`` in the settings; None stands for the strongest keys, sinks or not.

    Raises:
        ValueError: for an unknown rule, and what the rule refuses, such as a negative epsilon.
    """
    if choose == STRONGEST:
        return None
    if (name := choose.partition(":")[0]) not in rules:
        raise unknown("way to choose sinks", name, (*rules, STRONGEST))
    return Excess(epsilon) if choose == "excess" else rules.parse(choose)


def places_of(state_S: np.ndarray, block: int, block_length: int | None) -> np.ndarray:
    """The number in `PLACES` of every position, int8 (S,).

    Args:
        state_S: 0 masked, 1 committed, 2 prompt.
        block: that is written now.
        block_length: open positions of a block; None means that there is one block.
    """
    rank_S = np.cumsum(state_S != 2) - 1
    block_S = np.zeros_like(rank_S) if block_length is None else rank_S // block_length
    return np.select([state_S == 2, state_S == 1, block_S > block], [3, 2, 1], 0).astype(np.int8)


def sink_heads(
    received_LHK: np.ndarray,
    place_S: np.ndarray,
    *,
    visible_LK: np.ndarray | None = None,
    rule: Rule | None = DEFAULT,
) -> np.ndarray:
    """In how many heads of a layer each text position is a sink, int64 (L, S).

    Added sink columns take part in the count and are no answer. Without a rule: in each head the key of each place that
    receives most, however little that is; a place of fewer than two positions has none.

    Raises:
        ValueError: for fewer keys than positions.
    """
    added = received_LHK.shape[-1] - len(place_S)
    if added < 0:
        raise ValueError(f"there are {len(place_S)} positions and must be as many keys, got {received_LHK.shape[-1]}")
    if rule is not None:
        seen = None if visible_LK is None else visible_LK[:, None]
        return np.asarray(find_sinks(received_LHK, rule, visible=seen))[..., added:].sum(1)
    count_LS = np.zeros((received_LHK.shape[0], len(place_S)), np.int64)
    for place in range(len(PLACES)):
        there = np.flatnonzero(place_S == place)
        if len(there) >= 2:
            best_LH = there[received_LHK[..., added + there].argmax(-1)]
            for layer, best_H in enumerate(best_LH):
                np.add.at(count_LS[layer], best_H, 1)
    return count_LS


def matched_pairs(
    sink_S: np.ndarray, place_S: np.ndarray, token_S: np.ndarray, random: np.random.Generator, most: int
) -> np.ndarray:
    """Some sinks of every place, each with a non-sink of the same place: int64 (P, 2), sink and match.

    The match holds the same token where there is one left, and is the nearest of those; of two as near, one is drawn.
    Nothing is matched twice; a sink without a match left is dropped.

    Args:
        sink_S: which positions are sinks in this layer and step.
        place_S: where each position stands.
        token_S: what stands there now.
        random: draws which sinks are taken.
        most: pairs of a place at most.
    """
    pairs = []
    for place in range(len(PLACES)):
        here_S = place_S == place
        free = np.flatnonzero(here_S & ~sink_S).tolist()
        for sink in random.permutation(np.flatnonzero(here_S & sink_S))[:most]:
            if not free:
                break
            others = np.array(free)
            cost = np.abs(others - sink) + len(sink_S) * (token_S[others] != token_S[sink])
            match = int(random.choice(others[cost == cost.min()]))
            free.remove(match)
            pairs.append((int(sink), match))
    return np.array(pairs, np.int64).reshape(-1, 2)


POPULATIONS = ("sink", "matched")


@dataclass
class Sampled:
    """What was kept of one text. Memory is that of the sampled states, twice: as they are, and after the last layer."""

    layers: tuple[int, ...]
    rows: dict[int, list[pd.DataFrame]] = field(default_factory=lambda: defaultdict(list))
    """Layer -> rows of the table ``samples``, a frame a step."""
    states: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    last: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    looks: list[dict[str, Any]] = field(default_factory=list)
    added: list[dict[str, Any]] = field(default_factory=list)
    added_states: list[Tensor] = field(default_factory=list)
    blocks: dict[int, int] = field(default_factory=dict)
    """Sampled step -> the block that was written."""
    committed: dict[int, Tensor] = field(default_factory=dict)
    """Sampled step -> mean embedding of what was written before it; NaN before anything was."""
    final_S: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    open_S: np.ndarray = field(default_factory=lambda: np.empty(0, bool))


def sample_text(
    task: Task, settings: ContentsSettings, layers: tuple[int, ...], random: np.random.Generator, step: Any
) -> Sampled:
    """Write a text and sample its states at every n-th step; `step` is called after each evaluation."""
    kept = Sampled(layers)
    moment: Moment | None = None

    @contextmanager
    def watch(index: int) -> Iterator[tuple[Recording, ResidualStates] | None]:
        if index % settings.every:
            yield None
            return
        model = task.loaded.model
        # a second forward of the step (guidance) is not measured
        with residual_states(model) as states, trace(model, ("received",), steps=(0,)) as recording:
            yield recording, states

    with task.writing() as writer:
        for one in writer.steps(watch):
            moment = one.moment()
            if one.seen is not None:
                recording, states = one.seen
                _sample(kept, task, settings, moment, recording, states, random)
            step()
    if moment is not None:
        kept.open_S, kept.final_S = moment.state_S != PROMPT, moment.ids_S.copy()
        kept.final_S[kept.open_S] = moment.written
    return kept


def _sample(
    kept: Sampled,
    task: Task,
    settings: ContentsSettings,
    moment: Moment,
    recording: Recording,
    states: ResidualStates,
    random: np.random.Generator,
) -> None:
    received_LHK = recording.received[0][0].numpy()
    visible_LK = recording.visible_by_layer[0][0].numpy()
    place_S = places_of(moment.state_S, moment.block, settings.block_length)
    rule = chosen_rule(settings.choose, settings.epsilon)
    heads_LS = sink_heads(received_LHK, place_S, visible_LK=visible_LK, rule=rule)
    open_S, masked_S = moment.state_S != PROMPT, moment.state_S == MASKED
    about: dict[str, Any] = {
        "step": moment.index,
        "block": moment.block,
        "progress": float(masked_S.sum() / open_S.sum()),
        "frequent": int(np.bincount(moment.ids_S[~masked_S]).argmax()) if not masked_S.all() else -1,
    }
    embedding = _embedding(task)
    ids_W = torch.tensor(moment.ids_S[open_S & ~masked_S], device=embedding.device)
    kept.blocks[moment.index] = moment.block
    kept.committed[moment.index] = embedding[ids_W].float().mean(0).cpu()
    for layer in kept.layers:
        # what leaves the last layer is read at the sinks of the last layer
        attention = min(layer, len(heads_LS) - 1)
        sink_S = heads_LS[attention] > 0
        pairs_P2 = matched_pairs(sink_S, place_S, moment.ids_S, random, settings.pairs)
        kept.looks += _looks(about["step"], layer, place_S, sink_S, pairs_P2)
        at_N = pairs_P2.reshape(-1)
        if len(at_N):
            first = sum(map(len, kept.rows[layer])) // 2
            row = {"layer": layer, "pair": first + np.arange(len(at_N)) // 2}
            row |= {"population": np.resize(POPULATIONS, len(at_N)), "place": np.array(PLACES)[place_S[at_N]]}
            row |= {"position": at_N, "token_now": moment.ids_S[at_N], "heads": heads_LS[attention, at_N]}
            row["received"] = received_LHK[attention][:, at_N - len(place_S)].max(0).astype(float)
            kept.rows[layer].append(pd.DataFrame(about | row))
        for part, depth in ((kept.states, layer), (kept.last, states.layers)):
            depth_SD = states.depths_BSD[depth][0]
            part[layer].append(depth_SD[torch.as_tensor(at_N, device=depth_SD.device)].float().cpu())
    _sample_added(kept, received_LHK, recording.prefix, states, moment.index)


def _embedding(task: Task) -> Tensor:
    model: Any = task.loaded.model
    return model.get_input_embeddings().weight.detach()


def _looks(step: int, layer: int, place_S: np.ndarray, sink_S: np.ndarray, pairs_P2: np.ndarray) -> list[dict]:
    """How many positions, sinks and pairs there are at each place that is there."""
    among = {"positions": place_S, "sinks": place_S[sink_S], "pairs": place_S[pairs_P2[:, 0]]}
    counts = {name: np.bincount(places, minlength=len(PLACES)).tolist() for name, places in among.items()}
    return [
        {"step": step, "layer": layer, "place": place} | {name: found[number] for name, found in counts.items()}
        for number, place in enumerate(PLACES)
        if counts["positions"][number]
    ]


def _sample_added(kept: Sampled, received_LHK: np.ndarray, prefix: int, states: ResidualStates, step: int) -> None:
    """What the added sinks receive, and their own states whenever the model ran them (not at all for kv sinks)."""
    share_LN = received_LHK[..., :prefix].mean(1) / received_LHK.sum(-1).mean(1, keepdims=True)
    kept.added += [
        {"step": step, "layer": layer, "sink": sink, "share": float(share_LN[layer, sink])}
        for layer in range(len(share_LN))
        for sink in range(prefix)
    ]
    if states.added_ND:
        kept.added_states.append(torch.stack(states.added_ND).cpu())


def samples_table(kept: Sampled, text: int, lens: LogitLens, shift: int) -> pd.DataFrame:
    """One row a sampled state, layer by layer, with what the lens reads in it; `shift` is that of the logits.

    `token` is what was finally written at the position; the lens is asked for that of position + shift (−1, and NaN in
    its measures, behind the end).
    """
    tables = []
    for layer, rows in kept.rows.items():
        table = pd.concat(rows, ignore_index=True)
        table.insert(0, "text", text)
        position_N = table["position"].to_numpy()
        wanted_N = np.append(kept.final_S, -1)[np.minimum(position_N + shift, len(kept.final_S))]
        states_ND, last_ND = torch.cat(kept.states[layer]), torch.cat(kept.last[layer])
        found = lens.measures(states_ND, last_ND, torch.tensor(wanted_N), torch.tensor(table["frequent"].to_numpy()))
        found["norm"] = states_ND.norm(dim=1)
        measures = {name: values_N.double().numpy() for name, values_N in found.items()}
        tables.append(table.assign(token=kept.final_S[position_N], **measures))
    return pd.concat(tables, ignore_index=True)


def content_arrays(
    kept: Sampled, task: Task, settings: ContentsSettings
) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """States (N, D) of each layer in the order of the table; and per sampled step (T, D) the mean embeddings of what is
    written and of the next block, NaN where nothing is written, and in the last block. With the names of their axes.
    """
    found = {f"layer{layer}": torch.cat(kept.states[layer]) for layer in kept.rows}
    embedding = _embedding(task)
    written = torch.tensor(kept.final_S[kept.open_S], device=embedding.device)
    length = settings.block_length or max(len(written), 1)
    means = [embedding[ids].float().mean(0).cpu() for ids in written.split(length)]
    means.append(torch.full_like(means[0], torch.nan))
    found["committed"] = torch.stack([*kept.committed.values()])
    found["next"] = torch.stack([means[block + 1] for block in kept.blocks.values()])
    found["step_number"] = torch.tensor([*kept.blocks], dtype=torch.int32)
    dims: dict[str, tuple[str, ...]] = {name: (f"sample_{name}", "hidden") for name in found}
    dims |= {"committed": ("step", "hidden"), "next": ("step", "hidden"), "step_number": ("step",)}
    if kept.added_states:
        found["added"], dims["added"] = kept.added_states[0], ("depth", "sink", "hidden")
    return found, dims
