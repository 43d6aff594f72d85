"""Results accounted for durably on one core: the real server loop and the real journal, without sockets."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import attrs
from control.opening import opened, settings
from control.replica import BATCH, POLICY, Replica

from cosmos_core.config.schema import ControlConfig
from cosmos_core.control.journal import Journal
from cosmos_core.control.server_loop import ServerLoop
from cosmos_core.transport.messages import DOWN, UP


@attrs.frozen
class Accounting:
    """How fast results are accounted for, on one core."""

    num_replicas: int
    group_size: int
    synchronous: str
    rollouts: int
    cpu_s: float
    commits: int


def throughput(num_replicas: int, group_size: int, *, durable: bool, seconds: float) -> Accounting:
    """Have results accounted for without sockets, for so many seconds of CPU."""
    control = ControlConfig(lost_after_s=1e9, join_timeout_s=1e9, progress_timeout_s=1e9)
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal(Path(folder) / "journal.sqlite", durable=durable) as journal,
    ):
        server_loop = ServerLoop(opened(journal, settings(num_replicas, group_size)), journal, control, 0.0)
        names = [POLICY, *(f"rollout-{index}" for index in range(num_replicas))]
        replicas = {name.encode(): Replica(name, group_size) for name in names}
        waiting = [(identity, replica.hello()) for identity, replica in replicas.items()]
        cpu_s, now, rollouts, commits = 0.0, 0.0, 0, 0
        while cpu_s < seconds:
            now += 0.01
            began = time.process_time()
            for identity, data in waiting:
                server_loop.take(identity, UP.decode(data), now)
            server_loop.failure_detector.look(now, lambda *_: True)
            said = [(identity, DOWN.encode(message)) for identity, message in server_loop.commit(now)]
            is_measured = rollouts > 0 or any(replica.leases for replica in replicas.values())
            cpu_s += time.process_time() - began if is_measured else 0.0
            commits += is_measured
            waiting = [(identity, data) for identity, heard in said for data in replicas[identity].hear(heard)]
            for identity, replica in replicas.items():
                if len(replica.leases) >= BATCH:
                    waiting.append((identity, replica.results()))
                    rollouts += BATCH * group_size
        rollouts = server_loop.state.ledger.samples.generated
    return Accounting(num_replicas, group_size, "FULL" if durable else "NORMAL", rollouts, cpu_s, commits)
