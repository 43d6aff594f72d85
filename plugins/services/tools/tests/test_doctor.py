"""`cosmos doctor`: a line for each check, with what is wrong; faults are made here."""

import json
import socket
import subprocess
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from cosmos_core.devices import Gpu, gpus
from cosmos_service_tools import needs, software, system
from cosmos_service_tools.findings import words

RECIPE = """
run = { name = "x", steps = 1 }
model.plugin = "hf"
model.path = "m"
algorithm.plugin = "sft"
dataset.plugin = "jsonl"
policy.optimizer.lr = 1e-6
"""
FACTS = {"version": "2.13.0", "cuda": None, "hip": None, "seen": 0, "nccl": None, "capability": []}


@pytest.fixture
def quick(monkeypatch):
    """Torch is not asked: its import takes seconds."""
    monkeypatch.setattr(software, "_ASK_TORCH", f"print({json.dumps(json.dumps(FACTS))})")


def found(check):
    return {(each.status, each.check): f"{each.text}; {each.remedy}" for each in check}


def test_a_machine_is_examined_and_faults_are_problems(cosmos, here, quick, monkeypatch):
    lines = cosmos("doctor").splitlines()
    assert {line.split()[1] for line in lines if line.startswith("ok")} >= {
        "python",
        "plugins",
        "torch",
        "transformers",
    }
    assert lines[-1] == "Nothing is wrong." or "warning" in lines[-1]

    info = here / "site/torn-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1.0\nRequires-Dist: cosmos-core>=0.1\n")
    (info / "entry_points.txt").write_text("[cosmos_core.rewards]\ntorn = nowhere_at_all\n")
    monkeypatch.syspath_prepend(str(here / "site"))
    monkeypatch.setattr(system, "machine", lambda: 1 / 0)
    listed = json.loads(cosmos("doctor", "--json", code=1))
    by_status = {each["status"]: each for each in listed}
    assert by_status["problem"]["text"] == "reward torn of torn is broken: its module nowhere_at_all does not exist"
    assert by_status["problem"]["remedy"] == "mend it, or pip uninstall torn"
    assert len([each for each in listed if each["status"] == "problem"]) == 1

    # What was left out is no fault.
    lacking = info.rename(here / "site/lacking-1.0.dist-info")
    with (lacking / "METADATA").open("a") as metadata:
        metadata.write("Requires-Dist: nothere>=1\n")
    (told,) = [each for each in json.loads(cosmos("doctor", "--json")) if "reward torn" in each["text"]]
    text = "reward torn of torn is not installed: nothere is not installed; pip install 'nothere>=1'"
    assert (told["status"], told["text"]) == ("ok", text)
    assert {"check": "machine", "status": "warning"}.items() <= by_status["warning"].items()
    assert by_status["warning"]["text"] == "could not be looked at: ZeroDivisionError: division by zero"


def test_a_recipe_tells_what_it_lacks(cosmos, here, quick, monkeypatch):
    (here / "x.toml").write_text(RECIPE + 'reward = [{ plugin = "math" }]\nlaunch.launcher = "local"\n')
    monkeypatch.setenv("COSMOS_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert "pip install cosmos-algorithm-sft cosmos-dataset-jsonl cosmos-reward-math\n" in cosmos(
        "doctor", "x.toml", code=1
    )
    monkeypatch.delenv("COSMOS_DISABLE_PLUGIN_AUTOLOAD")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = f'control = {{ port = {port}, page_bind = "203.0.113.1", keys = "none" }}\npolicy.device = "cuda"\n'
        (here / "x.toml").write_text(RECIPE + said)
        output = cosmos("doctor", "x.toml", code=1)
    assert (
        f"control.port: {port} of 127.0.0.1 is taken; end what listens there (ss -ltnp), or --set control.port=0"
        in output
    )
    assert "control.page_bind: 203.0.113.1 cannot be listened at" in output
    assert "control.keys: " in output
    assert 'policy.device: "cuda", and this machine shows no GPU' in output
    (here / "x.toml").write_text("run = 1")
    assert "problem  recipe       run: " in cosmos("doctor", "x.toml", code=1)
    assert "x.toml: no such recipe" in cosmos("doctor", "y/x.toml", code=1)


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_full_or_small_places_are_told(monkeypatch, tmp_path):
    gib = 1 << 30
    for usage, status, remedy in [
        (Usage(16 * gib, 0, gib), "ok", ""),
        (Usage(16 * gib, 16 * gib, 0), "problem", "remove what ended processes left there"),
        (Usage(gib // 16, 0, gib // 16), "warning", "docker run --shm-size=16g"),
    ]:
        monkeypatch.setattr("shutil.disk_usage", lambda _, usage=usage: usage)
        ((key, text),) = found(system.shared_memory(tmp_path)).items()
        assert key == (status, "/dev/shm")
        assert remedy in text
    assert "problem" in {status for status, _ in found(system.disks(tmp_path / "not" / "there"))}
    assert found(system.shared_memory(tmp_path / "none")).keys() == {("warning", "/dev/shm")}
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 512))
    assert found(system.files()).keys() == {("problem", "ulimit -n")}


