"""Checks of what an engine generates: its own draws, proper ends, refusals, and records of units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from cosmos_core.errors import EngineError
from cosmos_core.protocols import CachePolicy, FinishReason, Generated, Model, PlannedRun, Preflight, Request
from cosmos_core.protocols.model import Record
from cosmos_core.testing.conformance.engine.subject import (
    EngineDriver,
    Subject,
    flat,
    refuses,
    stopping_at,
    tokens_of,
    twin,
)
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

_DRAWS: Final = 512
_STANDARD_ERRORS: Final = 5.0
_RECORD: Final = Record(name="hidden", dtype="float32", shape=(3,), option="the engine kit")


def expect_prompt_kept(generated: Generated, prompt: Payload) -> None:
    """Fault a payload that lacks an array of its prompt."""
    for name, given in prompt.arrays.items():
        if name not in generated.payload.arrays or bytes(generated.payload.arrays[name].data) != bytes(given.data):
            fault(f"the payload's {name!r} is not the request's; hand back all arrays of the prompt as they came")


def expect_tokens(generated: Generated) -> None:
    """Fault a payload of tokens without the arrays that the trainer reads, by name, dtype and shape."""
    arrays, number = generated.payload.arrays, generated.num_units
    for name, dtype in (("completion", "int32"), ("logprobs", "float32"), ("versions", "int32")):
        found = (arrays[name].dtype, arrays[name].shape) if name in arrays else None
        if found != (dtype, (number,)):
            fault(f"array {name!r} of a completion of {number} units is {found}; it must be {dtype} [{number}]")


def expect_own_draws(subject: Subject) -> None:
    """Fault draws that depend on anything but the seed, the sample's place in its group, and the unit."""
    engine, read = subject.start(), subject.read
    watched = subject.request("watched", 1, seed=7, num_samples=6, max_units=16)
    (group,) = engine.generate([watched])
    if len(group) != 6:
        fault(f"a request for 6 samples gave {len(group)}")
    different = len({read.content(generated) for generated in group})
    if different < 4:
        fault(f"6 samples of 16 units hold only {different} different completions; draw each from its own stream")
    if not subject.capabilities.seeded:
        return
    others = [subject.request(index, index, seed=index, num_samples=2, max_units=5 + index) for index in range(5)]
    among = engine.generate([*others[:2], watched, *others[2:]])[2]
    if not all(map(read.same, group, among)):
        fault(
            "a request drew other units among others than alone; draw sample i, unit j from (seed, i, j) only, or "
            "declare seeded=False"
        )
    ((single,),) = engine.generate([subject.request("single", 1, seed=7, max_units=16)])
    if not read.same(group[0], single):
        places = [place for place, each in enumerate(group) if read.same(each, single)]
        fault(
            "sample 0 of a group is not what a single sample of the same seed is"
            f"{f': that one is at place {places[0]}' if places else ''}; give the samples in their order, and draw "
            "sample i, unit j from (seed, i, j) only"
        )
    seeds = engine.generate([subject.request(seed, 1, seed=seed, max_units=16) for seed in range(4)])
    if len({read.content(each) for each in flat(seeds)}) < 3:
        fault("four seeds drew the same units; Request.seed must choose the draws")


def expect_distribution(subject: Subject) -> None:
    """Fault units that are drawn from something else than the distribution whose log-probs are reported."""
    temperature = subject.read.temperature
    (results,) = subject.start().generate([subject.request("many", 0, num_samples=_DRAWS, max_units=1)])
    next_V = subject.pricer.next_logprobs(subject.prompts[0], [], temperature=temperature)
    mean = next_V[[tokens_of(generated)[0] for generated in results]].mean()
    probs_V = next_V.exp()
    expected = (probs_V * next_V).sum()
    error = ((probs_V * (next_V - expected).square()).sum() / _DRAWS).sqrt()
    if abs(mean - expected) > _STANDARD_ERRORS * error + subject.read.tolerance:
        fault(
            f"the log-probs of {_DRAWS} units that were drawn after one prompt at temperature {temperature} have "
            f"the mean {mean:.3f}; of draws from that distribution it is {expected:.3f} +- {error:.3f}; draw from "
            "the distribution whose log-probs are reported, after the temperature"
        )


