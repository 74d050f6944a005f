"""From which size on do two threads pay? A forward of decoders of growing width on one thread and
on two, by turns.

    python benchmarks/threads.py [--repeats 15]

It is what `sinklab.lab.checkpoints.loading.SMALL` gives away on an idle machine. Writes a result
file.
"""

import argparse
import os
import statistics

# All cores, whatever the environment says.
os.environ.pop("OMP_NUM_THREADS", None)

import torch
from measure import interleaved, ratios, write_result
from transformers import LlamaConfig, LlamaForCausalLM

WIDTHS, LENGTHS, LAYERS = (128, 256, 384, 576, 768), (64, 256), 6


def forward(model: LlamaForCausalLM, ids_BS: torch.Tensor, threads: int) -> None:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        model(ids_BS, use_cache=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    repeats, cases = parser.parse_args().repeats, []
    for width in WIDTHS:
        sizes = {"hidden_size": width, "intermediate_size": 3 * width, "vocab_size": 4096}
        config = LlamaConfig(**sizes, num_hidden_layers=LAYERS, num_attention_heads=width // 32)
        model = LlamaForCausalLM(config).eval()
        count = sum(tensor.numel() for tensor in model.parameters())
        for length in LENGTHS:
            ids_BS = torch.randint(4096, (1, length))
            runs = {
                f"{threads} threads": lambda threads=threads, ids_BS=ids_BS, model=model: forward(
                    model, ids_BS, threads
                )
                for threads in (1, 2)
            }
            taken = interleaved(runs, repeats)
            found = {
                "width": width,
                "parameters": count,
                "length": length,
                "one_thread_s": statistics.median(taken["1 threads"]["wall_s"]),
                "two_over_one": ratios(taken, "1 threads")["2 threads"],
            }
            cases.append(found)
            print(found, flush=True)
    print(f"written to {write_result('threads', {'layers': LAYERS, 'cases': cases})}")


if __name__ == "__main__":
    main()