def test_keys_and_addresses_are_looked_at(here, monkeypatch):
    (here / "keys").mkdir()
    assert found(system.keys()).keys() == {("warning", "keys")}

    def unknown(_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("socket.gethostbyname", unknown)
    assert found(system.ports()).keys() == {("warning", "ports")}


H200 = Gpu(number="0", uuid="GPU-1", name="H200", memory_bytes=141 << 30, free_bytes=140 << 30, driver="580.1")


def test_gpus_are_compared_with_what_torch_sees():
    cuda = {**FACTS, "cuda": "13.0", "seen": 1, "capability": [[9, 0]]}
    told = words([*software.gpus(cuda, [H200], ["0"])])
    assert "torch sees 1, driver 580.1" in told
    assert "0: H200, 140 of 141 GiB free, bf16 and fp8" in told
    other = Gpu(number="0", uuid="GPU-2", name="T4", memory_bytes=15 << 30, free_bytes=15 << 30, driver="580.1")
    assert "0: H200" in words([*software.gpus(cuda, [other, H200], ["1"])]), "torch sees what is visible alone"
    assert "2 here, driver 580.1, hidden by CUDA_VISIBLE_DEVICES" in words([*software.gpus(FACTS, [other, H200], [])])
    for facts, gpu, status, text in [
        (FACTS, H200, "problem", "it is a build for CPUs"),
        ({**cuda, "seen": 0}, H200, "problem", "whether the driver is new enough for CUDA 13.0"),
        ({**cuda, "capability": [[7, 0]]}, H200, "warning", "neither bf16 nor fp8"),
        (
            cuda,
            Gpu(number="0", uuid="GPU-1", name="H200", memory_bytes=141 << 30, free_bytes=1 << 30, driver="580.1"),
            "warning",
            "see nvidia-smi",
        ),
    ]:
        told = list(software.gpus(facts, [gpu], ["0"]))
        assert told[-1].status == status
        assert text in f"{told[-1].text}; {told[-1].remedy}"


def test_torch_and_nvidia_smi_may_fail(monkeypatch, tmp_path):
    for code, text in [
        ("raise ImportError('libcudart.so.13: no such file')", "cannot be imported: ImportError: libcudart"),
        ("import os; os.abort()", "cannot be imported: its process ended with -6"),
    ]:
        monkeypatch.setattr(software, "_ASK_TORCH", code)
        with software.torch_asked() as process:
            (told,) = software.torch(process)
        assert told.status == "problem"
        assert text in told.text
    monkeypatch.setattr(software, "_TORCH_S", 0.1)
    monkeypatch.setattr(software, "_ASK_TORCH", "import time; time.sleep(60)")
    with software.torch_asked() as process:
        (told,) = software.torch(process)
    assert "its import took more than 0.1 s" in told.text
    answer = subprocess.CompletedProcess(
        [], 0, stdout="0, GPU-1, NVIDIA H200, 143771, 143000, 580.1, 9.0\n1, GPU-2, GB10, [N/A], [N/A], 580.1, 12.1\n"
    )
    monkeypatch.setattr("shutil.which", lambda _: "/bin/true")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: answer)
    assert [(gpu.name, gpu.memory_bytes >> 30) for gpu in gpus()] == [("NVIDIA H200", 140), ("GB10", 0)]
    answer.returncode, answer.stdout, answer.stderr = 15, "", "Unable to determine the device handle"
    told = SimpleNamespace(communicate=lambda **_: (json.dumps(FACTS), ""), returncode=0)
    assert found(software.torch(told))["problem", "gpus"].startswith("nvidia-smi says: Unable to determine")


def test_releases_are_compared_with_the_bounds(monkeypatch):
    monkeypatch.setattr(software, "version", {"transformers": "4.0", "vllm": "0.31.0"}.__getitem__)
    monkeypatch.setattr(
        software, "requires", lambda name: {"cosmos-core": ["transformers>=5.16,<6"]}.get(name, ["vllm==0.32.*"])
    )
    told = words(list(software.libraries()))
    assert "problem  transformers 4.0, and <6,>=5.16 is asked for; pip install 'transformers<6,>=5.16'" in told
    assert "problem  vllm         0.31.0, and ==0.32.* is asked for" in told


def test_a_page_that_is_off_and_another_launcher_fix_no_port(here):
    from cosmos_core.config.loading import recipe_from

    tables = {"run": {"name": "x", "steps": 1}, "model": {"path": "m"}, "algorithm": {"plugin": "sft"}}
    tables |= {
        "dataset": {"plugin": "jsonl"},
        "policy": {"optimizer": {"lr": 1e-6}},
        "control": {"port": 1, "page_port": -1},
    }
    assert list(needs.ports(recipe_from({**tables, "launch": {"launcher": "slurm"}}))) == []
    assert all(each.check == "its ports" for each in needs.ports(recipe_from(tables)))
