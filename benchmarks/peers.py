"""Our block decoding beside its authors' own loops: the same weights, prompts, threads and tokens,
by turns.

    python benchmarks/peers.py --dllm FOLDER --sdar FOLDER [--size wide] [--pairs 7] [--prompts \\
        128 512] [--only sdar]
    python benchmarks/peers.py --device cuda --fast_dllm FOLDER [--pairs 5] [--prompts 512] \\
        [--python python3]

FOLDER is a checkout of the peer (or the variables SINKLAB_DLLM, SINKLAB_SDAR name it); none of its
code is kept here:

    git clone https://github.com/ZHZisZZ/dllm && git -C dllm checkout ca176752fb
    git clone https://github.com/JetAstra/SDAR && git -C SDAR checkout c2041a8333

A peer runs in a virtual environment of its own beside its folder, FOLDER-environment, made with
pinned versions unless it is there, or in that of `--python` (PEER_PATH is its PYTHONPATH);
`peer_drivers` says what is put in the place of what only CUDA has. A peer that is absent, or that
does not run, is left out by name. fast_dllm is dLLM's folder once more: its loop for LLaDA with the
caches of Fast-dLLM, held beside our prefix and dual cache.

For every cell (a prompt, a block length, tokens a step) a model with random float32 weights is
written once in the peer's published format, and both sides load it: 4 layers × 128 wide (toy), 8 ×
512 (middle), or 8 × 768 with 32,000 tokens (wide). Two processes live side by side, one thread
each, and take turns: ours first in one pair, the peer first in the next, one run without a clock
before. The ratio is taken within a pair, of processor time (wall time stands beside it): median and
range. Network calls are counted the same way on both sides, by embeddings; evaluations are those
that denoise. A ratio counts where every token is the same. A result file is written where at least
two peers ran. `--quick`: tiny model, one pair, nothing written. On a GPU: fast_dllm alone, the
shape of LLaDA-8B with random bfloat16 weights, by wall time; bfloat16 decides some tokens by the
last bit, so that different tokens are counted and the ratio stands.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measure import write_result
from real_shapes import LLADA, write_folder
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
OURS = HERE / "peer_drivers" / "ours.py"


@dataclass(frozen=True)
class Sizes:
    layers: int = 8
    width: int = 512
    heads: int = 8
    groups: int = 4
    mlp: int = 1536
    vocab: int = 4096
    new_tokens: int = 64
    prompts: tuple[int, ...] = (128, 512)
    device: str = "cpu"
    dtype: str = "float32"


SIZES = {
    "toy": Sizes(4, 128, 4, 4, 512),
    "middle": Sizes(),
    "wide": Sizes(8, 768, 12, 12, 2048, 32_000),
}
QUICK = Sizes(2, 64, 4, 2, 96, 128, 32, (64,))
ON_A_GPU = Sizes(32, 4096, 32, 32, 12288, 126464, 64, (512,), "cuda", "bfloat16")


@dataclass(frozen=True)
class Peer:
    """Who is compared with, and how."""

    name: str
    repository: str
    commit: str
    requires: tuple[str, ...]
    driver: Path
    fields: dict[str, Any]
    """Of config.json, where they differ from Qwen3's."""
    cells: tuple[tuple[int, int, str], ...]
    """Block length, tokens a step, and the cache; in attention in blocks all there is is
    "committed".
    """
    aim: float
    """Times faster that we want to be."""


