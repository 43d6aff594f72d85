"""Real vLLM in two processes that share each layer, against one, and against the trainer's own forward."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs
import numpy as np
import psutil
import pytest
import torch

from cosmos_core.errors import AttestationError, EngineLostError, WeightSyncError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EngineContext
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.testing.conformance.engine.subject import EngineDriver, Pricer, stopping_at, tokens_of
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.quantization import quantise_tensors

from . import plants
from .test_vllm_in_flight import TOLERANCE, logprobs, requests, versions

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def make(served):
    started = []

    def begin(**changes):
        context = EngineContext(
            model=stopping_at(served, frozenset()),
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_in_flight=16,
            context_length=256,
            seed=1,
        )
        made = PluginSet.load([("engine", "vllm")]).create("engine", "vllm", {}, attrs.evolve(context, **changes))
        engine = EngineDriver(made, timeout_s=60.0, start_timeout_s=300.0)
        started.append(engine)
        engine.start()
        return engine

    yield begin
    for engine in started:
        engine.shutdown()


@pytest.fixture(scope="module")
def alone(make, served):
    """What one process makes of some requests."""
    engine = make()
    results = [generated for (generated,) in engine.generate(drawn(served))]
    engine.shutdown()
    return results


@pytest.fixture(scope="module")
def engine(make, alone):
    return make(tensor_parallel=2)


def drawn(model):
    """Requests, half of them greedy."""
    some = requests(model, 8, num_units=24)
    return [
        attrs.evolve(each, sampling=attrs.evolve(each.sampling, temperature=0.0)) if index % 2 else each
        for index, each in enumerate(some)
    ]


def pids(engine):
    return [process.pid for process in engine.engine._backend.workers.processes]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_two_processes_give_what_one_gives_and_the_trainer_prices(engine, alone, model, pricer):
    results = [generated for (generated,) in engine.generate(drawn(model))]
    assert [tokens_of(each) for each in results] == [tokens_of(each) for each in alone]
    for index, (found, single) in enumerate(zip(results, alone, strict=True)):
        torch.testing.assert_close(logprobs(found), logprobs(single), atol=TOLERANCE, rtol=0)
        if not index % 2:
            (theirs,) = pricer.logprobs([found.payload], temperature=0.7)
            torch.testing.assert_close(logprobs(found), theirs, atol=TOLERANCE, rtol=0)


def test_each_rank_has_its_own_slices(engine, pricer):
    layout = engine.layout()
    held = [{piece.name: piece for piece, _ in layout[rank]} for rank in (0, 1)]
    name = "model.layers.0.mlp.down_proj.weight"
    assert [(each[name].start, each[name].shape) for each in held] == [((0, 0), (32, 24)), ((0, 24), (32, 24))]
    norm = "model.norm.weight"
    assert held[0][norm] == held[1][norm]
    # The vocabulary of 270 is padded to 320.
    embeddings = "model.embed_tokens.weight"
    assert [each[embeddings].shape[0] for each in held] == [160, 110]
    engine.begin_update(0)
    with pytest.raises(WeightSyncError, match="rank 2 does not exist: this vLLM has the ranks 0 to 1"):
        engine.write(2, held[0][norm], pricer.tensors(1)[norm])
    engine.write_all(pricer.tensors(1), [part for part in engine.parts() if part[1].name != embeddings])
    with pytest.raises(WeightSyncError, match=r"2 slices are not wholly written, the first is .* for rank 0"):
        engine.commit_update()
    engine.abort_update()


@pytest.mark.parametrize(("version", "cache"), [(1, "recompute"), (2, "keep")])
def test_an_update_in_flight_reaches_both(engine, model, pricer, version, cache):
    handles = engine.submit(requests(model, 16))
    made = engine.stats().generated_units
    engine.pause_in_flight(handles, made + 200)
    assert engine.load(version, pricer.tensors(version), cache) == digest_of(pricer.tensors(version))
    engine.resume()
    results = [generated for handle in handles for generated in engine.results(handle)]
    assert {each.num_units for each in results} == {96}
    assert set(np.concatenate([versions(each) for each in results]).tolist()) == {version - 1, version}
    for weights in (version - 1, version) if cache == "recompute" else (version - 1,):
        theirs = pricer.logprobs([each.payload for each in results], temperature=0.7, weights=weights)
        for each, expected in zip(results, theirs, strict=True):
            made = torch.from_numpy(versions(each) == weights)
            torch.testing.assert_close(logprobs(each)[made], expected[made], atol=TOLERANCE, rtol=0)


def test_scores_of_two_processes_are_the_trainers(engine, model, pricer):
    ((generated,),) = engine.generate(requests(model, 1, num_units=8))
    (scores,) = engine.score([generated.payload], temperature=1.7)
    (theirs,) = pricer.logprobs([generated.payload], temperature=1.7, weights=2)
    torch.testing.assert_close(scores, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        ((plants.spoil_a_slice, 1, "model.layers.1.self_attn.v_proj.weight"), "v_proj.weight: vLLM's rank 1 "),
        ((plants.spoil_a_product, 1, "model.layers.0.mlp.gate_up_proj", 40), "up_proj.weight: products .* rank 1 "),
    ],
    ids=["slice", "product"],
)
def test_a_corruption_on_one_rank_is_named(engine, pricer, plant, named):
    llm = engine.engine._backend._llm
    fault, *arguments = plant
    llm.collective_rpc(fault, args=tuple(arguments))
    with pytest.raises(AttestationError, match=named):
        engine.load(3, pricer.tensors(1))
    engine.abort_update()
    llm.collective_rpc(plants.mend)
    assert engine.load(3, pricer.tensors(1)) == digest_of(pricer.tensors(1))


def test_a_worker_that_is_killed_ends_the_engine_promptly(engine, model):
    processes = pids(engine)
    handles = engine.submit(requests(model, 4, num_units=200))
    os.kill(processes[1], signal.SIGKILL)
    begin = time.monotonic()
    for handle in handles:
        ended = rf"worker of rank 1 \(process {processes[1]}\) was ended by signal 9"
        with pytest.raises(EngineLostError, match=ended):
            engine.results(handle)
    assert time.monotonic() - begin < 10.0
    with pytest.raises(EngineLostError, match="worker of rank 1"):
        engine.health()
    engine.shutdown()
    assert not any(map(is_alive, processes))


def test_quantised_matrices_that_are_cut_within_a_block(make, engine, served, model):
    # down_proj has 48 columns: each rank computes with 24, of blocks of 32.
    form, tensors = FORMATS["mxfp4"], Pricer(served, seed=1).tensors(3)
    published = quantise_tensors(form, tensors, served.facts().matrices)
    quantised = make(tensor_parallel=2, quantization="mxfp4")
    assert quantised.load(1, published) == digest_of(published)
    rounded = Pricer(served, seed=1, form=form)
    for (generated,) in quantised.generate(requests(model, 4, num_units=16)):
        (theirs,) = rounded.logprobs([generated.payload], temperature=0.7, weights=3)
        torch.testing.assert_close(logprobs(generated), theirs, atol=TOLERANCE, rtol=0)
    processes = pids(quantised)
    quantised.shutdown()
    assert not any(map(is_alive, processes))


ENGINE = """
import sys
from pathlib import Path
import torch
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EngineContext
from tests.nightly.vllm.conftest import make_model

