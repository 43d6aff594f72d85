"""An extension of the workers of vLLM, by its own means: how they load a model, and what they can be told to do.

vLLM mixes it in by its name (`worker_extension_cls`, see `worker`); the engine's calls reach it by `collective_rpc`.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

import attrs
import torch

from cosmos_core.errors import AttestationError, CosmosError, EngineError
from cosmos_core.protocols import TensorSlice
from cosmos_core.protocols.quantization import FORMATS, Quantization
from cosmos_core.rollout.serving import die_with_parent
from cosmos_engine_vllm import latent, packed
from cosmos_engine_vllm.census import Seen, census, made_since
from cosmos_engine_vllm.held import HeldWeights, Written, meta_tensors
from cosmos_engine_vllm.regions import find_regions
from cosmos_engine_vllm.staging import Place, Reading

P = ParamSpec("P")
T = TypeVar("T")

LOAD_FORMAT: Final = "cosmos"
EXTENSION: Final = "cosmos_engine_vllm.worker.WorkerExtension"
_MADE: Final = "made_by_vllm"
_WORKER: Final = "VllmWorker"
"""How the names of vLLM's processes begin."""
_IDENTITY: Final = "VLLM_DIST_IDENT"
"""Where vLLM's workers on a CPU have the beginning of these names."""
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where shm_open makes files

Facts = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and name of the dtype of each tensor."""


@attrs.frozen(eq=False)
class Answer(Generic[T]):
    """The result of a call, or the error with which it failed: vLLM itself brings the text of an error only."""

    value: T | None = None
    error: CosmosError | None = None


def _answering(call: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Answer[T]]:
    def answer(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Answer[T]:
        try:
            return Answer(value=call(self, *args, **kwargs))
        except CosmosError as error:
            return Answer(error=error)

    functools.update_wrapper(answer, call)
    return answer


class WorkerExtension:
    """Mixed into vLLM's class of workers."""

    rank: int
    _cosmos_held: HeldWeights
    _cosmos_rank_shards: Mapping[str, Sequence[TensorSlice]]
    _cosmos_written: Written
    _cosmos_tempered: contextlib.ExitStack

    @_answering
    def cosmos_name(self) -> str:
        """The class of the model."""
        return type(self._cosmos_model()).__name__

    @_answering
    def cosmos_forget_names(self) -> None:
        """Unlink the shared memory of vLLM's ranks, which all of them have mapped: on a CPU it would be left behind."""
        if identity := os.environ.get(_IDENTITY):
            for path in _SHARED_MEMORY.glob(f"{glob.escape(identity)}-*"):
                path.unlink(missing_ok=True)

    @_answering
    def cosmos_find(
        self, tensors: Facts, sent: Facts, quantization: Quantization, matrices: Mapping[str, tuple[int, ...]]
    ) -> dict[str, list[TensorSlice]]:
        """Find where tensors are; the slices that this rank holds, by the names under which they are sent."""
        model = self._cosmos_model()
        made = getattr(model, _MADE)
        if made:
            raise EngineError(
                f"vLLM's {type(model).__name__} brings {len(made)} tensors into a form of its own when it has loaded "
                f"them, the first are {', '.join(made[:3])}: an update would not reach these; use the engine 'embedded'"
            )
        regions = find_regions(model, meta_tensors(tensors))
        self._cosmos_held = HeldWeights(
            model, regions, meta_tensors(sent), form=FORMATS.get(quantization), matrices=matrices
        )
        return self._cosmos_held.shards()

    @_answering
    def cosmos_attest_by(self, rank_shards: Mapping[int, Mapping[str, Sequence[TensorSlice]]]) -> None:
        """The slices of each rank whose digests `cosmos_digests` gives."""
        self._cosmos_rank_shards = rank_shards[self.rank]

    @_answering
    def cosmos_read(self, pieces: Mapping[int, Sequence[tuple[TensorSlice, torch.Tensor | Place]]]) -> None:
        """Find what was sent to this rank; nothing is written yet."""
        reading = Reading()
        self._cosmos_written = [
            (piece, reading.get(data) if isinstance(data, Place) else data) for piece, data in pieces[self.rank]
        ]

    @_answering
    def cosmos_forget_sent(self) -> None:
        """Let go of what `cosmos_read` found."""
        self._cosmos_written = ()

    @_answering
    def cosmos_load(self) -> None:
        """Write what `cosmos_read` found, every rank its own; nothing is generated meanwhile."""
        self._cosmos_held.copy(self._cosmos_written)
        packed.pack_again(self._cosmos_model())
        latent.make_again(self._cosmos_model())

    @_answering
    def cosmos_digests(self) -> dict[str, list[int]]:
        """Compare what is held, and what is computed with, with what was sent; then the digests of what is held."""
        written, self._cosmos_written = self._cosmos_written, ()
        held = self._cosmos_held
        held.check(written, self.rank)
        for layer, name, row in packed.wrong_rows(self._cosmos_model()):
            tensor = held.owner_of(layer.weight, row)  # type: ignore[arg-type]
            raise AttestationError(
                f"{tensor or 'padding'}: products of {name} of vLLM's rank {self.rank} are not those of its matrix, "
                f"from row {row} on: what they are packed from is something else"
            )
        for projection, name in latent.wrong(self._cosmos_model()):
            raise AttestationError(
                f"{held.owner_of(projection, 0)}: {name} of vLLM's rank {self.rank} computes with something else: what "
                "is made of it was not made anew"
            )
        return held.digests(self._cosmos_rank_shards)

    @_answering
    def cosmos_temper(self, temperature: float) -> None:
        """Divide logits, until `cosmos_untemper`: vLLM gives log-probs of prompts before the temperature."""
        model = self._cosmos_model()
        processors = [module for module in model.modules() if type(module).__name__ == "LogitsProcessor"]
        if len(processors) != 1:
            raise EngineError(
                f"{type(model).__name__} of vLLM makes logits in {len(processors)} places: it cannot score"
            )

        def divide(_module: torch.nn.Module, _inputs: object, logits: torch.Tensor | None) -> torch.Tensor | None:
            # Only the rank that draws has them.
            return None if logits is None else logits.float() / temperature

        self._cosmos_tempered = contextlib.ExitStack()
        self._cosmos_tempered.callback(processors[0].register_forward_hook(divide).remove)

    @_answering
    def cosmos_untemper(self) -> None:
        """Logits are as they are again."""
        self._cosmos_tempered.close()

    def _cosmos_model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.get_model()  # type: ignore[attr-defined]
        return model


