"""Devices: GPUs as they are shown, and those that torch does not see, told in the driver's words."""

from types import SimpleNamespace

import pytest
import torch

from cosmos_core import devices
from cosmos_core.devices import choose_device, gpus, visible_gpus
from cosmos_core.errors import ConfigError, EngineError

BROKEN = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a command of that name on the path, and torch sees no GPU, whatever this machine has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(script):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return put


def test_gpus_are_those_that_the_user_shows(monkeypatch, tmp_path):
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # CUDA counts those that there are; a container may have any of a machine's.
    assert visible_gpus(tmp_path) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-7")
    assert visible_gpus(tmp_path) == ["3", "GPU-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus(tmp_path) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus(tmp_path) == []
    assert devices.hidden()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f'echo; echo "{BROKEN}"; exit 9', BROKEN),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18", "version mismatch"),
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-7)'", "GPU 0: NVIDIA H200"),
        ("exit 6", "it ended with 6"),
        ("exec sleep 60", "timed out after 0.5 seconds"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_told_in_the_drivers_words(nvidia_smi, monkeypatch, script, words):
    nvidia_smi(script)
    monkeypatch.setattr(devices, "_TIMEOUT_S", 0.5)
    for name in ("auto", "cuda"):
        with pytest.raises(ConfigError) as refused:
            choose_device("rollout.device", name)
        text = str(refused.value)
        assert text.startswith(f"rollout.device: {name!r}, but torch sees no GPU, and there are signs of one: ")
        assert words in text
        for fact in (
            f"torch {torch.__version__} is built for ",
            "CUDA_VISIBLE_DEVICES is not set",
            "rollout.device = 'cpu'",
        ):
            assert fact in text
        # Whoever asks for one has none by hiding all.
        assert ("an empty CUDA_VISIBLE_DEVICES" in text) is (name == "auto")
    assert choose_device("rollout.device", "cpu") == torch.device("cpu")
    # Whoever hides them wants none.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("rollout.device", "auto") == torch.device("cpu")


def test_auto_is_the_cpu_where_nothing_tells_of_a_gpu(nvidia_smi, monkeypatch):
    if list(devices.Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    assert choose_device("policy.device", "auto") == torch.device("cpu")
    nvidia_smi("echo 'No devices were found'; exit 6")
    assert choose_device("policy.device", "auto") == torch.device("cpu")
    assert gpus() == []
    with pytest.raises(ConfigError, match=r"policy.device: 'cuda', but torch sees no GPU\. torch"):
        choose_device("policy.device", "cuda")


def test_an_accelerator_where_there_is_one(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choose_device("", "auto") == choose_device("", "cuda") == torch.device("cuda", 1)


def test_a_process_stays_near_its_gpu(monkeypatch, tmp_path):
    (tmp_path / "0000:1b:00.0").mkdir()
    told = tmp_path / "0000:1b:00.0" / "local_cpulist"
    told.write_text("0-2,8\n")
    assert devices.near_cpus("0000:1b:00.0", tmp_path) == {0, 1, 2, 8}
    told.write_text("\n")
    assert devices.near_cpus("0000:1b:00.0", tmp_path) == devices.near_cpus("0000:00:00.0", tmp_path) == set()

    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=27, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 2, 3})
    bound = []
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cpus: bound.append(cpus))
    for near in ({0, 1, 2}, {7}, set()):
        monkeypatch.setattr(devices, "near_cpus", {"0000:1b:00.0": near}.__getitem__)
        devices.stay_near(torch.device("cuda"))
    devices.stay_near(torch.device("cpu"))
    assert bound == [{1, 2}], "nothing where no CPU may be used, or none is known"


def test_a_gpu_that_does_not_answer_is_told_unless_others_are_chosen(nvidia_smi, monkeypatch):
    lost = "Unable to determine the device handle for GPU0000:2B:00.0: Unknown Error"
    row = "1, GPU-7f3a-2, NVIDIA H200, 143771, 143000, 580.1, 9.0"
    for script in (f"echo '{lost}'; echo '{row}'", f"echo '{row}'; echo '{lost}' >&2; exit 15"):
        nvidia_smi(script)
        for shown in (None, "0,1", "GPU-8"):
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            if shown:
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
            with pytest.raises(ConfigError, match=r"^nvidia-smi says: Unable .* Unknown Error\. Mend that"):
                gpus()
        for shown in ("1", "GPU-7f"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
            (gpu,) = gpus()
            assert (gpu.number, gpu.free_bytes, gpu.capability) == ("1", 143000 << 20, (9, 0))
    nvidia_smi("exit 6")
    with pytest.raises(ConfigError, match="nvidia-smi says: it ended with 6"):
        gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus() == [], "whoever hides them wants none"


def test_a_gpu_that_has_failed_is_known_by_the_words_of_cuda():
    wrapped = EngineError("the engine's thread failed")
    wrapped.__cause__ = RuntimeError("CUDA driver error: unspecified launch failure")
    for told in (
        wrapped,
        RuntimeError("NCCL error: unhandled cuda error\nLast error: Cuda failure 220 'uncorrectable NVLink error'"),
        RuntimeError("CUDA unknown error - this may be due to an incorrectly set up environment"),
        ConfigError("policy.device: 'auto', but torch sees no GPU. torch 2.13.0 says: No CUDA GPUs are available."),
    ):
        assert devices.has_failed(told), told
    for told in (
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        EngineError("unknown error"),
    ):
        assert not devices.has_failed(told), told
