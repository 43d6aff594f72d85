"""The protocol of models, with transitions under guidance, and regressions."""

import math

import numpy as np
import pytest
import torch

from cosmos_core.policy.modeling.diffusion import payload_of, tensor_of
from cosmos_core.policy.modeling.diffusion.noising import noise_of
from cosmos_core.protocols import Decided
from cosmos_core.testing import ModelConformance
from cosmos_core.types import Prompt
from cosmos_model_cosmos_predict.tiny import CONFIG, OPTIONS

SHAPE = (3, 4, 8, 8)


# Attention's norms have float32 weights under autocast, which torch says once.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
class TestCosmosPredict(ModelConformance):
    plugin = "cosmos-predict"
    config = CONFIG
    tokenizer = None
    temperatures = (1.0,)

    @pytest.fixture
    def options(self):
        return OPTIONS

    @pytest.fixture
    def prompts(self, tmp_path):
        film = tmp_path / "film.npy"
        np.save(film, np.random.default_rng(0).integers(0, 255, (5, 8, 8, 3), np.uint8))
        return tuple(Prompt(text=words, demonstration=str(film)) for words in ("red", "two words"))

    @pytest.fixture
    def payloads(self, model, prompts):
        drawn = torch.Generator().manual_seed(0)
        first, second = (model.encode_demonstration(each) for each in prompts)
        transitions = {
            "states": torch.randn((3, *SHAPE), generator=drawn),
            "offsets": 0.1 * torch.randn((2, *SHAPE), generator=drawn),
            "places": torch.tensor([[0, 1], [1, 2]], dtype=torch.int32),
            "times": torch.tensor([0.9, 0.4]),
            "steps": torch.tensor([[0.9, -0.3, 0.5], [0.8, -0.2, 0.7]]),
            "guidance": torch.tensor(2.0),
        }
        text = tensor_of(model.encode(prompts[0]), "text", torch.float32, (None, None))
        return (
            model.noised(first, 3, num_decisions=3),
            payload_of({"text": text, **transitions}),
            model.noised(second, 4, num_decisions=1),
        )

    def reference(self, model, module, payloads, *, temperature):
        with torch.no_grad():
            return [self.decisions(model, module, payload) for payload in payloads]

    def decisions(self, model, module, payload):
        text = tensor_of(payload, "text", torch.float32, (None, 16))
        text = torch.nn.functional.pad(text, (0, 0, 0, 4 - len(text)))
        logprobs, entropies = [], []
        for number, time in enumerate(tensor_of(payload, "times", torch.float32, (None,))):
            if "states" not in payload.arrays:
                sample = tensor_of(payload, "sample", torch.float32, SHAPE)
                noise = noise_of(int(tensor_of(payload, "noise_seed", torch.int64, ())), number, SHAPE)
                found = velocity(module, (1 - time) * sample + time * noise, time, text)
                logprobs.append(-((found - (noise - sample)) ** 2).mean())
                entropies.append(0.5 * math.log(2 * math.pi * math.e * 0.5))
                continue
            states = tensor_of(payload, "states", torch.float32, (3, *SHAPE))
            a, b, std = tensor_of(payload, "steps", torch.float32, (2, 3))[number]
            pair = [velocity(module, states[number], time, each) for each in (text, torch.zeros(4, 16))]
            mean = a * states[number] + b * (pair[0] + 2 * (pair[0] - pair[1]))
            mean += tensor_of(payload, "offsets", torch.float32, (2, *SHAPE))[number]
            normal = torch.distributions.Normal(mean, std)
            logprobs.append(normal.log_prob(states[number + 1]).mean())
            entropies.append(normal.entropy().mean())
        return Decided(logprobs_N=torch.stack(logprobs), entropy_N=torch.tensor(entropies))

    def load_exported(self, directory):
        from diffusers import CosmosTransformer3DModel

        return CosmosTransformer3DModel.from_pretrained(directory / "transformer").state_dict()


def velocity(module, latents, time, text):
    return module(
        hidden_states=latents[None],
        timestep=time[None],
        encoder_hidden_states=text[None],
        condition_mask=torch.zeros(1, 1, *SHAPE[1:]),
        return_dict=False,
    )[0][0]
