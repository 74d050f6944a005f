"""What the live page asks of the model: one text, and the same text with a sink blocked; told
step by step.
"""

# B batch rows, S canvas positions, L layers, H heads, K keys (added sinks first, then canvas
# positions)
import base64
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from sinklab.core.instrument import BlockKeys, intervene, position_states, trace
from sinklab.core.sinks import even_share
from sinklab.core.subject import Canvas, DecodingSettings, Step
from sinklab.lab.analysis.counts import main_sink, mean_weight
from sinklab.lab.analysis.tokens import characters, token_class
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.checkpoints.tokens import special_roles, token_text
from sinklab.lab.measures import MaskPositions
from sinklab.lab.reports.payload import LOW, LogScale, head_maps
from sinklab.lab.scoring.prompts import encode
from sinklab.lab.scoring.requests import needs_mask
from sinklab.lab.scoring.writing import WritingRequest, canvas_of
from sinklab.lab.studies.about import text_of

Message = dict[str, Any]
ROWS = 16
"""canvases that are read at once for the loss; between two such lots a request can be given up"""


class LiveText:
    """One text of one page. `write` and `block` are generators of messages; each `next` runs the
    model about once.
    """

    def __init__(self, loaded: Loaded, settings: DecodingSettings, *, chat: bool = False) -> None:
        """Raises ValueError for a model that does not fill masks, and settings that it cannot be
        watched under.
        """
        needs_mask(loaded, "the live page")
        if loaded.family != "diffusion":
            raise ValueError(
                f"the live page shows denoising, but {loaded.name} is {loaded.family}; take a "
                "model as tiny"
            )
        self.loaded, self.settings, self.chat = loaded, settings, chat
        self.model: Any = loaded.model
        self._roles, self._text = (
            special_roles(loaded),
            cache(partial(token_text, loaded.tokenizer)),
        )
        self._steps: list[Step] = []
        self._mains: list[list[int]] = []
        self._is_written = False

    def about(self) -> Message:
        """The model, for the page."""
        backbone = self.loaded.backbone
        sizes = {"layers": backbone.num_hidden_layers, "heads": backbone.num_attention_heads}
        return {"name": self.loaded.name, **sizes, "parameters": self.model.num_parameters()}

    def write(self, prompt: str, new_tokens: int, seed: int) -> Iterator[Message]:
        """Write behind a prompt. Raises ValueError for what does not fit the model."""
        self._steps, self._mains, self._is_written = [], [], False
        request = WritingRequest(encode(self.loaded, prompt, self.chat).ids)
        self._canvas: Canvas = canvas_of(self.loaded, [request], new_tokens).to(self.model.device)
        self._seeded = replace(self.settings, seed=seed)
        for step, recording in self._pass():
            yield (told := self._told(step, recording)) | {"pass": "plain"}
            self._steps.append(step)
            self._mains.append(told["main"])
        self._is_written = True
        yield {"kind": "written", "pass": "plain", **self._finished(self._steps[-1])}

    def block(
        self, step: int, key: int, layer: int | None = None, head: int | None = None
    ) -> Iterator[Message]:
        """The same text with one key blocked from a step on, in one head, in a layer, or (None)
        everywhere.

        The steps before are made again with the same draws and must come out the same; those from
        there on are told, and at the end what it cost: the mean loss (nats) of the tokens that the
        plain text committed from the step on, each read on the plain canvas of its step, without
        and with the key blocked.

        Args:
            step: of the plain text, from 0.
            key: column of the keys, added sinks first.
            layer: its number, from 0.
            head: of this layer.

        Raises:
            ValueError: before a text is written, for what is not there, and where the replay
                differs.
        """
        if not self._is_written:
            raise ValueError("a sink is blocked in a text that is written; write one first")
        about, plain = self.about(), self._steps
        added = self._keys - self._canvas.ids_BS.shape[1]
        limits = {
            "step": len(plain),
            "key": self._keys,
            "layer": about["layers"],
            "head": about["heads"],
        }
        for name, given in {"step": step, "key": key, "layer": layer, "head": head}.items():
            if given is not None and not 0 <= given < limits[name]:
                raise ValueError(
                    f"the {name} is 0 to {limits[name] - 1}, but is {given}; choose one that is "
                    "there"
                )
        where: Any = {
            name: None if one is None else (one,)
            for name, one in (("layers", layer), ("heads", head))
        }
        where |= {"added": (key,)} if key < added else {"positions": (key - added,)}
        mains: list[list[int]] = []
        for again, recording in self._pass(MaskPositions(**where, steps=(step, None)), first=step):
            if again.index >= step:
                yield (told := self._told(again, recording)) | {"pass": "edited"}
                mains.append(told["main"])
            elif not torch.equal(again.ids_BS, plain[again.index].ids_BS):
                raise ValueError(
                    f"step {again.index} came out otherwise than before; this machine does not "
                    "repeat"
                )
            else:
                yield {"kind": "again", "step": again.index, "total": len(plain)}
        measured = {
            "plain_loss": (yield from self._loss(plain[step:], "plain")),
            "edited_loss": (yield from self._loss(plain[step:], "edited", MaskPositions(**where))),
            "tokens": int(sum(one.committed_BS.sum() for one in plain[step:])),
            **self._moved(self._mains[step:], mains, key),
        }
        yield {"kind": "written", "pass": "edited", **self._finished(again), "measured": measured}

    @staticmethod
    def _moved(before: list[list[int]], after: list[list[int]], key: int) -> Message:
        """What became of main sinks, over heads and steps: shares, and where those on the key
        went.
        """
        both = min(len(before), len(after))
        before_N, after_N = (np.concatenate(mains[:both]) - 1 for mains in (before, after))
        places, heads = np.unique(after_N[(before_N == key) & (after_N >= 0)], return_counts=True)
        went = places[(-heads).argsort(kind="stable")[:3]].tolist()
        return {
            "held": float((before_N == key).mean()),
            "moved": float((before_N != after_N).mean()),
            "went": went,
        }

    def _pass(self, *edits: BlockKeys, first: int = 0) -> Iterator[tuple[Step, Any]]:
        """The steps of the text, each with its trace from `first` on. Watched throughout, so that
        all run alike.
        """
        forwards = 2 if self._seeded.cfg_scale else 1
        with intervene(self.model, *edits, forwards_per_step=forwards, measure=False):
            steps = self.model.denoise(self._canvas, self._seeded)
            self._weights: list[np.ndarray] = []
            for index in count():
                is_told = index >= first
                watch = (
                    trace(self.model, ("received",), steps=(0,), allow_empty=True)
                    if is_told
                    else nullcontext()
                )
                with watch as recording:
                    if (step := next(steps, None)) is None:
                        return
                yield step, recording

    def _loss(
        self, steps: Sequence[Step], name: str, *edits: BlockKeys
    ) -> Generator[Message, None, float]:
        """Mean loss (nats) of the tokens that these steps committed, each on the canvas that its
        step read; `name` of the pass.
        """
        total, tokens = 0.0, 0
        with intervene(self.model, *edits, measure=False) as log:
            for start in range(0, len(steps), ROWS):
                log.reset()
                some = steps[start : start + ROWS]
                before_BS, committed_BS, after_BS = (
                    torch.cat([getattr(one, name) for one in some])
                    for name in ("before_BS", "committed_BS", "ids_BS")
                )
                real_BS = self._canvas.attention_BS.expand_as(before_BS)
                denoiser = self.model.denoiser(None if bool(real_BS.all()) else real_BS, plain=True)
                logits_MV = denoiser(before_BS, committed_BS).float()
                total += float(cross_entropy(logits_MV, after_BS[committed_BS], reduction="sum"))
                tokens += len(logits_MV)
                yield {
                    "kind": "measuring",
                    "pass": name,
                    "step": start + len(some),
                    "total": len(steps),
                }
        return total / max(tokens, 1)

    def _told(self, step: Step, recording: Any) -> Message:
        """A step as the page draws it: what it read, and what every key received."""
        received_LHK, visible_LK = (
            value[0][0].float().numpy()
            for value in (recording.received, recording.visible_by_layer)
        )
        a_LHK, seen_L1K = even_share(
            received_LHK, visible_LK[:, None], recording.positions[0][0].float().numpy()
        )
        a_LHK = np.where(seen_L1K > 0, a_LHK, np.nan)
        self._keys, ids_S = a_LHK.shape[-1], step.before_BS[0].tolist()
        # no key receives more than all that there is
        scale = LogScale(LOW, max(4.0, math.ceil(math.log2(self._keys))))
        mean_LK = a_LHK.mean(1)
        share_LHK = np.divide(a_LHK, seen_L1K, out=np.zeros_like(a_LHK), where=seen_L1K > 0)
        self._weights.append(share_LHK.max(-1))
        return {
            "kind": "step",
            "step": step.index,
            "total": step.total or int(self._canvas.open_BS.sum()),
            "block": step.block,
            "added": self._keys - len(ids_S),
            "keys": self._keys,
            "scale": scale.as_json(),
            "codes": {
                name: _packed(scale.encode(a))
                for name, a in (("heads", a_LHK), ("mean", np.stack([mean_LK.mean(0), *mean_LK])))
            },
            "main": (main_sink(mean_weight(a_LHK, seen_L1K)) + 1).ravel().tolist(),
            "visible": [round(float(seen_L1K.max()))],
            # as classes of age count, from 1, but for what was committed just now, which the page
            # sees; 0 is padding
            "ages": np.array([1, 3, 4, 0])[
                position_states(self._canvas, step.before_BS)[0].cpu()
            ].tolist(),
            "tokens": self._tokens(ids_S),
            "head_maps": head_maps(100 * np.mean(self._weights, 0)),
        }

    def _tokens(self, ids: Sequence[int]) -> list[list[Any]]:
        """[id, text, class, role] of each; of tokens that spell one character together the first
        has it.
        """
        texts, roles = [self._text(one) for one in ids], [self._roles.get(one, "") for one in ids]
        classes = map(token_class, texts, roles)
        return [list(token) for token in zip(ids, characters(texts), classes, roles, strict=True)]

    def _finished(self, last: Step) -> Message:
        """What was written: as a text, and token by token."""
        written_S = last.ids_BS[0][self._canvas.open_BS[0]].cpu()
        return {
            "steps": last.index + 1,
            "text": text_of(self.loaded, written_S),
            "tokens": self._tokens(written_S.tolist()),
        }


def _packed(codes: np.ndarray) -> str:
    return base64.b64encode(codes.tobytes()).decode("ascii")
