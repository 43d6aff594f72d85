"""Worlds for tests: a function on several processes that form a process group, its results, or the first failure.

Processes are forked from a server that has torch and transformers imported, so a world of two starts in well under a
second. Nothing outlives the call.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist

from cosmos_core.errors import CosmosError

PRELOADED: Final = (
    "cosmos_core.models",
    "cosmos_core.policy.training.trainer",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)


class WorldFailedError(CosmosError):
    """A process of a test's world failed, was killed, or did not answer in time."""


def run_world(size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 90.0) -> list[Any]:
    """Call `function(*arguments)` on each process of a gloo world; results in the order of ranks.

    The function, its arguments and its results are pickled; tensors are copied. `torch.distributed` is initialised
    as the default group, with one thread a process and another hash seed than here. A world of one has a group too.

    Args:
        size: Processes.
        function: A module-level function.
        arguments: Its arguments, the same on each.
        timeout_s: Longest time for all of it.

    Raises:
        WorldFailedError: A process failed; the message holds the traceback of the first one that said so.
    """
    context = multiprocessing.get_context("forkserver")
    # A family of diffusers that this process has loaded, each of its worlds' processes would load for itself.
    families = [name for name in sys.modules if name.startswith("diffusers.models.transformers.")]
    # No process can use CUDA whose parent initialised it, for which it may be enough to import a library.
    context.set_forkserver_preload([] if torch.cuda.is_available() else [*PRELOADED, *families])
    # The server is a new interpreter, whose hashes its forks have: they are to be others than here.
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    with mock.patch.dict(os.environ, {"PYTHONHASHSEED": hash_seed}):
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory(prefix="cosmos-world-") as folder:
        processes: list[BaseProcess] = []
        ends: list[Connection] = []
        try:
            for rank in range(size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_member, args=(rank, size, folder, theirs, function, arguments), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                ends.append(ours)
            return _collect(ends, processes, time.monotonic() + timeout_s)
        finally:
            for each in processes:
                each.kill()
                each.join()
            for end in ends:
                end.close()


def _collect(ends: Sequence[Connection], processes: Sequence[BaseProcess], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        open_ends = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(open_ends, max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = [rank for rank in range(len(ends)) if rank not in results]
            raise WorldFailedError(f"ranks {silent} of {len(ends)} did not finish in time")
        failures: list[tuple[float, str]] = []
        # Looked at again: whoever fails because another did is heard after it, but may be found before it.
        for end in wait(open_ends, 0.0) or ready:
            rank = ends.index(end)
            try:
                is_good, data, time_s = ends[rank].recv()
            except EOFError:
                processes[rank].join(5.0)
                raise WorldFailedError(f"rank {rank} of {len(ends)} died: {processes[rank].exitcode}") from None
            if is_good:
                results[rank] = torch.load(io.BytesIO(data), weights_only=False)
            else:
                failures.append((time_s, f"rank {rank} of {len(ends)} failed:\n{data}"))
        if failures:
            raise WorldFailedError(min(failures)[1])
    return [results[rank] for rank in range(len(ends))]


def _member(  # noqa: PLR0917 - the arguments of a process
    rank: int, size: int, folder: str, end: Connection, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """One process; whatever is raised travels to the caller as text."""
    torch.set_num_threads(1)
    # Libraries that look for a launcher find one.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    try:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=size)
        result = function(*arguments)
        # A process that leaves early closes sockets that others may still read from.
        dist.barrier()
        buffer = io.BytesIO()
        torch.save(result, buffer)
        end.send((True, buffer.getvalue(), time.monotonic()))
    except BaseException:  # noqa: BLE001 - the supervised boundary of this process
        end.send((False, traceback.format_exc(), time.monotonic()))
    finally:
        end.close()
        # Destroying the group waits for members that may be gone.
        os._exit(0)