def expect_own_temperatures(subject: Subject) -> None:
    """Fault requests of one batch that are drawn at another's temperature; greedy ones take the likeliest unit."""
    temperatures = [each for each in (0.7, 1.3, 1.0) if subject.read.draws_at(each)][:2]
    drawn = [subject.request(each, index, temperature=each) for index, each in enumerate(temperatures)]
    greedy = [subject.request(f"greedy {index}", index, temperature=0.0, max_units=4) for index in (0, 2)]
    results = subject.start().generate([*drawn, *greedy])
    for request, samples in zip(drawn, results, strict=False):
        subject.expect_logprobs(samples, temperature=request.sampling.temperature)
    if not subject.has_tokens:
        return
    for request, (generated,) in zip(greedy, results[len(drawn) :], strict=True):
        tokens = tokens_of(generated)
        for unit, token in enumerate(tokens):
            next_V = subject.pricer.next_logprobs(request.prompt, tokens[:unit], temperature=1.0)
            if next_V[token] < next_V.max() - subject.read.tolerance:
                likelier = int(next_V.argmax())
                fault(f"at temperature 0, unit {unit} is token {token}, but {likelier} is likelier; take the argmax")


def expect_cut(subject: Subject, engine: EngineDriver, cut: Mapping[str, Any]) -> None:
    """Fault a request whose `top_k` or `top_p` is neither done nor refused."""
    request = subject.request(cut, 1, num_samples=2, max_units=4, **cut)
    try:
        (handle,) = engine.submit([request])
    except EngineError:
        return
    for generated in engine.results(handle):
        tokens = tokens_of(generated)
        for unit, token in enumerate(tokens):
            next_V = subject.pricer.next_logprobs(request.prompt, tokens[:unit], temperature=subject.read.temperature)
            kept = _kept(next_V.exp().tolist(), **cut)
            if token not in kept:
                fault(f"{cut} keeps tokens {sorted(kept)} of unit {unit}, but {token} was drawn; refuse or do it")
            expected, found = next_V[token] - next_V[sorted(kept)].logsumexp(0), subject.read.logprobs(generated)[unit]
            is_processed = subject.capabilities.logprob_semantics == "processed"
            if is_processed and abs(found - expected) > subject.read.tolerance:
                fault(
                    f"with {cut}, unit {unit} has the log-prob {found:.4f}; of the distribution drawn from it "
                    f"is {expected:.4f}; renormalise, or declare logprob_semantics='raw'"
                )


def _kept(probs: list[float], *, top_k: int = 0, top_p: float = 1.0) -> set[int]:
    """Tokens that a cut leaves: the k likeliest, or the fewest whose mass reaches p."""
    kept: set[int] = set()
    mass = 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if (top_k and len(kept) == top_k) or mass >= top_p:
            break
        kept.add(token)
        mass += probs[token]
    return kept


def expect_stops(subject: Subject, model: Model) -> None:
    """Fault completions that go on after a stop token, or end without one: the stop token itself is part of them."""
    stops = set(range(0, model.facts().vocab_size, 3))
    engine = subject.start(model=stopping_at(model, stops))
    for generated in flat(engine.generate([subject.request("stops", 0, num_samples=8, max_units=12)])):
        tokens = tokens_of(generated)
        ends = [unit for unit, token in enumerate(tokens) if token in stops]
        if ends and (ends[0] != len(tokens) - 1 or generated.reason is not FinishReason.STOP):
            fault(
                f"unit {ends[0]} of {len(tokens)} is a stop id, but the completion ends with {generated.reason}; "
                "end it there, the stop id included, with FinishReason.STOP"
            )
        if not ends and (generated.reason is not FinishReason.LENGTH or len(tokens) != 12):
            fault(
                f"a completion without a stop id has {len(tokens)} of 12 units and ends with {generated.reason}; "
                "use Model.facts().stop_ids only, and FinishReason.LENGTH at max_units"
            )


def expect_refused_whole(subject: Subject, engine: EngineDriver, bad: Request) -> None:
    """Fault an impossible request that is accepted, or of whose call the other request enters."""
    good = subject.request(f"beside one {bad.request_id}", 0, max_units=2)
    refuses(EngineError, lambda: engine.submit([good, bad]), f"a request {bad.request_id}")
    stats = engine.stats()
    if stats.num_running + stats.num_waiting:
        fault("of a call with one impossible request, the other one entered; check all before any enters")
    try:
        engine.generate([good])
    except EngineError as error:
        fault(f"of a call with one impossible request, the other one entered: submitted again, it ends with: {error}")


def expect_priorities(subject: Subject) -> None:
    """Fault requests that end in another order than that of their priority, where one slot is theirs."""
    engine, order = subject.start(max_in_flight=1), list[str]()
    engine.pause("keep")
    handles = engine.submit([subject.request(each, 0, priority=each, max_units=2) for each in (5, -1, 0)])
    for handle in handles:
        handle.add_done_callback(lambda done: order.append(done.request.request_id))
    engine.resume()
    for handle in handles:
        engine.results(handle)
    if order != ["-1", "0", "5"]:
        fault(f"requests of priority 5, -1 and 0 with one slot ended in the order {', '.join(order)}; lower is first")


