"""Each engine as a function of its work, in the fastest setting that it has on the device.

All sample at temperature 1 from the whole vocabulary and give the log-prob of each unit. cosmos-core's engines draw
from a seed for each request; the others are measured without, which is faster for them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from serving.work import CONTEXT, DTYPES, MOST_SEATS, ON_CPU, SEATS, Done, RandomModel, Work, config_of

from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EngineContext, Request, Sampling
from cosmos_core.types import JSON, Array, Payload

Serve: TypeAlias = Callable[[Work], Done]

_VLLM: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def cosmos(name: str, **options: JSON) -> Callable[[str, str, str], Serve]:
    """An engine of cosmos-core, by its plugin's name."""

    def start(model: str, dtype: str, device: str) -> Serve:
        context = EngineContext(
            model=RandomModel(model),  # type: ignore[arg-type] - it has what engines use
            dtype=DTYPES[dtype],
            device=torch.device(device),
            max_in_flight=SEATS if model in ON_CPU else MOST_SEATS,
            context_length=CONTEXT,
            seed=0,
        )
        engine = PluginSet.load([("engine", name)]).create("engine", name, {"verify": False, **options}, context)
        engine.start()

        def serve(work: Work) -> Done:
            before = engine.stats()
            handles = engine.submit(
                [
                    Request(
                        request_id=str(index),
                        prompt=_payload(prompt),
                        sampling=Sampling(max_units=size, num_samples=work.num_samples),
                        seed=index,
                    )
                    for index, (prompt, size) in enumerate(zip(work.prompts, work.sizes, strict=True))
                ]
            )
            made = sum(generated.num_units for handle in handles for generated in handle.result())
            return Done(num_units=made, prompt_units=engine.stats().prompt_units - before.prompt_units)

        return serve

    return start


def _payload(ids: list[int]) -> Payload:
    array = Array(dtype="int32", shape=(len(ids),), data=np.asarray(ids, np.int32).tobytes())
    return Payload(kind="tokens", arrays={"prompt": array})


def vllm(model: str, dtype: str, device: str) -> Serve:
    """vLLM by itself, in this process, eager on a CPU; matrices packed for its kernels, as it does there by itself."""
    return _vllm(model, dtype, device, eager=device == "cpu")


def compiled_vllm(model: str, dtype: str, device: str) -> Serve:
    """vLLM by itself, compiled, as it is on a GPU anyway."""
    return _vllm(model, dtype, device, eager=False)


def _vllm(model: str, dtype: str, device: str, *, eager: bool) -> Serve:
    on_cpu = device == "cpu"
    os.environ.update(_VLLM)
    if eager:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        config = config_of(model)
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder)
        llm: Any = LLM(
            model=folder,
            dtype=str(DTYPES[dtype]).removeprefix("torch."),
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_model_len=CONTEXT,
            max_num_seqs=SEATS if model in ON_CPU else MOST_SEATS,
            max_num_batched_tokens=8192,
            enforce_eager=eager,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            **({"kv_cache_memory_bytes": 1 << 30} if on_cpu else {}),
        )
    torch.set_num_threads(1)

    def serve(work: Work) -> Done:
        # Samples are requests of their own, as vLLM makes them; so what each finds in the cache is told.
        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts for _ in range(work.num_samples)]
        params = [
            SamplingParams(temperature=1.0, max_tokens=size, ignore_eos=True, logprobs=0, detokenize=False)
            for size in work.sizes
            for _ in range(work.num_samples)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return Done(
            num_units=sum(len(output.outputs[0].logprobs) for output in outputs),
            prompt_units=sum(len(each.prompt_token_ids) - (each.num_cached_tokens or 0) for each in outputs),
        )

    return serve


def continuous(model: str, dtype: str, device: str) -> Serve:
    """transformers' continuous batching, its manager kept from one round to the next."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    module: Any = RandomModel(model).build(seed=0, dtype=DTYPES[dtype], device=torch.device(device))
    fed = _count_units(module)
    managers: dict[int, Any] = {}

    def manager_for(num_samples: int) -> Any:
        # How many samples a prompt has is a setting of the manager, and there is one at a time.
        if num_samples not in managers:
            while managers:
                managers.popitem()[1].stop(block=True)
            managers[num_samples] = module.init_continuous_batching(
                generation_config=GenerationConfig(
                    do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, num_return_sequences=num_samples
                ),
                continuous_batching_config=ContinuousBatchingConfig(
                    return_logprobs=True,
                    max_requests_per_batch=SEATS,
                    **({"num_blocks": 512, "page_size": 32, "max_batch_tokens": 2048} if device == "cpu" else {}),
                ),
            )
            managers[num_samples].start()
        return managers[num_samples]

    def serve(work: Work) -> Done:
        manager, before = manager_for(work.num_samples), fed[0]
        for prompt, size in zip(work.prompts, work.sizes, strict=True):
            manager.add_request(prompt, max_new_tokens=size)
        made = samples = 0
        while samples < len(work.prompts) * work.num_samples:
            output = manager.get_result(timeout=60)
            if output is None or output.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {output and output.error}")
            made, samples = made + len(output.logprobs), samples + 1
        # Every unit but a sample's last one is fed.
        return Done(num_units=made, prompt_units=fed[0] - before - (made - samples))

    return serve


def generate(model: str, dtype: str, device: str) -> Serve:
    """transformers' `generate`: one batch, padded on the left, until its longest completion is done."""
    module: Any = RandomModel(model).build(seed=0, dtype=DTYPES[dtype], device=torch.device(device))
    fed = _count_units(module)

    def serve(work: Work) -> Done:
        before, longest = fed[0], max(map(len, work.prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in work.prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in work.prompts]
        with torch.inference_mode():
            output = module.generate(
                input_ids=torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=max(work.sizes),
                num_return_sequences=work.num_samples,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                eos_token_id=None,
                return_dict_in_generate=True,
                output_scores=True,
            )
            module.compute_transition_scores(output.sequences, output.scores, normalize_logits=True).tolist()
        rows = len(work.prompts) * work.num_samples
        return Done(num_units=work.num_units, prompt_units=fed[0] - before - rows * (max(work.sizes) - 1))

    return serve


def _count_units(module: torch.nn.Module) -> list[int]:
    """Units that went through the model, as they go: one number, in a list."""
    fed = [0]

    def count(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        fed[0] += inputs[0].numel()

    module.get_input_embeddings().register_forward_pre_hook(count)  # type: ignore[operator]
    return fed


ENGINES: Final[Mapping[str, Callable[[str, str, str], Serve]]] = {
    "embedded": cosmos("embedded"),
    "embedded compiled": cosmos("embedded", compile=True),
    "embedded without graphs": cosmos("embedded", cuda_graphs=False),
    "vllm": vllm,
    "vllm compiled": compiled_vllm,
    "vllm plugin": cosmos("vllm"),
    "continuous batching": continuous,
    "generate": generate,
}
