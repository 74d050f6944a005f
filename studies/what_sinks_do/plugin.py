"""The plug-in of the study what_sinks_do.py: the neurons of a sink moved to another position
(registers without training), reference values of sinks, and pooled values.

sinklab trace --plugin studies/what_sinks_do/plugin.py --edits move_neurons:file=FILE
"""

# B batch, H query heads, S positions that run or keys, D head dim, F neurons of a layer,
# N neurons that are moved
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sinklab import BlockKeys, intervene
from sinklab.core.instrument import Call, Listener, Removal
from sinklab.core.instrument.edits.edit import Edit
from sinklab.core.instrument.edits.intervention import InterventionLog
from sinklab.core.registry import interventions, removals
from sinklab.lab.measures.values import ValueRemoval, other_keys, reference_values
from sinklab.lab.scoring.hidden_states import Part, StateHandler


@torch.no_grad()
def save_neurons(
    model: nn.Module,
    file: str | Path,
    position: int,
    *args: Any,
    count: int = 10,
    seed: int | None = None,
    module: str = "mlp.down_proj",
    **kwargs: Any,
) -> None:
    """Run ``model(*args, **kwargs)`` once, and write for `MoveNeurons` the neurons, over all
    layers, whose activation at a position exceeds their median over positions most, in units of
    what they add to the hidden state (after arXiv 2506.08010).

    Args:
        model: a model whose decoder layers have a linear `module`.
        file: path to write.
        position: that of the sink among those that run, in the first row.
        count: number of neurons.
        seed: neurons are drawn with it in their place, a control; None for those of the sink.
        module: module of a decoder layer that reads the activations of its neurons.
    """
    acts: dict[str, Tensor] = {}
    sizes: dict[str, Tensor] = {}

    def keep(path: str, reader: Any, given: tuple[Any, ...]) -> None:
        # added sinks run alone, before the text
        acts[path] = given[0][0].clone()
        sizes[path] = reader.weight.norm(dim=0)

    with ExitStack() as hooks:
        for path, reader in model.named_modules():
            if path.endswith(module):
                hooks.callback(reader.register_forward_pre_hook(partial(keep, path)).remove)
        model(*args, **kwargs)
    act_LSF = torch.stack(list(acts.values()))
    values_L2F = torch.stack([act_LSF[:, position], act_LSF.median(1).values], 1)
    excess_LF = values_L2F.diff(dim=1)[:, 0].abs() * torch.stack(list(sizes.values()))
    chosen_N = excess_LF.flatten().topk(count).indices
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        chosen_N = torch.randperm(excess_LF.numel(), generator=generator)[:count]
    layer_N, neuron_N = torch.unravel_index(chosen_N, excess_LF.shape)
    kept = {"position": torch.tensor(position)}
    for number, path in enumerate(acts):
        mine_N = neuron_N[layer_N == number]
        kept[f"{path}/neurons"] = mine_N
        kept[f"{path}/values"] = values_L2F[number, :, mine_N]
    save_file(kept, str(file))


@interventions.register("move_neurons")
@dataclass(frozen=True, kw_only=True)
class MoveNeurons(Edit):
    """The neurons that make a sink, moved to another position (arXiv 2506.08010): there they get
    the activations that they had at the sink, and at the sink their median over positions.

    Does the sink follow? Nothing is trained. Raises ValueError in a call for a file that cannot be
    read.
    """

    file: str
    """A file of `save_neurons`."""
    to: int = 0
    """Canvas position that gets them, such as that of an added token."""
    layers: ClassVar[None] = None  # type: ignore[misc]
    heads: ClassVar[None] = None  # type: ignore[misc]

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """The listener that carries this intervention out and writes into the log."""
        return NeuronHandler(self, log, forwards_per_step)

    def reader(self, layer: str) -> str:
        """Path of the module that reads the neurons to move behind this attention; empty if none
        are there.
        """
        holder = layer.split("#")[0].rpartition(".")[0]
        for name, tensor in reference_values(self.file).items():
            if name.startswith(f"{holder}.") and tensor.numel():
                return name.rpartition("/")[0]
        return ""

    def change(self, act_BSF: Tensor, call: Call) -> Part:
        """New activations at both positions, of those that run."""
        saved, path = reference_values(self.file), self.reader(call.layer)
        place = call.positions_Q.tolist()
        moved = (self.to, int(saved["position"]))
        there = [number for number, position in enumerate(moved) if position in place]
        if not there:
            return None
        rows = torch.tensor([place.index(moved[number]) for number in there])
        part = (slice(None), rows[:, None], saved[f"{path}/neurons"])
        return part, saved[f"{path}/values"][there].to(act_BSF).expand(len(act_BSF), -1, -1)


