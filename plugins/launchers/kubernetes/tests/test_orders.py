import signal
import threading
import time

import attrs
import pytest

from cosmos_core.errors import ConfigError, ReplicaError
from cosmos_core.protocols import Exit, LauncherContext, Pool, ProcessSpec
from cosmos_core.run.launch.local import LocalLauncher
from cosmos_launcher_kubernetes import pod
from cosmos_launcher_kubernetes.launcher import KubernetesLauncher
from cosmos_launcher_kubernetes.options import KubernetesOptions
from cosmos_launcher_kubernetes.orders import SESSION, Ended, Order, Orders

SPEC = ProcessSpec(name="rollout-0", module="replica", arguments=("3",), environment={"CUDA_VISIBLE_DEVICES": "9"})
PROGRAM = """
import os, sys, time
print("gpus", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
if sys.argv[1] == "sleep":
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    (tmp_path / "replica.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(SESSION, "uid-0")
    monkeypatch.setattr(pod, "MODULES", ("replica",))
    context = LauncherContext(
        name="x", directory=tmp_path / "x", pools=(Pool(role="policy", replicas=1), Pool(role="rollout", replicas=1))
    )
    return KubernetesLauncher(KubernetesOptions(image="i", pvc="p", mount=str(tmp_path)), context)


@pytest.fixture
def pods(tmp_path, launcher):
    """Start a pod; all have ended when the test has."""
    threads = []

    def start():
        local = LocalLauncher(tmp_path / "x" / "logs")
        thread = threading.Thread(target=pod.Pod(Orders(tmp_path / "x", "uid-0"), {"rollout-0": "4"}, local).run)
        thread.start()
        threads.append(thread)
        return thread

    yield start
    launcher.stop(5)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def wait_for(condition, timeout_s=15.0):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_a_process_is_started_in_its_pod_and_its_end_told_once(launcher, pods, tmp_path):
    pods()
    launcher.start(SPEC)
    assert launcher.running() == ["rollout-0"]
    assert wait_for(launcher.exits) == [Exit(name="rollout-0", code=3, error="gpus 4")]
    assert launcher.running() == launcher.exits() == []
    launcher.start(attrs.evolve(SPEC, arguments=("0",)))
    assert wait_for(launcher.exits) == [Exit(name="rollout-0", code=0, error="")]


def test_a_process_is_killed_and_another_takes_its_name(launcher, pods, tmp_path):
    pods()
    launcher.start(attrs.evolve(SPEC, arguments=("sleep",)))
    wait_for((tmp_path / "x" / "logs" / "rollout-0.log").exists)
    launcher.kill("rollout-0")
    assert [end.code for end in wait_for(launcher.exits)] == [-signal.SIGKILL]
    launcher.start(SPEC)
    assert [end.code for end in wait_for(launcher.exits)] == [3]


def test_a_pod_that_is_restarted_runs_what_ran_and_not_what_had_ended(launcher, pods, tmp_path):
    launcher.start(SPEC)
    orders = Orders(tmp_path / "x", "uid-0")
    orders.tell(Ended(number=1, exit=Exit(name="rollout-0", code=-9, error="")))
    pods()
    assert [end.code for end in wait_for(launcher.exits)] == [-9]
    time.sleep(0.5)
    assert not (tmp_path / "x" / "logs").exists()
    launcher.start(SPEC)
    assert [end.code for end in wait_for(launcher.exits)] == [3]


def test_a_pod_that_is_restarted_does_not_run_again_what_it_had_begun(launcher, pods, tmp_path):
    launcher.start(SPEC)
    Orders(tmp_path / "x", "uid-0").take("rollout-0", 1)
    pods()
    (end,) = wait_for(launcher.exits)
    assert (end.code, end.error) == (-signal.SIGKILL, "its container was restarted")
    assert not (tmp_path / "x" / "logs").exists()
    assert launcher.running() == launcher.exits() == []
    launcher.start(SPEC)
    assert [end.code for end in wait_for(launcher.exits)] == [3]


def test_an_order_is_noted_before_it_is_carried_out(tmp_path, monkeypatch):
    orders = Orders(tmp_path, "s")
    orders.open()
    orders.give("rollout-0", Order(number=4, spec=SPEC))
    noted = []
    monkeypatch.setattr(pod, "MODULES", ("replica",))

    class Launcher(LocalLauncher):
        def start(self, spec):
            noted.append(orders.taken(spec.name))
            raise ReplicaError("the machine ends here")

    assert orders.taken("rollout-0") == 0
    with pytest.raises(ReplicaError, match="ends here"):
        pod.Pod(orders, {"rollout-0": ""}, Launcher(tmp_path)).run()
    assert noted == [4]


def test_what_is_killed_before_a_pod_saw_it_is_told_once(launcher, pods, tmp_path):
    launcher.start(SPEC)
    launcher.kill("rollout-0")
    launcher.kill("rollout-0")
    pods()
    (end,) = wait_for(launcher.exits)
    assert (end.code, end.error) == (-signal.SIGKILL, "it was killed before its pod had started it")
    assert launcher.running() == launcher.exits() == []
    assert not (tmp_path / "x" / "logs").exists()
    launcher.start(SPEC)
    assert [end.code for end in wait_for(launcher.exits)] == [3]


def test_a_kill_that_comes_after_the_end_does_not_hide_how_it_ended(launcher, pods, tmp_path):
    pods()
    launcher.start(SPEC)
    ended = tmp_path / "x" / "orders" / "uid-0" / "rollout-0.ended"
    wait_for(ended.exists)
    launcher.kill("rollout-0")
    launcher.kill("rollout-0")
    time.sleep(0.5)
    assert launcher.exits() == [Exit(name="rollout-0", code=3, error="gpus 4")]


def test_the_end_of_a_run_ends_pods_and_what_runs_in_them(launcher, pods, tmp_path):
    thread = pods()
    launcher.start(attrs.evolve(SPEC, arguments=("sleep",)))
    wait_for((tmp_path / "x" / "logs" / "rollout-0.log").exists)
    launcher.stop(5)
    thread.join(10)
    assert not thread.is_alive()
    assert launcher.running() == []


def test_orders_of_another_session_are_not_seen(tmp_path):
    for session in ("uid-0", "uid-1"):
        Orders(tmp_path, session).open()
    Orders(tmp_path, "uid-0").give("policy-0", Order(number=1, spec=SPEC))
    Orders(tmp_path, "uid-0").end()
    assert Orders(tmp_path, "uid-1").newest("policy-0") is None
    assert not Orders(tmp_path, "uid-1").is_over
    assert Orders(tmp_path, "uid-0").newest("policy-0") == Order(number=1, spec=SPEC)


def test_a_session_is_a_name(tmp_path, subtests):
    for session in ["", "-0", "../x", "a/b"]:
        with subtests.test(session=session), pytest.raises(ReplicaError, match="is no session"):
            Orders(tmp_path, session)


def test_a_damaged_order_is_refused(tmp_path):
    orders = Orders(tmp_path, "s")
    orders.open()
    (tmp_path / "orders" / "s" / "policy-0.order").write_text('{"number": 1}')
    with pytest.raises(ReplicaError, match=r"policy-0\.order: no order that can be read"):
        orders.newest("policy-0")


def test_a_pod_starts_nothing_but_replicas(tmp_path, monkeypatch):
    orders = Orders(tmp_path, "s")
    orders.open()
    orders.give("policy-0", Order(number=1, spec=attrs.evolve(SPEC, module="http.server")))
    with pytest.raises(ReplicaError, match=r"starts http\.server, which is none of"):
        pod.Pod(orders, {"policy-0": ""}, LocalLauncher(tmp_path)).run()


def test_names_and_gpus_of_a_pods_processes():
    assert pod.names_of("policy", 2, 1, 2) == ["policy-2.2", "policy-2.3"]
    assert pod.names_of("rollout", 0, 0, 1) == ["rollout-0"]
    assert pod.devices_of(["a", "b"], 2, ["0", "1", "2", "3"]) == {"a": "0,1", "b": "2,3"}
    assert pod.devices_of(["a"], 0, []) == {"a": ""}
    with pytest.raises(ReplicaError, match="need 2 GPUs each, and this pod has 3"):
        pod.devices_of(["a", "b"], 2, ["0", "1", "2"])


def test_elsewhere_nothing_can_be_started(launcher, monkeypatch):
    launcher.check()
    monkeypatch.delenv(SESSION)
    with pytest.raises(ConfigError, match="hand the run over with cosmos launch kubernetes"):
        launcher.check()
