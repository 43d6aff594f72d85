"""The embedded engine beside transformers' `generate`: `python benchmarks/engines.py [--rounds N] [--dtype fp32|bf16]`.

Both complete the same 64 ragged prompts with the same number of new tokens each, sampling at temperature 1, on one
thread. `generate` gets left-padded batches and runs until its longest completion is done, as users run it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from cosmos_core.protocols import EngineContext, ModelFacts, Request, Sampling
from cosmos_core.rollout.embedded.engine import EmbeddedEngine
from cosmos_core.rollout.embedded.options import EmbeddedOptions
from cosmos_core.types import Array, Payload

NUM_REQUESTS = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = {
    "2 layers x 256": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 8192,
    },
    "demo, 2 x 96": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "vocab_size": 355,
    },
}


class RandomModel:
    """A model plugin's part that the engine needs: a tiny Qwen3 that never stops by itself."""

    def __init__(self, shape: dict[str, int]) -> None:
        self.config = Qwen3Config(**shape, num_hidden_layers=2, tie_word_embeddings=True, initializer_range=0.06)

    def facts(self) -> ModelFacts:
        """What the engine asks for."""
        config = self.config
        return ModelFacts(
            architecture="Qwen3ForCausalLM",
            num_parameters=0,
            num_layers=2,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            tokenizer_size=config.vocab_size,
            context_length=1024,
            stop_ids=frozenset(),
            pad_id=0,
        )

    def build(self, *, seed: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        """Random weights."""
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(self.config, dtype=dtype).to(device).eval()


def workload(vocabulary: int) -> list[tuple[list[int], int]]:
    """Prompts of 8 to 64 tokens, and 16 to 128 new tokens for each."""
    draw = np.random.default_rng(0)
    return [
        (draw.integers(1, vocabulary, draw.integers(8, 65)).tolist(), int(draw.integers(16, 129)))
        for _ in range(NUM_REQUESTS)
    ]


def embedded(model: RandomModel, dtype: torch.dtype, work: list[tuple[list[int], int]]) -> Callable[[], int]:
    """A round of the embedded engine, which ends with the process; returns its tokens."""
    context = EngineContext(
        model=model,  # type: ignore[arg-type] - it has what the engine uses
        dtype=dtype,
        device=torch.device("cpu"),
        max_in_flight=NUM_REQUESTS,
        context_length=1024,
        seed=0,
    )
    engine = EmbeddedEngine(EmbeddedOptions(), context)
    engine.start()

    def run() -> int:
        requests = []
        for index, (ids, size) in enumerate(work):
            array = Array(dtype="int32", shape=(len(ids),), data=np.asarray(ids, np.int32).tobytes())
            prompt = Payload(kind="tokens", arrays={"prompt": array})
            requests.append(
                Request(request_id=str(index), prompt=prompt, sampling=Sampling(max_units=size), seed=index)
            )
        return sum(made.num_units for handle in engine.submit(requests) for made in handle.result())

    return run


def generate(
    model: RandomModel, dtype: torch.dtype, work: list[tuple[list[int], int]], *, with_logprobs: bool
) -> Callable[[], int]:
    """A round of `generate`; returns the tokens that were asked for, not what it computes beyond."""
    module = model.build(seed=0, dtype=dtype, device=torch.device("cpu"))
    longest = max(len(ids) for ids, _ in work)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in work])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in work])

    def run() -> int:
        with torch.inference_mode():
            output = module.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(size for _, size in work),
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                eos_token_id=None,
                return_dict_in_generate=True,
                output_scores=with_logprobs,
            )
            if with_logprobs:
                module.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)  # type: ignore[operator]
        return sum(size for _, size in work)

    return run


def measure(run: Callable[[], int], rounds: int) -> tuple[float, float]:
    """Best tokens per second of wall time and of CPU time."""
    run()
    wall, cpu = 0.0, 0.0
    for _ in range(rounds):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        tokens = run()
        wall = max(wall, tokens / (time.perf_counter() - begin))
        cpu = max(cpu, tokens / (time.process_time() - begin_cpu))
    return wall, cpu


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = DTYPES[options.dtype]
    table = Table(title=f"{NUM_REQUESTS} ragged requests, {options.dtype}, one thread")
    for column in ("model", "engine", "tokens/s", "tokens/CPU s", "times generate"):
        table.add_column(column, justify="left" if column in {"model", "engine"} else "right")
    for name, shape in SHAPES.items():
        model = RandomModel(shape)
        work = workload(shape["vocab_size"])
        runs = {
            "generate": generate(model, dtype, work, with_logprobs=False),
            "generate, with log-probs": generate(model, dtype, work, with_logprobs=True),
            "embedded, with log-probs": embedded(model, dtype, work),
        }
        results = {label: measure(run, options.rounds) for label, run in runs.items()}
        for label, (wall, cpu) in results.items():
            # By CPU time, which other work on the machine disturbs least; with one thread it is the wall time else.
            ratio = cpu / results["generate"][1]
            table.add_row(name, label, f"{wall:,.0f}", f"{cpu:,.0f}", f"{ratio:.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