COMMON = ("torch==2.13.0", "numpy==2.4.6", "safetensors==0.8.0")
PEERS = (
    Peer(
        "dllm",
        "https://github.com/ZHZisZZ/dllm",
        "ca176752fb",
        (*COMMON, "transformers==4.57.0"),
        HERE / "peer_drivers" / "dllm.py",
        {"architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3"},
        ((32, 1, "committed"), (32, 2, "committed")),
        1.3,
    ),
    Peer(
        "sdar",
        "https://github.com/JetAstra/SDAR",
        "c2041a8333",
        (*COMMON, "transformers==4.53.1", "einops==0.8.1"),
        HERE / "peer_drivers" / "sdar.py",
        {
            "architectures": ["SDARForCausalLM"],
            "model_type": "sdar",
            "block_size": 4,
            "fuse_cross_entropy": False,
        },
        ((4, 1, "committed"), (4, 2, "committed"), (16, 1, "committed")),
        1.1,
    ),
    Peer(
        "fast_dllm",
        "https://github.com/ZHZisZZ/dllm",
        "ca176752fb",
        (*COMMON, "transformers==4.57.0"),
        HERE / "peer_drivers" / "fast_dllm.py",
        {"architectures": ["LLaDAModelLM"], "model_type": "llada"},
        ((32, 1, "dual"), (32, 1, "prefix"), (32, 1, "none")),
        1.3,
    ),
)


def special_ids(sizes: Sizes) -> dict[str, int]:
    """[MASK], and an id that no text holds."""
    return {"mask_id": sizes.vocab - 1, "unused_id": sizes.vocab - 2}


