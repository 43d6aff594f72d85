"""Any world model of diffusers: what families subclass to become model plugins.

Shape legend: B latents of a batch, N decisions, C channels, T latent frames, H and W latent height and width, L tokens
of the text, E their width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from cosmos_core.errors import ConfigError, DataError, TrainingError
from cosmos_core.models.diffusion import building, checkpoint, packing
from cosmos_core.models.diffusion.arrays import Resident, payload_of, placed, tensor_of, with_tensors
from cosmos_core.models.diffusion.family import Family
from cosmos_core.models.diffusion.options import DiffusionOptions
from cosmos_core.models.diffusion.packing import Decisions
from cosmos_core.models.diffusion.rows import GIVEN, IS_GIVEN, TEXT, RowReader, frames_of
from cosmos_core.models.packing import device_of
from cosmos_core.models.parallel.forwards import layout_of, within
from cosmos_core.models.weights.streaming import absent_weights
from cosmos_core.protocols import Decided, Layout, MicroBatch, ModelContext, ModelFacts
from cosmos_core.protocols.frozen import Comparison, KLTarget
from cosmos_core.protocols.world import LatentSpec
from cosmos_core.types import Payload, Prompt


class DiffusionModel(Family):
    """A transformer that denoises latents (`protocols.Model` and `WorldModel`).

    A family says what `Family` asks for, and where it conditions on more than the text, `condition`, `conditioning` and
    `blank`.

    Attributes:
        rows: Reads captions, images and videos of rows.
    """

    def __init__(self, options: DiffusionOptions, context: ModelContext) -> None:
        super().__init__(options, context)
        self.rows: Final = RowReader(self)
        self._resident = Resident(self.conditioning)
        self._negative_placed: torch.Tensor | None = None

    def sleep(self) -> None:
        """Likewise of conditions."""
        super().sleep()
        self._resident, self._negative_placed = Resident(self.conditioning), None

    def encode(self, prompt: Prompt) -> Payload:
        """The embedding of the caption, and what the family adds."""
        return payload_of({TEXT: self.rows.embedding(prompt), **self.condition(prompt)})

    def encode_demonstration(self, prompt: Prompt) -> Payload:
        """The conditioning, and the demonstrated video as latents in `sample`; frames that are given are as given."""
        if prompt.demonstration is None:
            raise DataError("the row has no demonstration: the location of a video to imitate")
        payload = self.encode(prompt)
        sample = self.codec.encode(self.rows.read_pixels(prompt.demonstration, self.options.num_frames))
        spec = self.latent_spec(payload)
        if spec.given is not None and spec.is_given_T is not None:
            sample = torch.where(spec.is_given_T[None, :, None, None], spec.given, sample)
        return with_tensors(payload, {"sample": sample})

    def vet(self, prompt: Prompt) -> None:
        """Read a row's demonstration as training does, but do not encode it (see `protocols.reward.RewardExtras`)."""
        if prompt.demonstration is not None:
            self.rows.read_pixels(prompt.demonstration, self.options.num_frames)

    def decode(self, payload: Payload) -> str:  # noqa: ARG002 - of the protocol
        """Empty: a world model writes nothing."""
        return ""

    def condition(self, prompt: Prompt) -> Mapping[str, torch.Tensor]:
        """Arrays of the payload that condition besides the text, such as `given` and `is_given`.

        Raises:
            DataError: The row names media that the family has no use for, or that cannot be used.
        """
        if prompt.media or self.rows.num_given(prompt):
            raise DataError("the model takes no images or videos, and the row gives some; take one that does")
        return {}

    def conditioning(self, payload: Payload) -> Mapping[str, torch.Tensor]:
        """Conditions of a forward, as tensors of one shape for all payloads: `text`, filled up, and the frames given.

        Families that condition on something else add it.

        Raises:
            DataError: The arrays of the payload do not fit the model.
        """
        spec = self.latent_spec(payload)
        given = {} if spec.given is None or spec.is_given_T is None else {GIVEN: spec.given, IS_GIVEN: spec.is_given_T}
        return {TEXT: self.rows.filled(tensor_of(payload, TEXT, torch.float32, (None, self.text_width))), **given}

    def blank(self) -> Payload:
        """A payload that `conditioning` takes, of zeros; families that condition on more than the text add to it."""
        return payload_of({TEXT: torch.zeros(1, self.text_width)})

    def latent_spec(self, prompt: Payload) -> LatentSpec:
        """The latents to denoise."""
        shape = self.shape
        if GIVEN not in prompt.arrays:
            return LatentSpec(shape=shape)
        is_given_T = tensor_of(prompt, IS_GIVEN, torch.bool, (shape[1],))
        if bool(is_given_T.all()):
            raise DataError(f"all {shape[1]} latent frames are given, so that nothing is left to generate")
        return LatentSpec(shape=shape, given=tensor_of(prompt, GIVEN, torch.float32, shape), is_given_T=is_given_T)

    def negative_text(self) -> torch.Tensor:
        """float32 [L, E], what guidance leads away from."""
        return self.rows.negative

    def facts(self) -> ModelFacts:
        """Describe the model without building weights; those of a checkpoint on this machine are looked through."""
        shell = building.make_shell(self)
        is_here = self.context.path is not None and Path(self.context.path).is_dir()
        path = str(self.folder / checkpoint.TRANSFORMER) if is_here else None
        absent = absent_weights(path, shell, checkpoint.StreamedTransformer)
        uncounted = ["guidance's second forward"]
        if self.options.text == "encoder" and self.options.encoders == "device":
            uncounted.append("encoders of captions and images")
        if self.has(checkpoint.AUTOENCODER):
            uncounted.append("autoencoder")
        conditions, shape = self.conditioning(self.blank()), self.shape

        def forward(decisions: int) -> None:
            """Decide about a blank prompt, without guidance: what is computed does not matter."""
            like = next(shell.parameters())
            given = {
                name: placed(each, like.device, like.dtype).expand(decisions, *each.shape)
                for name, each in conditions.items()
            }
            text_BLE = given.pop(TEXT)
            self.denoise(shell, like.new_zeros(decisions, *shape), torch.zeros(decisions), text_BLE, given)

        return building.facts_of(self, shell, absent=absent, uncounted=tuple(uncounted), forward=forward)

    def build(
        self, *, seed: int, dtype: torch.dtype, device: torch.device, layout: Layout | None = None
    ) -> torch.nn.Module:
        """Make the transformer, in evaluation mode."""
        folder = None if self.context.path is None else self.component(checkpoint.TRANSFORMER)
        self.device = device
        return building.build(self, folder, layout, seed=seed, dtype=dtype, device=device)

    def pack(
        self,
        payloads: Sequence[Payload],
        *,
        budget: int,
        multiple: int = 1,  # noqa: ARG002 - `cp` splits tokens of latents, not decisions
        is_uniform: bool = False,  # noqa: ARG002 - there are no pipelines
    ) -> list[MicroBatch]:
        """Micro-batches of at most `budget` decisions, in order (see `packing.pack`); nothing is padded."""
        for payload in payloads:
            self.latent_spec(payload)  # refuses what it is given, if it does not fit
        neutral = self.neutral_guidance
        return packing.pack(payloads, self.shape, self.conditioning, budget=budget, neutral_guidance=neutral)

    def decide(
        self,
        module: torch.nn.Module,
        batch: MicroBatch,
        *,
        temperature: float,
        with_entropy: bool = False,
        prediction_for: Comparison | None = None,
        kl_target: KLTarget | None = None,
        with_features: bool = False,
    ) -> Decided:
        """Log-probabilities of transitions, negative squared errors of regressions (see `packing`).

        Raises:
            TrainingError: The temperature is not 1, or features are asked for.
        """
        if temperature != 1.0:
            raise TrainingError(f"a world model's noise is its sampler's: a temperature of {temperature:g} is not 1")
        if with_features:
            raise TrainingError("a world model has no features for a critic")
        device, dtype = device_of(module), _dtype(module)
        inputs, conditions_S = {}, {}
        for name, tensor in batch.inputs.items():
            if name.startswith(packing.CONDITION):
                conditions_S[name.removeprefix(packing.CONDITION)] = placed(tensor, device, dtype)
            else:
                inputs[name] = tensor.to(device, non_blocking=True)
        rows_N = inputs["rows"]
        conditions = {
            name: each_S.expand(len(rows_N), *each_S.shape[1:]) if len(each_S) == 1 else each_S[rows_N]
            for name, each_S in conditions_S.items()
        }
        given = {"is_given_BT": inputs["is_given"], "guidance_B": inputs["guidance"]}
        velocity_N = self._velocity(module, inputs["latents"], inputs["times"], conditions, **given)
        return Decisions(inputs).decide(
            velocity_N, with_entropy=with_entropy, prediction_for=prediction_for, kl_target=kl_target
        )

    def export(
        self, module: torch.nn.Module, directory: Path, *, dtype: torch.dtype | None = None
    ) -> Sequence[torch.dtype]:
        """Write the folder that `DiffusionPipeline.from_pretrained` loads, if the recipe's checkpoint is such a one.

        Of a model from a config alone it has the transformer's folder, which its class loads, and an index of it. The
        dtype is the transformer's, but for what diffusers keeps in float32.

        Raises:
            CheckpointError: It cannot be written, or has values beyond the dtype; every process says so.
        """
        source = None if self.context.path is None else self.component(None)
        written = {"_class_name": self.transformer.__name__, "_diffusers_version": version("diffusers"), **self.config}
        return checkpoint.export_transformer(module, building.make_shell(self), written, directory, source, dtype=dtype)

    def prepare(self, corpus: Iterable[str], tokenizer: Mapping[str, Any]) -> None:  # noqa: ARG002 - of the protocol
        """Refuse: a world model has no tokenizer of its own."""
        raise ConfigError("model.tokenizer: a world model takes its checkpoint's text encoder, or model.options.text")

    def velocity(
        self,
        module: torch.nn.Module,
        latents_B: torch.Tensor,
        times_B: torch.Tensor,
        prompts: Sequence[Payload],
        *,
        guidance: float,
    ) -> torch.Tensor:
        """The velocity at each latent (see `protocols.world.WorldModel`)."""
        device = latents_B.device
        conditions = self._resident.of(prompts, device, _dtype(module))
        is_given_BT = conditions.get(IS_GIVEN)
        if is_given_BT is None:
            is_given_BT = torch.zeros(len(prompts), latents_B.shape[2], dtype=torch.bool, device=device)
        guidance_B = torch.full((len(prompts),), guidance, device=device)
        return self._velocity(module, latents_B, times_B, conditions, is_given_BT=is_given_BT, guidance_B=guidance_B)

    def render(self, latents: torch.Tensor, prompt: Payload) -> Payload:  # noqa: ARG002 - of the protocol
        """The frames of a video (see `protocols.world.WorldModel`)."""
        found = {"frames": frames_of(self.codec.decode(latents)), "fps": torch.tensor(self.options.fps)}
        return payload_of(found, kind="media")

    def noised(self, payload: Payload, seed: int, *, num_decisions: int | None = None) -> Payload:
        """The points at which a sample is learned (see `protocols.world.WorldModel`)."""
        tensor_of(payload, "sample", torch.float32, self.shape)
        number = num_decisions or self.options.regressions
        times_N = packing.draw_times(self.options, number, packing.generator_of(seed, 0))
        noise_seed = torch.randint(1 << 62, (), generator=packing.generator_of(seed, 1))
        return with_tensors(payload, {"times": times_N, "noise_seed": noise_seed})

    def _negative_like(self, text_BLE: torch.Tensor) -> torch.Tensor:
        """The negative text, which stays on the device: every step asks for it."""
        found = self._negative_placed
        if found is None or found.device != text_BLE.device or found.dtype != text_BLE.dtype:
            # What an engine keeps in inference mode could not be trained with.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._negative_placed = found = placed(self.negative_text(), text_BLE.device, text_BLE.dtype)
        return found.expand_as(text_BLE)

    def _velocity(
        self,
        module: nn.Module,
        latents_B: torch.Tensor,
        times_B: torch.Tensor,
        conditions: Mapping[str, torch.Tensor],
        *,
        is_given_BT: torch.Tensor,
        guidance_B: torch.Tensor,
    ) -> torch.Tensor:
        kept_B = is_given_BT[:, None, :, None, None]
        if GIVEN in conditions:
            latents_B = torch.where(kept_B, conditions[GIVEN], latents_B)
        guidance_B = guidance_B[:, None, None, None, None]
        if not bool((guidance_B != self.neutral_guidance).any()):
            return self._forward(module, latents_B, times_B, conditions).masked_fill(kept_B, 0.0)
        negative = {**conditions, TEXT: self._negative_like(conditions[TEXT])}
        if _sharded(module) is not None:
            # Processes that share weights make equally many forwards, whatever their sequences ask for.
            both = {name: torch.cat((each, negative[name])) for name, each in conditions.items()}
            twice_B = torch.cat((latents_B, latents_B)), torch.cat((times_B, times_B))
            found_B, negative_B = self._forward(module, *twice_B, both).chunk(2)
        else:
            found_B = self._forward(module, latents_B, times_B, conditions)
            negative_B = self._forward(module, latents_B, times_B, negative)
        return self.guide(found_B, negative_B, guidance_B).masked_fill(kept_B, 0.0)

    def _forward(
        self, module: nn.Module, latents_B: torch.Tensor, times_B: torch.Tensor, conditions: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        others = {name: each for name, each in conditions.items() if name != TEXT}
        latents_B = latents_B.to(_dtype(module))
        return within(module, lambda: self.denoise(module, latents_B, times_B, conditions[TEXT], others).float())


def _sharded(module: nn.Module) -> Layout | None:
    """The layout of a transformer that is spread over processes."""
    layout = layout_of(module)
    return None if layout is None or layout.mesh.world_size == 1 else layout


def _dtype(module: nn.Module) -> torch.dtype:
    """In which forwards take what they are given."""
    layout = _sharded(module)
    found: torch.dtype = next(module.parameters()).dtype
    return found if layout is None else getattr(torch, layout.micro_batch_precision)
