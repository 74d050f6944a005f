"""Real sizes without real weights: what loading, tracing and training models of published shapes
take.

    python benchmarks/real_shapes.py [--device cuda] [--only llada dream llada2 scratch lora] \\
        [--quick]

Random bfloat16 weights in the published format, in files of 4 GB that are deleted afterwards
(TMPDIR says where: 16 GB for a model of 8B). Every line is a process of its own, so that its peak
memory is its own.

llada, dream, llada2: shapes of LLaDA-8B-Instruct and Dream-v0-Instruct-7B, and 5 of the 20 layers
of LLaDA2.0-mini (256 experts each). `load`; one denoising step of 64 positions plain, traced (are
the logits the same to the bit?) and with the most attended key of every head hidden;
`sinklab trace` with its run folder, and the page of `sinklab report`; on a GPU `sinklab curve` of
48 rows of 128 tokens. scratch: the 472M model of
«One Token Is Enough», one and two rows of 2,048 tokens, with and without activation checkpointing,
plain and with a sink: peak memory beside 16 bytes a parameter (weight, gradient, two moments), and
how much another row takes. lora: `sinklab train --train-only lora` of the LLaDA shape on one row of
2,048 tokens, of 2 and 4 layers (the line through them extrapolated to 32) and on a GPU of all 32.
`--quick`: tiny sizes, nothing written: does it run?
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import memory_mb, reset_peak, synchronize, write_result
from safetensors.torch import save_file

LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "d_model": 4096,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "mlp_hidden_size": 12288,
    "embedding_size": 126464,
    "vocab_size": 126464,
    "max_sequence_length": 4096,
    "mask_token_id": 126336,
    "eos_token_id": 126081,
    "pad_token_id": 126081,
    "weight_tying": False,
    "torch_dtype": "bfloat16",
}
DREAM = {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "mask_token_id": 151666,
    "eos_token_id": 151643,
    "pad_token_id": 151643,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# a quarter of LLaDA2.0-mini's 20 layers; its experts are a parameter each in the published files
LLADA2 = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "hidden_act": "silu",
    "rope_theta": 600000,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "vocab_size": 157184,
    "max_position_embeddings": 32768,
    "mask_token_id": 156895,
    "eos_token_id": 156892,
    "pad_token_id": 156892,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SMALL_LLADA = {
    "d_model": 64,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "mlp_hidden_size": 96,
    "embedding_size": 320,
}
SMALL_LLADA |= {
    "vocab_size": 320,
    "max_sequence_length": 128,
    "mask_token_id": 304,
    "eos_token_id": 293,
}
SMALL_DREAM = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
SMALL_DREAM |= {
    "intermediate_size": 96,
    "vocab_size": 320,
    "mask_token_id": 304,
    "eos_token_id": 293,
}
SMALL_LLADA2 = SMALL_DREAM | {"head_dim": 16, "num_experts": 16, "moe_intermediate_size": 32}
SHAPES = {
    "llada": (LLADA, SMALL_LLADA | {"pad_token_id": 293}),
    "dream": (DREAM, SMALL_DREAM | {"pad_token_id": 293}),
    "llada2": (LLADA2, SMALL_LLADA2 | {"pad_token_id": 293}),
}
FILE_BYTES = 4 * 10**9


def write_folder(
    folder: Path, config: dict[str, Any], device: str = "cpu", without: tuple[int, ...] = ()
) -> int:
    """A checkpoint in a published format with weights drawn from N(0, 0.02²) and norms of one;
    gives its bytes.

    The head's rows of the ids `without` are zero, so that they are never the likeliest among many.
    """
    from sinklab.lab.checkpoints import families, materialize

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    plan = families.read(config, str(folder))
    model = materialize.empty_model(families.configured(plan, {}, str(folder)), str(folder))
    draw = torch.Generator(device).manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name in materialize.names_to_fill(model):
        like = model.state_dict()[name]
        tensor = torch.empty(like.shape, dtype=getattr(torch, config["torch_dtype"]), device=device)
        if like.ndim > 1:
            tensor.normal_(0, 0.02, generator=draw)
        else:
            tensor.fill_("bias" not in name)
        if name == "lm_head.weight":
            tensor[list(without)] = 0.0
        source, tensor = plan.family.source(plan, name)[0], tensor.cpu()
        if source in shards[-1]:
            # queries, keys and values of one tensor
            shards[-1][source] = torch.cat([shards[-1][source], tensor])
            continue
        if sum(one.nbytes for one in shards[-1].values()) + tensor.nbytes > FILE_BYTES:
            _flush(folder, shards)
        shards[-1] |= _each_expert(source, tensor) if ".experts." in source else {source: tensor}
    _flush(folder, shards)
    files = sorted(folder.glob("*.safetensors"))
    where = {
        name: f"part-{number}.safetensors"
        for number, names in enumerate(shards[:-1])
        for name in names
    }
    total = sum(file.stat().st_size for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(folder, config)
    return total


def _each_expert(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The matrices of a layer's experts, one by one as published."""
    start, _, kind = name.rpartition(".")
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    pieces = [dict(zip(kinds, expert.chunk(len(kinds)), strict=True)) for expert in tensor]
    return {
        f"{start}.{number}.{key}.weight": piece
        for number, of in enumerate(pieces)
        for key, piece in of.items()
    }


