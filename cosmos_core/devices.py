"""Tells which GPUs there are, and chooses a process's device: a GPU that cannot be used is told, never passed over."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cosmos_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

_TIMEOUT_S: Final = 10.0
_FIELDS: Final = "index,uuid,name,memory.total,memory.free,driver_version,compute_cap"
_NONE_HERE: Final = "No devices were found"
BF16_CAPABILITY: Final = (8, 0)
"""Of Ampere; older GPUs compute in bfloat16 as if they could."""
_HIDDEN: Final = frozenset({"", "-1", "NoDevFiles"})
"""Of CUDA_VISIBLE_DEVICES; the last is Slurm's for a job without GPUs."""
_FAILED: Final = re.compile(
    "cuda.*(uncorrectable (ecc|nvlink) error|unspecified launch failure|unknown error)|no cuda(-capable| gpus are)"
)
HOW_IT_FAILED: Final = "nvidia-smi -q -d ECC and dmesg (Xid) tell whether the GPU has failed"


class Gpu(NamedTuple):
    """One GPU, its memory in bytes; 0 where it shares the host's. It needs no library: a fork server imports this.

    `capability` is CUDA's of its instructions, `(8, 0)` of an A100; empty where it is not known.
    """

    number: str
    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int
    driver: str
    capability: tuple[int, ...] = ()

    def is_called(self, name: str) -> bool:
        """Tell whether CUDA_VISIBLE_DEVICES may name it so: by its number, or by the beginning of its UUID."""
        return name == self.number if name.isdecimal() else self.uuid.startswith(name)


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """GPUs of this machine as CUDA names them: those of CUDA_VISIBLE_DEVICES, else all."""
    shown = _shown()
    # A container that has one GPU of eight may see /dev/nvidia5 alone; CUDA and nvidia-smi count from 0 all the same.
    return [str(number) for number in range(len(_files(devices)))] if shown is None else shown


def hidden() -> bool:
    """Tell whether CUDA_VISIBLE_DEVICES hides every GPU."""
    return _shown() == []


def _shown() -> list[str] | None:
    """GPUs that CUDA_VISIBLE_DEVICES names; None where it is not set."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return None
    return [] if shown.strip() in _HIDDEN else [gpu.strip() for gpu in shown.split(",") if gpu.strip()]


def _files(devices: Path) -> list[Path]:
    """The files of the driver's GPUs, in order."""
    return sorted(path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal())


