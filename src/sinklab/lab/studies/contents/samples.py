"""One text of `sinklab probe`: written under observation, states of sinks and of matched positions
kept.
"""

# L layers, H heads, K keys (sink columns first), S text positions, P pairs
# N sampled states, D hidden size, L layers, S canvas positions, K keys, T sampled steps
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sinklab.core.probing import Recording, trace
from sinklab.core.sinks import DEFAULT, MASKED, PROMPT, Rule, find_sinks
from sinklab.lab.scoring import Moment, Task
from sinklab.lab.studies import Row
from sinklab.lab.studies.contents.lens import LogitLens, ResidualStates, residual_states
from sinklab.lab.studies.contents.study import ContentsSettings, chosen_rule

PLACES = ("block", "future", "committed", "prompt")
"""Places of a position: masked in the block that is written, masked to the right of it, written,
given.
"""


def places_of(state_S: np.ndarray, block: int, block_length: int | None) -> np.ndarray:
    """The number in `PLACES` of every position, int8 (S,).

    Args:
        state_S: 0 masked, 1 committed, 2 prompt.
        block: that is written now.
        block_length: open positions of a block; None means that there is one block.
    """
    rank_S = np.cumsum(state_S != 2) - 1
    block_S = rank_S // (block_length or len(state_S))
    return np.select([state_S == 2, state_S == 1, block_S > block], [3, 2, 1], 0).astype(np.int8)


