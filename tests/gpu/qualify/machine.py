"""Facts of the machine, or the reason why nothing can be qualified on it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import time
from typing import Any, Final

DRY: Final = "make gpu DEVICE=cpu TINY=1 goes through all of it on a CPU, with tiny shapes"
_PROBE: Final = """
import json, torch
told = {"torch": torch.__version__, "CUDA of torch": torch.version.cuda, "found": torch.cuda.is_available()}
if told["found"]:
    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    told |= {"device": torch.cuda.get_device_name(), "capability": f"{major}.{minor}", "free": free, "total": total,
             "GPUs": torch.cuda.device_count()}
print(json.dumps(told))
"""


def facts(device: str) -> dict[str, Any] | str:
    """What a report says of the machine, the device's name first; or why there is no device, in words."""
    # In a process of its own: a process that has looked at a GPU holds half a GiB of it.
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"torch cannot be imported: {done.stderr.strip().splitlines()[-1]}"
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found = {
        "device": told["device"] if device == "cuda" and told["found"] else "CPU",
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": _said("git", "describe", "--always", "--dirty"),
        "Python": platform.python_version(),
        **{name: told[name] for name in ("torch", "CUDA of torch", "capability", "GPUs") if name in told},
        **{name: _version(name) for name in ("transformers", "triton", "diffusers", "vllm")},
    }
    if device == "cpu":
        return found
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if not told["found"]:
        return f"{_no_device(told)}. {DRY}"
    taken = told["total"] - told["free"]
    found["driver"] = " ".join(driver.split())
    found["memory"] = f"{told['total'] / 2**30:.0f} GiB, {told['free'] / 2**30:.0f} GiB of it free"
    if taken > 0.05 * told["total"]:
        others = _said("nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv,noheader")
        found["taken by others"] = (
            f"{taken / 2**30:.0f} GiB: {'; '.join(others.splitlines()) or 'by none that is told'}"
        )
    return found


def _no_device(told: dict[str, Any]) -> str:
    if shutil.which("nvidia-smi") is None:
        return "make gpu needs a CUDA device, and this machine has none: torch sees none, and there is no nvidia-smi"
    done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False)
    words = " ".join((done.stdout + done.stderr).split())
    cuda = told["CUDA of torch"]
    built = (
        f"torch {told['torch']} is built for CUDA {cuda}" if cuda else f"torch {told['torch']} is built without CUDA"
    )
    return (
        f"make gpu needs a CUDA device, and torch sees none though there is an nvidia-smi: {built}, which may be newer "
        f"than the driver; nvidia-smi says: {words:.600}"
    )


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