def _flush(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    save_file(shards[-1], folder / f"part-{len(shards) - 1}.safetensors", metadata={"format": "pt"})
    # names are enough from here on
    shards[-1] = dict.fromkeys(shards[-1], torch.empty(0))
    shards.append({})


def write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """A word an id, so that there is text to print."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(config["vocab_size"])}
    special = {"mask_token": "mask_token_id", "eos_token": "eos_token_id"}
    special = {f"<{name}>": config[key] for name, key in special.items()}
    words = {
        word: number for word, number in words.items() if number not in special.values()
    } | special
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        mask_token="<mask_token>",
        eos_token="<eos_token>",
        unk_token="w0",
    ).save_pretrained(folder)


def seconds(run: Callable[[], object], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return round(time.perf_counter() - start, 3)


def loaded(folder: str, device: str) -> tuple[Any, dict[str, Any]]:
    import sinklab

    reset_peak(device)
    found: list[Any] = []
    taken = seconds(lambda: found.append(sinklab.load(folder, dtype="auto", device=device)), device)
    weights = sum(one.nbytes for one in found[0].model.parameters()) / 1e9
    return found[0], {
        "load_s": taken,
        "weights_gb": round(weights, 2),
        "load_peak_gb": peak_gb(device),
    }


def peak_gb(device: str) -> float:
    return round(memory_mb(device)["peak"] / 1e3, 2)


def step(folder: str, device: str, positions: int) -> dict[str, Any]:
    """Load, and one evaluation plain, traced and masked."""
    from sinklab.core.instrument import intervene, trace
    from sinklab.lab.measures import MaskSinks

    lm, found = loaded(folder, device)
    draw = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(3, 250, (1, positions), generator=draw)
    ids_BS[0, positions // 2 :] = lm.special.mask
    ids_BS = ids_BS.to(device)
    logits: dict[str, Any] = {}

    def once(name: str) -> None:
        logits[name] = lm.model(ids_BS).logits

    with torch.inference_mode():
        once("warm")
        found["plain_s"] = seconds(lambda: once("plain"), device)
        with trace(lm.model) as recording:
            found["traced_s"] = seconds(lambda: once("traced"), device)
        with intervene(lm.model, MaskSinks(k=1)):
            once("seen")  # the step that chooses
            found["masked_s"] = seconds(lambda: once("masked"), device)
    received = recording.received
    found |= {
        "positions": positions,
        "traced_equals_plain": torch.equal(logits["plain"], logits["traced"]),
    }
    found |= {"masked_differs": not torch.equal(logits["plain"], logits["masked"])}
    return found | {"received_shape": list(received[-1].shape), "peak_gb": peak_gb(device)}


def page(folder: str, device: str, positions: int) -> dict[str, Any]:
    """`sinklab trace` and `sinklab report`, as they are typed."""
    from sinklab.lab.cli import main as command

    out = Path(folder).with_name("run")
    prompt = " ".join(f"w{number}" for number in range(3, 3 + positions // 2))
    given = [
        "trace",
        prompt,
        "--model",
        folder,
        "--dtype",
        "auto",
        "--out",
        str(out),
        "--device",
        device,
    ]
    given += ["--new-tokens", str(positions // 2), "--steps", "2"]
    traced = seconds(lambda: command(given), device)
    drawn = seconds(lambda: command(["report", str(out), "--out", str(out / "page")]), device)
    size = max(file.stat().st_size for file in (out / "page").rglob("*.html"))
    return {
        "trace_s": traced,
        "report_s": drawn,
        "page_mb": round(size / 1e6, 2),
        "peak_gb": peak_gb(device),
    }


def curve(folder: str, device: str, positions: int) -> dict[str, Any]:
    """`sinklab curve` of 48 rows of 128 tokens (4 of 16 where steps have 16 positions): k = 0, 1,
    5, 10, sinks and random keys.
    """
    from sinklab.lab.cli import main as command

    room = Path(folder).parent
    rows, length, ks = ("4", "16", "0 1 2") if positions == 16 else ("48", "128", "0 1 5 10")
    corpus = room / "corpus.txt"
    corpus.write_text(" ".join(f"w{7 * word % 240 + 3}" for word in range(48 * 128 + 1)))
    given = ["curve", "--model", folder, "--dtype", "auto", "--device", device]
    given += ["--heldout", str(corpus), "--rows", rows, "--length", length, "--ks", *ks.split()]
    given += ["--controls", "sinks", "random", "--no-twin", "--out", str(room / "curve")]
    reset_peak(device)
    return {"curve_s": seconds(lambda: command(given), device), "peak_gb": peak_gb(device)}


def train_peak(device: str, room: str, settings: Any, **fields: Any) -> dict[str, Any]:
    """Three steps of a training run as `sinklab train` makes it, and the most memory that they
    took.
    """
    from dataclasses import replace

    from sinklab.lab.training import train

    corpus = Path(room) / "corpus.txt"
    corpus.write_text(
        "\n".join(
            " ".join(f"w{(7 * row + word) % 240 + 3}" for word in range(200)) for row in range(400)
        )
    )
    once = {
        "steps": 3,
        "heldout": None,
        "heldout_rows": 1,
        "monitor_every": 0,
        "compile": False,
    }
    # the text has no sets to choose from
    once |= {
        "only": None,
        "corpus": str(corpus),
        "out": tempfile.mkdtemp(dir=room),
        "save_every": 10**6,
    }
    reset_peak(device)
    run = replace(settings, **once, **fields)
    taken = seconds(lambda: train(run, progress=lambda line: None), device)
    return {"run_s": taken, "peak_gb": peak_gb(device)}


def scratch(
    device: str, room: str, quick: bool, rows: int, variant: str, checkpointing: bool
) -> dict[str, Any]:
    from sinklab.lab.training.settings import recipe

    tokenizer = Path(room) / "tokenizer"
    write_tokenizer(
        tokenizer,
        {"vocab_size": 300 if quick else 32000, "mask_token_id": 290, "eos_token_id": 291},
    )
    small = (
        {"hidden_size": 64, "layers": 2, "heads": 4, "mlp_size": 96, "length": 32} if quick else {}
    )
    given = {
        "batch": rows,
        "micro_batch": rows,
        "gradient_checkpointing": checkpointing,
        "tokenizer": str(tokenizer),
    }
    return train_peak(device, room, recipe("scratch-472m", variant), **given, **small)


def lora(folder: str, device: str, room: str, length: int) -> dict[str, Any]:
    from sinklab.lab.training import TrainSettings

    given = {
        "init_from": folder,
        "train_only": "lora",
        "length": length,
        "batch": 1,
        "micro_batch": 1,
        "bf16": True,
    }
    return train_peak(device, room, TrainSettings(), **given, gradient_checkpointing=True)


STAGES: dict[str, Callable[..., dict[str, Any]]] = {
    "step": step,
    "page": page,
    "curve": curve,
    "scratch": scratch,
    "lora": lora,
}


def alone(stage: str, **given: Any) -> dict[str, Any]:
    """A stage in a process of its own; what it gives is its last line."""
    command = [sys.executable, __file__, "--stage", stage, "--given", json.dumps(given)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    found = (
        json.loads(done.stdout.splitlines()[-1])
        if done.returncode == 0
        else {"failed": done.returncode}
    )
    print(
        stage,
        {key: value for key, value in given.items() if key not in ("folder", "room")},
        found,
        flush=True,
    )
    return found


def measured(only: list[str], device: str, quick: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    positions, length = (16, 32) if quick else (64, 2048)
    with tempfile.TemporaryDirectory() as place:
        for name in [one for one in only if one in SHAPES]:
            config, small = SHAPES[name]
            config = {**config, **small} if quick else config
            folder = Path(place) / name / "model"
            start = time.perf_counter()
            size = write_folder(folder, config, device)
            written = {
                "files_gb": round(size / 1e9, 2),
                "write_s": round(time.perf_counter() - start, 1),
            }
            result[name] = written | {
                stage: alone(stage, folder=str(folder), device=device, positions=positions)
                for stage in ("step", "page", *(["curve"] if quick or device == "cuda" else []))
            }
            subprocess.run(["rm", "-rf", str(folder.parent)], check=True)
        if "lora" in only:
            result["lora"] = {}
            for layers in (2, 4, *([32] if device == "cuda" else [])):
                config = {**LLADA, **(SHAPES["llada"][1] if quick else {}), "n_layers": layers}
                folder = Path(place) / f"lora-{layers}" / "model"
                write_folder(folder, config, device)
                result["lora"][layers] = alone(
                    "lora",
                    folder=str(folder),
                    device=device,
                    room=str(folder.parent),
                    length=length,
                )
                subprocess.run(["rm", "-rf", str(folder.parent)], check=True)
            result["lora"]["32, extrapolated_gb"] = extrapolated(result["lora"])
        if "scratch" in only:
            result["scratch"] = {}
            for variant in ("plain", "sink"):
                for checkpointing in (False, True):
                    for rows in (1, 2):
                        given = {"rows": rows, "variant": variant, "checkpointing": checkpointing}
                        found = alone("scratch", device=device, room=place, quick=quick, **given)
                        result["scratch"][
                            f"{variant}, {rows} rows, checkpointing {checkpointing}"
                        ] = found
    return result


def extrapolated(found: dict[Any, Any], layers: int = 32) -> float | None:
    """The line through 2 and 4 layers."""
    two, four = (found[number].get("peak_gb") for number in (2, 4))
    return None if None in (two, four) else round(two + (four - two) / 2 * (layers - 2), 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*SHAPES, "scratch", "lora"),
        default=[*SHAPES, "scratch", "lora"],
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, nothing written: does it run?"
    )
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--given", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        print(json.dumps(STAGES[options.stage](**options.given)))
        return
    result = measured(options.only, options.device, options.quick)
    if not options.quick:
        whole = {"what": WHAT, "results": result}
        print(f"written to {write_result('real_shapes', whole, options.device)}")


WHAT = (
    "random bfloat16 weights of published shapes; GB are 1e9 bytes: of the process on a CPU, "
    "allocated on a GPU"
)

if __name__ == "__main__":
    main()