def sink_heads(
    received_LHK: np.ndarray,
    place_S: np.ndarray,
    *,
    visible_LK: np.ndarray | None = None,
    rule: Rule | None = DEFAULT,
) -> np.ndarray:
    """Number of heads of a layer in which each text position is a sink, int64 (L, S).

    Added sink columns take part in the count and are no answer. Without a rule: in each head the
    key of each place that receives most, however little that is; a place of fewer than two
    positions has none.

    Raises:
        ValueError: for fewer keys than positions.
    """
    added = received_LHK.shape[-1] - len(place_S)
    if added < 0:
        raise ValueError(
            f"there are {len(place_S)} positions and must be as many keys, got "
            f"{received_LHK.shape[-1]}"
        )
    if rule is not None:
        seen = visible_LK
        if seen is not None:
            seen = seen[:, None]
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
    sink_S: np.ndarray,
    place_S: np.ndarray,
    token_S: np.ndarray,
    random: np.random.Generator,
    most: int,
) -> np.ndarray:
    """Some sinks of every place, each with a non-sink of the same place: int64 (P, 2), sink and
    match.

    The match holds the same token if there is one left, and is the nearest of those; of two as
    near, one is drawn. Nothing is matched twice; a sink without a match left is dropped.

    Args:
        sink_S: whether each position is a sink in this layer and step.
        place_S: the place of each position, a number in `PLACES`.
        token_S: the token of each position now.
        random: draws the sinks to keep.
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


class Sampled:
    """Samples kept of one text. Memory is that of the sampled states, twice: as they are, and after
    the last layer.
    """

    def __init__(
        self,
        task: Task,
        settings: ContentsSettings,
        layers: tuple[int, ...],
        random: np.random.Generator,
    ) -> None:
        model: Any = task.loaded.model
        self.settings = settings
        self.layers = layers
        self.random = random
        self.rule = chosen_rule(settings.choose, settings.epsilon)
        self.embedding: Tensor = model.get_input_embeddings().weight.detach()
        self.rows: dict[int, list[pd.DataFrame]] = defaultdict(list)
        """Layer -> rows of the table ``samples``, a frame a step."""
        self.states: dict[int, list[Tensor]] = defaultdict(list)
        self.last: dict[int, list[Tensor]] = defaultdict(list)
        self.looks = list[Row]()
        self.added = list[Row]()
        self.added_states: Tensor | None = None
        self.steps: list[tuple[int, int, Tensor]] = []
        """Sampled step, block that was written, mean embedding of the tokens written before it (NaN
        if none).
        """
        self.final_S = np.empty(0, np.int64)
        self.open_S = np.empty(0, bool)

    def mean(self, ids: np.ndarray) -> Tensor:
        """The mean embedding of tokens, (D,); NaN of none."""
        return self.embedding[torch.tensor(ids, device=self.embedding.device)].float().mean(0).cpu()

    def sample(self, moment: Moment, recording: Recording, states: ResidualStates) -> None:
        """Keep sinks and matched positions of one step."""
        received_LHK = recording.received[0][0].numpy()
        visible_LK = recording.visible_by_layer[0][0].numpy()
        place_S = places_of(moment.state_S, moment.block, self.settings.block_length)
        heads_LS = sink_heads(received_LHK, place_S, visible_LK=visible_LK, rule=self.rule)
        open_S = moment.state_S != PROMPT
        masked_S = moment.state_S == MASKED
        committed = self.mean(moment.ids_S[open_S & ~masked_S])
        self.steps.append((moment.index, moment.block, committed))
        about = {
            "step": moment.index,
            "block": moment.block,
            "progress": float(masked_S.sum() / open_S.sum()),
            "frequent": -1,
        }
        if not masked_S.all():
            about["frequent"] = int(np.bincount(moment.ids_S[~masked_S]).argmax())
        for layer in self.layers:
            # the output of the last layer is read at the sinks of the last layer
            attention = min(layer, len(heads_LS) - 1)
            sink_S = heads_LS[attention] > 0
            pairs_P2 = matched_pairs(
                sink_S, place_S, moment.ids_S, self.random, self.settings.pairs
            )
            some = slice(None), sink_S, pairs_P2[:, 0]
            counts = (np.bincount(place_S[part], minlength=len(PLACES)).tolist() for part in some)
            for place, positions, sinks, pairs in zip(PLACES, *counts, strict=True):
                if positions:
                    look = {"step": moment.index, "layer": layer, "place": place}
                    look |= {"positions": positions, "sinks": sinks, "pairs": pairs}
                    self.looks.append(look)
            at_N = pairs_P2.reshape(-1)
            if len(at_N):
                first = sum(map(len, self.rows[layer])) // 2
                received_HN = received_LHK[attention][:, at_N - len(place_S)]
                row = {
                    "layer": layer,
                    "pair": first + np.arange(len(at_N)) // 2,
                    "population": np.resize(POPULATIONS, len(at_N)),
                    "place": np.array(PLACES)[place_S[at_N]],
                    "position": at_N,
                    "token_now": moment.ids_S[at_N],
                    "heads": heads_LS[attention, at_N],
                    "received": received_HN.max(0).astype(float),
                }
                self.rows[layer].append(pd.DataFrame(about | row))
            for part, depth in ((self.states, layer), (self.last, states.layers)):
                part[layer].append(states.depths_BSD[depth][0][at_N].float().cpu())
        # attention of the added sinks, and their own states if the model ran them (not at all
        # for kv sinks)
        whole_L1 = received_LHK.sum(-1).mean(1, keepdims=True)
        share_LN = received_LHK[..., : recording.prefix].mean(1) / whole_L1
        self.added += [
            {"step": moment.index, "layer": layer, "sink": sink, "share": float(share)}
            for (layer, sink), share in np.ndenumerate(share_LN)
        ]
        if states.added_ND and self.added_states is None:
            self.added_states = torch.stack(states.added_ND).cpu()

    def table(self, text: int, lens: LogitLens, shift: int) -> pd.DataFrame:
        """One row a sampled state, layer by layer, with the measures of the lens; `shift` is that
        of the logits.

        `token` is the token finally written at the position; the lens is asked for that of position
        + shift (−1, and NaN in its measures, behind the end).
        """
        tables = []
        for layer, rows in self.rows.items():
            table = pd.concat(rows, ignore_index=True)
            table.insert(0, "text", text)
            position_N = table["position"].to_numpy()
            wanted_N = np.append(self.final_S, -1)[(position_N + shift).clip(max=len(self.final_S))]
            states_ND = torch.cat(self.states[layer])
            found = lens.measures(
                states_ND,
                torch.cat(self.last[layer]),
                torch.tensor(wanted_N),
                torch.tensor(table["frequent"].to_numpy()),
            )
            found["norm"] = states_ND.norm(dim=1)
            measures = {name: values_N.double().numpy() for name, values_N in found.items()}
            tables.append(table.assign(token=self.final_S[position_N], **measures))
        return pd.concat(tables, ignore_index=True)

    def arrays(self) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
        """States (N, D) of each layer in the order of the table; and per sampled step (T, D) the
        mean embeddings of the written tokens and of the next block, NaN if nothing is written, and
        in the last block. With the names of their axes.
        """
        found = {f"layer{layer}": torch.cat(self.states[layer]) for layer in self.rows}
        written_N = self.final_S[self.open_S]
        length = self.settings.block_length or len(written_N)
        means = [
            self.mean(ids) for ids in np.split(written_N, range(length, len(written_N), length))
        ]
        means.append(torch.full_like(means[0], torch.nan))
        dims: dict[str, tuple[str, ...]] = {name: (f"sample_{name}", "hidden") for name in found}
        steps, blocks, committed = zip(*self.steps, strict=True)
        found["committed"] = torch.stack(committed)
        found["next"] = torch.stack([means[block + 1] for block in blocks])
        found["step_number"] = torch.tensor(steps, dtype=torch.int32)
        dims |= dict.fromkeys(("committed", "next"), ("step", "hidden"))
        dims["step_number"] = ("step",)
        if self.added_states is not None:
            found["added"] = self.added_states
            dims["added"] = ("depth", "sink", "hidden")
        return found, dims


def sample_text(
    task: Task,
    settings: ContentsSettings,
    layers: tuple[int, ...],
    random: np.random.Generator,
    step: Any,
    whole: Sequence[Moment] = (),
) -> Sampled:
    """Write a text and sample its states at every n-th step; `step` is called after each
    evaluation.

    Args:
        whole: the steps of a text that another model wrote, which this one reads instead of writing
            its own.
    """
    kept = Sampled(task, settings, layers, random)
    for moment, seen in _steps(task, settings, whole):
        if seen is not None:
            kept.sample(moment, *seen)
        step()
    kept.open_S = moment.state_S != PROMPT
    kept.final_S = moment.ids_S.copy()
    kept.final_S[kept.open_S] = moment.written
    return kept


Watched = tuple[Recording, ResidualStates] | None


@contextmanager
def _watched(task: Task, settings: ContentsSettings, index: int) -> Iterator[Watched]:
    """Watch the model at a step, if it is sampled."""
    if index % settings.every:
        yield None
        return
    model = task.loaded.model
    # a second forward of the step (guidance) is not measured
    with residual_states(model) as states, trace(model, ("received",), steps=(0,)) as recording:
        yield recording, states


def _steps(
    task: Task, settings: ContentsSettings, whole: Sequence[Moment]
) -> Iterator[tuple[Moment, Watched]]:
    """The steps of a text that the model writes, or of a `whole` one, which it reads."""
    watch = partial(_watched, task, settings)
    if not whole:
        with task.writing() as writer:
            for one in writer.steps(watch):
                yield one.moment(), one.seen
    model: Any = task.loaded.model
    for moment in whole:
        with torch.inference_mode(), watch(moment.index) as seen:
            if seen is not None:
                ids_1S = torch.from_numpy(moment.ids_S)[None].to(model.device)
                model.denoiser()(ids_1S, ids_1S == model.config.mask_token_id)
        yield moment, seen