def register() -> None:
    """Make the load format `cosmos` known to vLLM in this process: weights of no meaning, and a census of tensors."""
    _die_with_replica()
    package = "vllm.model_executor.model_loader"
    dummy = importlib.import_module(f"{package}.dummy_loader").DummyModelLoader
    loaders = importlib.import_module(package)
    is_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()

    def load_weights(self: Any, model: torch.nn.Module, model_config: object) -> None:
        dummy.load_weights(self, model, model_config)
        self.census = census(model)

    def load_model(self: Any, *args: object, **kwargs: object) -> torch.nn.Module:
        with packed.matrices_kept() if is_cpu else contextlib.nullcontext():
            model: torch.nn.Module = dummy.load_model(self, *args, **kwargs)
        before: Mapping[str, Seen] = self.census
        # Told when the engine asks: of an error here, the processes of vLLM would tell nothing but that there was one.
        setattr(model, _MADE, sorted(set(made_since(model, before)) - latent.made_again(model)))
        return model

    loaders.register_model_loader(LOAD_FORMAT)(
        type("CosmosModelLoader", (dummy,), {"load_weights": load_weights, "load_model": load_model})
    )


def _die_with_replica() -> None:
    """End a process of vLLM's own with the one that started it, whatever it is doing then."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(_WORKER):
        return
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent.pid:
        os._exit(1)