if __name__ == "__main__":
    torch.set_num_threads(1)
    context = EngineContext(model=make_model(Path(sys.argv[1])), dtype=torch.float32, device=torch.device("cpu"),
                            max_in_flight=2, context_length=64, seed=1, tensor_parallel=2)
    engine = PluginSet.load([("engine", "vllm")]).create("engine", "vllm", {"verify": False}, context)
    engine.start()
    print(*(process.pid for process in engine._backend.workers.processes), flush=True)
    input()
"""


@pytest.fixture
def replica(tmp_path_factory):
    """A replica that starts, in a session of its own as a launcher starts it."""
    folder = tmp_path_factory.mktemp("one")  # vLLM binds a socket in it, whose path may be 107 characters long
    script = folder / "engine_alone.py"
    script.write_text(ENGINE)
    root = Path(__file__).parents[3]
    started = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield started
    if started.poll() is None:
        os.killpg(started.pid, signal.SIGKILL)
    started.communicate()


def shared_memory_of(processes):
    """Files of shared memory that these have mapped, of vLLM or of what it uses."""
    lines = [line for pid in processes for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    found = {Path(line.split(maxsplit=5)[-1]) for line in lines if "/dev/shm/" in line}
    return {path for path in found if path.exists() and path.name.startswith(("vllm", "psm_"))}


def check_nothing_left(processes, files):
    end = time.monotonic() + 20.0
    while (any(map(is_alive, processes)) or any(map(Path.exists, files))) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in processes if is_alive(pid)]
    assert not [path for path in files if path.exists()]


def test_nothing_is_left_of_a_replica_that_is_killed(replica):
    line = next(line for line in replica.stdout if line.split() and all(part.isdigit() for part in line.split()))
    workers = [int(part) for part in line.split()]
    assert all(map(is_alive, workers))
    files = shared_memory_of([replica.pid, *workers])
    assert len(files) >= 3
    assert not [path for path in files if path.name.startswith("vllm")]
    replica.kill()
    replica.communicate()
    check_nothing_left(workers, files)


def test_nothing_is_left_of_a_session_that_is_killed_while_it_starts(replica):
    end, files = time.monotonic() + 120.0, set()
    while not files and time.monotonic() < end:
        time.sleep(0.01)
        files = shared_memory_of([replica.pid])
    # The queue to its workers, which are being started.
    assert [path.name[:4] for path in files] == ["psm_"]
    children = [child.pid for child in psutil.Process(replica.pid).children(recursive=True)]
    os.killpg(replica.pid, signal.SIGKILL)
    replica.communicate()
    check_nothing_left(children, files)
