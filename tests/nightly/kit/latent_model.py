"""A model plugin without tokens, as small as one can be: a decision is a denoising step with a Gaussian.

A payload has `condition` [D] and `path` [T + 1, D]: the states from noise to sample, T decisions.

Shape legend: T steps of a path, N decisions of a micro-batch, D width.
"""

import json
import math
from pathlib import Path

import attrs
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from cosmos_core.errors import CheckpointError, DataError
from cosmos_core.protocols import (
    Decided,
    MicroBatch,
    ModelCapabilities,
    ModelFacts,
    NoOptions,
    Provider,
    hookimpl,
)
from cosmos_core.types import Array, Payload

SIGMA = 0.5


def array(values):
    return Array(dtype="float32", shape=values.shape, data=np.ascontiguousarray(values, np.float32).tobytes())


def view(payload, name):
    held = payload.arrays[name]
    return torch.frombuffer(bytearray(held.data), dtype=torch.float32).view(held.shape)


class Drift(torch.nn.Module):
    """Where a step leads to."""

    def __init__(self, width):
        super().__init__()
        self.state = torch.nn.Linear(width, width)
        self.condition = torch.nn.Linear(width, width, bias=False)

    def forward(self, states_ND, conditions_ND):
        dtype = self.state.weight.dtype
        return torch.tanh(self.state(states_ND.to(dtype)) + self.condition(conditions_ND.to(dtype)))


@attrs.frozen
class Denoiser:
    options: NoOptions
    context: object

    @property
    def width(self):
        if self.context.path is None:
            return self.context.config["width"]
        return json.loads((Path(self.context.path) / "config.json").read_text())["width"]

    def facts(self):
        return ModelFacts(
            architecture="Drift",
            num_parameters=2 * self.width**2 + self.width,
            num_layers=1,
            hidden_size=self.width,
            context_length=64,
        )

    def build(self, *, seed, dtype, device, layout=None):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = Drift(self.width)
        if self.context.path is not None:
            module.load_state_dict(load_file(Path(self.context.path) / "model.safetensors"))
        return module.to(dtype=dtype, device=device).eval()

    def encode(self, prompt):
        if not isinstance(prompt.text, str):
            raise DataError("the prompt is a chat; give plain text")
        letters = np.frombuffer(prompt.text.encode().ljust(self.width)[: self.width], np.uint8)
        return Payload(kind="latents", arrays={"condition": array(letters / 128 - 0.5)})

    def encode_demonstration(self, prompt):
        raise DataError(f"the row {prompt.text!r} has no path to imitate")

    def decode(self, payload):
        return ""

    def pack(self, payloads, *, budget, multiple=1, is_uniform=False):
        bins = []
        for index, payload in enumerate(payloads):
            if payload.kind != "latents":
                raise DataError(f"payload {index} is of kind {payload.kind!r}; give latents")
            steps = payload.arrays["path"].shape[0] - 1
            if steps > budget:
                raise DataError(f"payload {index} of {steps} steps exceeds the budget of {budget}")
            if not bins or sum(size for _, size in bins[-1]) + steps > budget:
                bins.append([])
            bins[-1].append((index, steps))
        return [self._lay_out(payloads, members) for members in bins]

    def decide(
        self,
        module,
        batch,
        *,
        temperature,
        with_entropy=False,
        prediction_for=None,
        kl_target=None,
        with_features=False,
    ):
        held = batch.inputs
        means_ND = module(held["states"], held["conditions"]).float()
        variance = SIGMA**2 * temperature
        errors_N = (held["targets"] - means_ND).square().sum(-1)
        constant = 0.5 * self.width * math.log(2 * math.pi * variance)
        entropy_N = torch.full_like(errors_N, constant + self.width / 2).detach()
        apart_N = None
        if kl_target is not None:
            # Between Gaussians of one variance, both ways round.
            apart_N = (means_ND - kl_target.prediction["means"]).square().sum(-1) / (2 * variance)
        return Decided(
            logprobs_N=-errors_N / (2 * variance) - constant,
            entropy_N=entropy_N if with_entropy else None,
            prediction=None if prediction_for is None else {"means": means_ND.detach()},
            divergence_N=apart_N,
            features_ND=means_ND if with_features else None,
        )

    def export(self, module, directory, *, dtype=None):
        if dtype is None and self.context.path is not None:
            dtype = next(iter(load_file(Path(self.context.path) / "model.safetensors").values())).dtype
        tensors = {name: each.to(dtype or each.dtype) for name, each in module.state_dict().items()}
        if any(torch.isinf(each).any() for each in tensors.values()):
            raise CheckpointError(f"a tensor has values beyond {dtype}")
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({"width": self.width}))
        return [next(iter(tensors.values())).dtype]

    def prepare(self, corpus, tokenizer):
        raise AssertionError("there is nothing to make")

    def _lay_out(self, payloads, members):
        paths = [view(payloads[index], "path") for index, _ in members]
        conditions = [view(payloads[index], "condition").expand(size, -1) for index, size in members]
        return MicroBatch(
            sequences=tuple(index for index, _ in members),
            num_decisions=tuple(size for _, size in members),
            num_units=sum(size for _, size in members),
            inputs={
                "states": torch.cat([path[:-1] for path in paths]),
                "targets": torch.cat([path[1:] for path in paths]),
                "conditions": torch.cat(conditions),
            },
        )


@hookimpl
def cosmos_model():
    return Provider(
        create=Denoiser,
        capabilities=ModelCapabilities(
            payload_kinds=frozenset({"latents"}), divergences=frozenset({"forward-kl", "reverse-kl"}), features=True
        ),
    )