class NeuronHandler(StateHandler):
    """Edits what a module reads, the activations of neurons, in place of hidden states."""

    def __init__(self, intervention: Any, log: InterventionLog, forwards_per_step: int) -> None:
        self.hooks = ExitStack()
        super().__init__(intervention, log, forwards_per_step)
        self.of_states = ""

    def prepare(self, call: Call) -> None:
        path = self.intervention.reader(call.layer)
        if path:
            reader = self.tap.model.get_submodule(path)
            hook = reader.register_forward_pre_hook(partial(self._read, call))
            self.hooks.callback(hook.remove)

    def _read(self, call: Call, _module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        self.hooks.close()
        return (self.changed(given[0], call.layer, call), *given[1:])

    def finish(self) -> None:
        super().finish()
        self.hooks.close()

    def discard(self) -> None:
        super().discard()
        self.hooks.close()


@removals.register("pool_value")
@dataclass(frozen=True)
class PoolValue(ValueRemoval):
    """Keep the mass on the keys, and give each the mean value of the other keys that are seen.

    Raises ValueError in a call whose queries see different keys.
    """

    def values(
        self, call: Call, value_BHSD: Tensor, blocked_BHS: Tensor, random_BHS: Tensor
    ) -> Tensor:
        others_BHS = other_keys(call, blocked_BHS, "pool_value")
        weights_BHS = others_BHS.to(value_BHSD) / others_BHS.sum(-1, keepdim=True).clamp(min=1)
        return (weights_BHS.unsqueeze(-1) * value_BHSD).sum(2, keepdim=True)


@removals.register("sum_values")
@dataclass(frozen=True)
class SumValues(Removal):
    """Take nothing away, and add the values of the chosen keys up."""

    sums: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Layer -> sum of the values (H, D), and number of keys (H)."""

    def apply(self, call: Call, blocked_BHS: Tensor, random_BHS: Tensor) -> Call:
        value_BHSD = call.expand_kv(call.v_BKSD.detach().double())
        sum_HD = value_BHSD.masked_fill(~blocked_BHS.unsqueeze(-1), 0.0).sum((0, 2))
        before_HD, known_H = self.sums.get(
            call.layer, (torch.zeros_like(sum_HD), blocked_BHS.new_zeros(1).long())
        )
        self.sums[call.layer] = before_HD + sum_HD, known_H + blocked_BHS.sum((0, 2))
        return call


@torch.no_grad()
def save_reference_values(
    model: nn.Module, edit: BlockKeys, texts: Iterable[Tensor], file: str | Path
) -> Path:
    """Write the mean value of the keys that an edit chooses in reference texts, for the removal
    "mean_value".

    Args:
        model: a model with a forward that takes ids (B, S).
        edit: which keys, of which layers and heads, such as ``MaskSinks(k=1)``; they are chosen in
            each text itself.
        texts: ids, int64 (B, S), with masks if the model is to see some.
        file: path to write: a tensor (H, D) a layer, NaN for a head in which no key was chosen.

    Raises:
        ValueError: if no key was chosen in any text.
    """
    summed = SumValues()
    with intervene(model, replace(edit, when="now", how=summed, limit=None), measure=False):
        for ids_BS in texts:
            model(ids_BS)
    if not any(bool(count_H.any()) for _, count_H in summed.sums.values()):
        raise ValueError(
            f"{edit} chose no key in the reference texts; give more texts, or another edit"
        )
    tensors = {
        layer: (sum_HD / count_H[:, None]).float().cpu().contiguous()
        for layer, (sum_HD, count_H) in summed.sums.items()
    }
    save_file(tensors, str(file))
    return Path(file)