def write_checkpoint(folder: Path, peer: Peer, sizes: Sizes) -> Path:
    """Random weights in the peer's published format: those of Qwen3 under its own class.

    Wide enough that no decision hangs on the last bit: heads that look at some keys, a head with
    clear favourites, and [MASK] and the unused token never among them.
    """
    if peer.name == "fast_dllm":
        return write_llada(folder, sizes)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.groups,
        head_dim=sizes.width // sizes.heads,
        max_position_embeddings=4096,
        initializer_range=sizes.width**-0.5,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(3.0)
        model.lm_head.weight.mul_(4.0)[list(special_ids(sizes).values())] = 0.0
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    rope = {
        "rope_theta": 1e6,
        "rope_scaling": None,
        "sliding_window": None,
        "max_window_layers": sizes.layers,
    }
    left_out = ("rope_parameters", "transformers_version", "dtype", "layer_types")
    fields = {key: value for key, value in config.to_diff_dict().items() if key not in left_out}
    known = {
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }
    fields = {**fields, **known, **rope, "torch_dtype": "float32", "use_cache": True, **peer.fields}
    if peer.name == "sdar":
        fields["mask_token_id"] = special_ids(sizes)["mask_id"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_llada(folder: Path, sizes: Sizes) -> Path:
    """Random weights of LLaDA's shape, in its format."""
    ids = special_ids(sizes)
    fields = {
        "d_model": sizes.width,
        "n_heads": sizes.heads,
        "n_kv_heads": sizes.heads,
        "n_layers": sizes.layers,
    }
    fields |= {
        "mlp_hidden_size": sizes.mlp,
        "embedding_size": sizes.vocab,
        "vocab_size": sizes.vocab,
    }
    fields |= {
        "mask_token_id": ids["mask_id"],
        "eos_token_id": ids["unused_id"],
        "pad_token_id": ids["unused_id"],
    }
    # what our loader takes for granted, and their class does not
    fields |= {
        "include_bias": False,
        "bias_for_layer_norm": False,
        "layer_norm_with_affine": True,
        "alibi": False,
    }
    fields |= {
        "rope_full_precision": True,
        "embedding_dropout": 0.0,
        "residual_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    write_folder(
        folder,
        {**LLADA, **fields, "torch_dtype": sizes.dtype},
        sizes.device,
        without=tuple(ids.values()),
    )
    return folder


def environment_of(peer: Peer, folder: Path) -> Path:
    """The interpreter of the peer's environment, which is made unless it is there."""
    place = folder.with_name(f"{folder.name}-environment")
    python = place / "bin" / "python"
    if not python.exists():
        print(f"{peer.name}: making {place} with {' '.join(peer.requires)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *peer.requires], check=True)
    return python


class Side:
    """A process that runs once whenever it is asked."""

    def __init__(self, python: Path | str, driver: Path, settings: Path) -> None:
        # PEER_PATH: packages of a peer that has no environment of its own
        theirs = (
            {"PYTHONPATH": os.environ["PEER_PATH"]}
            if "PEER_PATH" in os.environ and driver != OURS
            else {}
        )
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [str(python), str(HERE / "peer_process.py"), str(driver), str(settings)]
        # a peer's environment has its own packages, and none of ours
        variables = {
            key: value for key, value in os.environ.items() if key != "PYTHONPATH" or driver == OURS
        }
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": self.errors,
        }
        self.process = subprocess.Popen(
            command, text=True, env={**variables, **threads, **theirs}, **pipes
        )
        self.found: dict[str, Any] = {}
        # a peer that fails is left out, and we are not
        self.failure: type[Exception] = AssertionError if driver == OURS else RuntimeError

    def __enter__(self) -> Side:
        return self

    def __exit__(self, kind: object, *what: object) -> None:
        assert self.process.stdin and self.process.stdout
        if kind is not None:
            self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
        self.errors.close()

    def start(self) -> Side:
        """Wait until it has loaded. Raises `failure`, with the end of what it wrote, where it does
        not run.
        """
        self.found = self._answer()
        return self

    def run(self) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        if not (line := self.process.stdout.readline()):
            self.errors.seek(0)
            raise self.failure(
                "\n".join(self.errors.read().splitlines()[-8:]) or "it ended without a word"
            )
        return json.loads(line)


def compared(ours: Side, theirs: Side, pairs: int) -> dict[str, Any]:
    """Pairs of runs, who is first by turns; ratios of theirs to ours within each."""
    turns: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for pair in range(pairs):
        order = (ours, theirs) if pair % 2 == 0 else (theirs, ours)
        taken = {side: side.run() for side in order}
        turns.append((taken[ours], taken[theirs]))
    differ = max(
        sum(one != other for one, other in zip(run["tokens"], ours.found["tokens"], strict=True))
        for run in (*(run for pair in turns for run in pair), theirs.found)
    )
    result: dict[str, Any] = {"positions_that_differ": differ, "pairs": pairs}
    for clock in ("cpu_s", "wall_s"):
        each = [theirs[clock] / ours[clock] for ours, theirs in turns]
        middle = {"median": statistics.median(each), "min": min(each), "max": max(each)}
        result[f"times_faster_by_{clock[:-2]}"] = {
            key: round(value, 3) for key, value in middle.items()
        }
    for place, (name, side) in enumerate((("ours", ours), ("theirs", theirs))):
        counts = {key: side.found[key] for key in ("evaluations", "network_calls", "positions_run")}
        seconds = {
            clock: round(statistics.median(pair[place][clock] for pair in turns), 4)
            for clock in SECONDS
        }
        result[name] = {
            **counts,
            **seconds,
            "each_cpu_s": [round(pair[place]["cpu_s"], 4) for pair in turns],
        }
    return result


SECONDS = ("cpu_s", "wall_s")


def cells_of(
    peer: Peer, source: Path, sizes: Sizes, pairs: int, python: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every prompt, block length and number of tokens a step, by name."""
    clock = "cpu" if sizes.device == "cpu" else "wall"
    python = python or str(environment_of(peer, source))
    with tempfile.TemporaryDirectory() as room:
        checkpoint = write_checkpoint(Path(room) / "checkpoint", peer, sizes)
        for prompt in sizes.prompts:
            draw = torch.Generator().manual_seed(prompt)
            ids = torch.randint(0, sizes.vocab - 2, (prompt,), generator=draw).tolist()
            for block, tokens, cache in peer.cells:
                settings = Path(room) / "settings.json"
                given = {
                    "checkpoint": str(checkpoint),
                    "source": str(source),
                    "prompt": ids,
                    **special_ids(sizes),
                }
                given |= {
                    "new_tokens": sizes.new_tokens,
                    "block": block,
                    "tokens_a_step": tokens,
                    "cache": cache,
                }
                given |= {"device": sizes.device, "dtype": sizes.dtype}
                settings.write_text(json.dumps(given))
                with ExitStack() as stack:
                    ours, theirs = (
                        stack.enter_context(side)
                        for side in (
                            Side(sys.executable, OURS, settings),
                            Side(python, peer.driver, settings),
                        )
                    )
                    # one that does not run ends the other before that has loaded
                    theirs.start()
                    ours.start()
                    cell = compared(ours, theirs, pairs)
                    cell["load_average"] = os.getloadavg()[0]
                    same = sizes.device != "cpu" or not cell["positions_that_differ"]
                    cell["met"] = same and cell[f"times_faster_by_{clock}"]["median"] >= peer.aim
                    cell["versions"] = theirs.found["versions"]
                name = f"P{prompt} block {block}, {tokens} a step"
                yield name if cache == "committed" else f"{name}, {cache}", cell


def commit_of(source: Path) -> str:
    said = subprocess.run(
        ["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return said.stdout.strip() or "no repository"


def measured(
    peers: Sequence[Peer],
    sources: dict[str, Path | None],
    sizes: Sizes,
    pairs: int,
    python: str | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """What each peer that runs here came to, and why the others were left out."""
    results: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for peer in peers:
        source = sources.get(peer.name)
        if source is None or not source.is_dir():
            left_out[peer.name] = (
                f"no folder: git clone {peer.repository} and check out {peer.commit}"
            )
            continue
        cells: dict[str, Any] = {}
        try:
            for key, cell in cells_of(peer, source.resolve(), sizes, pairs, python):
                cells[key] = cell
                print(f"{peer.name} {key}: {json.dumps(cell)}", flush=True)
        except (RuntimeError, BrokenPipeError, subprocess.CalledProcessError) as error:
            left_out[peer.name] = f"it does not run here: {error}"
            continue
        about = {
            "repository": peer.repository,
            "asked_commit": peer.commit,
            "commit": commit_of(source),
        }
        results[peer.name] = {**about, "requires": peer.requires, "aim": peer.aim, "cells": cells}
    return results, left_out


def main(peers: Sequence[Peer] = PEERS) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for peer in peers:
        known = os.environ.get(f"SINKLAB_{peer.name.upper()}")
        parser.add_argument(
            f"--{peer.name}", type=Path, default=known and Path(known), help=f"{peer.repository}"
        )
    parser.add_argument(
        "--size", choices=SIZES, default="middle", help="of the model on a CPU (default: middle)"
    )
    parser.add_argument("--pairs", type=int, default=7, help="5 at least, for a result")
    parser.add_argument(
        "--prompts", type=int, nargs="+", help="in place of 128 and 512; nothing is written"
    )
    parser.add_argument(
        "--only", choices=[peer.name for peer in peers], help="one peer; nothing is written"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, one pair, nothing written: does it run?"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--python", help="the interpreter of the peers, in place of their environments"
    )
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    is_trial = bool(options.quick or (options.prompts and not on_gpu) or options.only)
    if options.pairs < 5 and not is_trial:
        parser.error("a result needs at least 5 pairs")
    sizes = QUICK if options.quick else ON_A_GPU if on_gpu else SIZES[options.size]
    if options.prompts:
        sizes = Sizes(**{**asdict(sizes), "prompts": tuple(options.prompts)})
    chosen = [
        peer
        for peer in peers
        if options.only in (None, peer.name) and (not on_gpu or peer.name == "fast_dllm")
    ]
    sources = {peer.name: getattr(options, peer.name) for peer in chosen}
    results, left_out = measured(
        chosen, sources, sizes, 1 if options.quick else options.pairs, options.python
    )
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    if is_trial:
        return
    if len(results) < (1 if on_gpu else 2):
        sys.exit(
            f"no result is written: {len(results)} of {len(peers)} peers ran, and one file needs "
            "two"
        )
    written = {"what": WHAT, "sizes": asdict(sizes), "peers": results, "left_out": left_out}
    name = "peers" if on_gpu or options.size == "middle" else f"peers_{options.size}"
    print(f"written to {write_result(name, written, options.device)}")


WHAT = (
    "times faster = seconds of the peer over ours, within a pair; greedy, fixed tokens a step, one "
    "row, one thread"
)

if __name__ == "__main__":
    main()