def gpus() -> list[Gpu]:
    """The GPUs that `nvidia-smi` tells of, whatever CUDA_VISIBLE_DEVICES says; none where it is absent.

    Raises:
        ConfigError: It fails, or a GPU does not answer and CUDA_VISIBLE_DEVICES does not choose others.
    """
    told, failure = _ask_driver(f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    if failure == _NONE_HERE:
        return []
    found = []
    for line in told.splitlines():
        match line.split(", "):
            case number, uuid, name, total, free, driver, capability:
                able = tuple(int(part) for part in capability.split(".") if part.isdecimal())
                found.append(Gpu(number, uuid, name, _bytes(total), _bytes(free), driver, able))
            case _:
                failure = line
    chosen = _shown()
    if failure and (chosen is None or not all(any(gpu.is_called(each) for gpu in found) for each in chosen)):
        raise ConfigError(
            f"nvidia-smi says: {failure}. Mend that (nvidia-smi --gpu-reset, or a restart of the machine), or choose "
            "GPUs that answer with CUDA_VISIBLE_DEVICES"
        )
    return found


def num_threads(asked: int | None = None, otherwise: int = 1) -> int:
    """OpenMP threads as asked for, else by OMP_NUM_THREADS, `otherwise` if that is no number."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return asked or (int(told) if told.isdecimal() else 0) or otherwise


def choose_device(key: str, name: str) -> torch.device:
    """The device that a recipe's key names; raises as `uses_gpu` does."""
    import torch  # noqa: PLC0415 - the controller has none

    return torch.device("cuda", torch.cuda.current_device()) if uses_gpu(key, name) else torch.device("cpu")


def stay_near(device: torch.device) -> None:
    """Run on the CPUs of a GPU's NUMA node from now on, with threads and processes that start later.

    Where the system does not say which these are, or this process may use none of them, nothing changes.
    """
    import torch  # noqa: PLC0415 - see above

    if device.type == "cuda":
        card: Any = torch.cuda.get_device_properties(device)
        near = near_cpus(f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0")
        if allowed := near & os.sched_getaffinity(0):
            os.sched_setaffinity(0, allowed)


def near_cpus(address: str, cards: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """CPUs of the NUMA node of a PCI device, such as `0000:1b:00.0`; none where the system does not say."""
    try:
        ranges = [part.split("-") for part in (cards / address / "local_cpulist").read_text().strip().split(",")]
        return {cpu for first, *last in ranges for cpu in range(int(first), int((last or [first])[0]) + 1)}
    except (OSError, ValueError):
        return set()


def uses_gpu(key: str, name: str) -> bool:
    """Tell whether a device is a GPU: `auto` is one if this machine has any that is not hidden.

    Args:
        key: Of the recipe, for the message; empty where there is none to change.
        name: Its value: `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: `cuda` is asked for and torch sees no GPU, or `auto` and there is one that torch does not see.
    """
    import torch  # noqa: PLC0415 - see above

    if name == "cpu" or (name == "auto" and hidden()):
        return False
    # torch warns of a driver that is too old, and says the same below.
    with warnings.catch_warnings(action="ignore"):
        if torch.cuda.is_available():
            return True
    seen = _signs()
    if name == "auto" and not seen:
        return False
    shown, ways = os.environ.get("CUDA_VISIBLE_DEVICES"), [f"{key} = 'cpu'"] if key else []
    ways += ["an empty CUDA_VISIBLE_DEVICES"] if name == "auto" or not key else []
    raise ConfigError(
        f"{key or 'device'}: {name!r}, but torch sees no GPU{seen and f', and there are signs of one: {seen}'}. torch "
        f"{torch.__version__} is built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs'} and says: "
        f"{_torchs_words()}. CUDA_VISIBLE_DEVICES is {'not set' if shown is None else repr(shown)}. What to do is in "
        f"docs/installation.md; {', or '.join(ways)} does without a GPU"
    )


def has_failed(error: BaseException | None) -> bool:
    """Tell whether an error, or one that it comes from, is CUDA's of a GPU that has failed or is gone.

    An unspecified launch failure may be a kernel's own fault, too: another process shows.

    Source: https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html (214, 220, 719, 999 and 100).
    """
    while error is not None:
        if _FAILED.search(str(error).lower()):
            return True
        error = error.__cause__
    return False


def _signs() -> str:
    """Signs of GPUs on this machine, in words; empty where there are none."""
    files = _files(Path("/dev"))
    listed, failure = _ask_driver("-L")
    driver = f"nvidia-smi says: {failure or listed}" if failure or listed else ""
    # A driver may be there for GPUs that are not, or not for this job.
    if not files and failure == _NONE_HERE:
        return ""
    return "; ".join([*map(str, files[:1]), *([driver] if driver else [])])


def _torchs_words() -> str:
    import torch  # noqa: PLC0415 - see above

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0].rstrip(".")
    return "nothing"


def _ask_driver(*arguments: str) -> tuple[str, str]:
    """Output of `nvidia-smi`, and its last words if it failed or found no GPU; both empty where it is absent."""
    if (command := shutil.which("nvidia-smi")) is None:
        return "", ""
    try:
        answer = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"it could not be asked ({error})"
    said = answer.stdout.strip()
    if answer.returncode == 0 and said != _NONE_HERE:
        return said, ""
    return said, (answer.stderr.strip() or said or f"it ended with {answer.returncode}").splitlines()[-1].rstrip(".")


def _bytes(mebibytes: str) -> int:
    """Some boards share the host's memory, and say `[N/A]`."""
    return int(mebibytes) << 20 if mebibytes.isdecimal() else 0