def expect_preflight(preflight: Callable[[Any, PlannedRun], Preflight], given: Any, planned: PlannedRun) -> None:
    """Fault a preflight that says something against a run, or of the same run once this, once that."""
    told, again = (preflight(given, planned) for _ in range(2))
    if not isinstance(told, Preflight):
        fault(f"preflight() returned {told!r}; return a Preflight")
    if told != again:
        fault(f"preflight() said {told}, and of the same run {again}; it must depend on what it is given alone")
    if said := [*told.problems, *([told.absent] if told.absent else [])]:
        fault(f"preflight() refuses a run such as these tests generate for: {said[0]}")


def expect_records(subject: Subject, model: Model) -> None:
    """Fault records that are not those of the forward which computed what is cached of their unit.

    Prompts in parts, prompts that samples share, single units, slots that close up, partial results, updates.
    """
    counting: dict[str, Any] = {"counters": lambda *_: (), "after_step": lambda *_: {}}
    hidden = twin(model, records=lambda _: (_RECORD,), record=lambda _, module: _record(module), **counting)
    engine = subject.start(model=hidden)
    ragged = [subject.request(n, n, seed=n, max_units=1 + 4 * n, num_samples=3) for n in range(len(subject.prompts))]
    for generated in flat(engine.generate(ragged)):
        _expect_record(subject, generated)
    handles = engine.submit(subject.long(6))
    engine.wait_for_units(engine.stats().generated_units + 10)
    engine.pause("abort")
    for generated in flat(map(engine.results, handles)):
        _expect_record(subject, generated)
    if not subject.capabilities.in_flight_update:
        return
    # What ends before it is computed anew keeps its records; over a kept cache, only units before the update had
    # their forward with the old weights; what is computed anew is recorded anew.
    updates: tuple[tuple[int, CachePolicy, bool], ...] = (
        (1, "recompute", True),
        (2, "keep", False),
        (3, "recompute", False),
    )
    for version, cache, is_aborted in updates:
        engine.resume()
        before = engine.stats().generated_units
        handles = engine.submit(subject.long(3))
        engine.pause_in_flight(handles, before + 20)
        engine.load(version, subject.pricer.tensors(version), cache)
        if is_aborted:
            engine.abort([handle.request.request_id for handle in handles])
        else:
            engine.resume()
        weights = version if cache == "recompute" and not is_aborted else version - 1
        for generated in flat(map(engine.results, handles)):
            old = generated.payload.arrays["prompt"].shape[0] + subject.read.versions(generated).count(version - 1) - 1
            _expect_record(subject, generated, weights, last=old if cache == "keep" else None)


def _record(module: Any) -> Callable[[], Mapping[str, torch.Tensor]]:
    """Every unit's last hidden state, in part: it shows whatever was wrong."""
    newest: dict[str, torch.Tensor] = {}

    def note(_: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        hidden_UD = (output[0] if isinstance(output, tuple) else output)[0]
        newest[_RECORD.name] = hidden_UD[:, : _RECORD.shape[0]].float()

    module.get_decoder().layers[-1].register_forward_hook(note)
    return lambda: newest


def _expect_record(subject: Subject, generated: Generated, weights: int = 0, *, last: int | None = None) -> None:
    """Check the records of a completion's first units (all by default) against those of the trainer's forward."""
    if not generated.num_units:
        return
    units = generated.payload.arrays["prompt"].shape[0] + generated.num_units - 1
    array = generated.payload.arrays.get(_RECORD.name)
    if array is None or array.dtype != _RECORD.dtype:
        has = array and array.dtype
        fault(f"the model records {_RECORD.name!r} as {_RECORD.dtype}, the payload has {has}; add it to completions")
    if array.shape != (units, *_RECORD.shape):
        fault(
            f"a prompt and completion of {units + 1} units have records {list(array.shape)}; all units but the "
            "last went through a forward and have one"
        )
    found = torch.from_numpy(np.frombuffer(array.data, np.float32).copy()).reshape(array.shape)
    expected = subject.pricer.recorded(generated.payload, _record, weights=weights)[_RECORD.name]
    apart = (found - expected)[:last].abs().amax(-1)
    scale = 1.0 + float(expected.abs().max())
    if apart.numel() and not apart.max() <= subject.read.tolerance * scale:
        fault(
            f"the record of unit {int(apart.argmax())} of {units} differs by {apart.max():.2g} from that of the "
            "forward which computed what is cached of it; keep records with their units when slots move, prompts "
            "are shared and the cache is computed anew"
        )
