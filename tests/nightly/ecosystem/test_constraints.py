"""constraints-cuda.txt pins what pip chooses for GPUs, by a dry run that asks the index for metadata alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.nightly.ecosystem.wheels import ROOT, projects

PINS = ROOT / "constraints-cuda.txt"
# Their extras are of libraries that are in no other plugin's way; the engine's is vLLM for GPUs.
EXTRAS = {"vllm": "gpu", "jsonl": "parquet", "world": "video", "cosmos-predict": "video", "wan": "text,video"}
# Old ones, too: wheels name the oldest that they run on.
PLATFORMS = ["linux_x86_64", "manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 36))]


def chosen(python: str, folder: Path) -> dict[str, str]:
    """Distributions that pip would install for GPUs, and their versions."""
    wanted = [f"{each}[{EXTRAS[each.name]}]" if each.name in EXTRAS else str(each) for each in projects()]
    report, nothing = folder / "report.json", folder / "wheels"
    nothing.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
    command += ["--no-build-isolation", "--use-feature", "fast-deps", "--retries", "1", "--report", str(report)]
    command += ["--python-version", python, *(f"--platform={each}" for each in PLATFORMS), f"--constraint={PINS}"]
    command += [*wanted, "s3fs", "pytest", "peft", "pytest-timeout", "pytest-xdist"]
    # A folder of wheels may hold a torch for CPUs, which pip would prefer.
    variables = {**os.environ, "PIP_FIND_LINKS": str(nothing)}
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False, timeout=550)
    if done.returncode != 0 and re.search("connection broken by|ConnectionError|ConnectTimeout", done.stderr):
        pytest.skip(f"no package index can be reached: {done.stderr.splitlines()[0]:.200}")
    assert done.returncode == 0, done.stderr[-4000:]
    found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {canonicalize_name(each["name"]): each["version"] for each in found}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_everything_resolves_for_gpus_and_is_pinned(python: str, tmp_path: Path) -> None:
    pins = dict(line.split("==") for line in PINS.read_text().splitlines() if not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    found = chosen(python, tmp_path)
    assert {"torch", "vllm", "torchvision", "torchaudio", "transformers", "fastapi"} <= found.keys()
    assert any(name.startswith("nvidia-nccl-cu") for name in found), "a torch without CUDA"
    # CUDA's own libraries are pinned by torch.
    foreign = {name: version for name, version in found.items() if not name.startswith(("cosmos-", "nvidia-", "cuda-"))}
    assert {name: version for name, version in foreign.items() if pinned.get(name) != version} == {}
