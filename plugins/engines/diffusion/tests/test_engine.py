"""What the engine records: decisions, their weights, their noise, and what samples of a group share."""

import attrs
import pytest
import torch

from cosmos_core.errors import EngineError
from cosmos_core.protocols import FinishReason
from cosmos_core.testing.conformance.engine.latents import TinyDenoiser
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.shards import canonical_tensors
from cosmos_engine_diffusion.schedule import noise


def latents(generated, name, started):
    return torch.from_numpy(started.array(generated, name).copy())


def other_weights(model, seed=5):
    return canonical_tensors(model.build(seed=seed, dtype=torch.float32, device=torch.device("cpu")))


def load(engine, version, tensors):
    engine.begin_update(version)
    for piece, _ in engine.layout()[0]:
        engine.write(0, piece, tensors[piece.name])
    return engine.commit_update()


def logprobs_of(model, payload, seed):
    module = model.build(seed=seed, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        return torch.cat(
            [model.decide(module, batch, temperature=1.0).logprobs_N for batch in model.pack([payload], budget=3)]
        )


WAYS = {
    "all": {},
    "guided": {"guidance": 4.0},
    "even": {"trained": "even"},
    "window": {"trained": "window", "window": 3, "window_stop": 6},
    "branching": {"trained": "window", "shared_prefix": True},
    "cps": {"sampler": "cps", "noise_level": 0.5},
    "edm": {"sampler": "edm"},
    "edm-window": {"sampler": "edm", "trained": "window", "window_start": 1, "window_stop": 5},
}
DECISIONS = {"all": 7, "guided": 7, "even": 4, "window": 3, "branching": 2, "cps": 7, "edm": 6, "edm-window": 2}


def test_stored_logprobs_are_what_a_trainer_computes(started):
    for way, options in WAYS.items():
        run = started(**options)
        requests = [
            run.request(index, run.prompt("abc"[index], num_given_frames=index % 2), num_samples=3, seed=index)
            for index in range(3)
        ]
        for results in run.generate(*requests):
            for generated in results:
                stored = latents(generated, "logprobs", run)
                assert generated.num_units == len(stored) == DECISIONS[way]
                assert generated.reason is FinishReason.STOP
                found = logprobs_of(run.model, generated.payload, seed=1)
                assert (found - stored).abs().max() < 1e-6
                torch.testing.assert_close(run.engine.score([generated.payload], temperature=1.0)[0], found)


def test_each_state_is_kept_once(started):
    run = started(trained="even")
    ((generated,),) = run.generate(run.request("one"))
    assert run.array(generated, "places").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    run = started()
    ((generated,),) = run.generate(run.request("one"))
    assert run.array(generated, "places").tolist() == [[index, index + 1] for index in range(7)]
    assert run.array(generated, "states").shape[0] == 8


def test_sixteen_samples_in_flight_go_on_with_new_weights(started, pause_when):
    paused = pause_when(lambda engine: engine.stats().generated_units >= 16 * 20)
    run = started()
    handles = run.engine.submit([run.request(index, seed=index, max_units=40) for index in range(16)])
    assert paused.wait(20)
    before = run.engine.stats().generated_units
    assert not any(handle.is_done for handle in handles)
    tensors = other_weights(run.model)
    assert load(run.engine, 3, tensors) == digest_of(tensors)
    run.engine.resume()
    old = 0
    for handle in handles:
        (generated,) = handle.result(30)
        versions, stored = run.array(generated, "versions"), latents(generated, "logprobs", run)
        assert sorted(set(versions.tolist())) == [0, 3] == [generated.oldest_version, generated.newest_version]
        assert versions.tolist() == sorted(versions.tolist())
        for version, seed in ((0, 1), (3, 5)):
            made = torch.from_numpy(versions == version)
            apart = (logprobs_of(run.model, generated.payload, seed) - stored).abs()
            assert apart[made].max() < 1e-6
            assert apart[~made].max() > 1e-3
        old += int((versions == 0).sum())
    assert old == before


def test_a_group_branches_from_one_prefix(started):
    run = started(trained="window", window=2, window_start=3, window_stop=5, shared_prefix=True)
    (results,) = run.generate(run.request("group", num_samples=6, max_units=8))
    first = [latents(generated, "states", run)[0] for generated in results]
    assert all(torch.equal(first[0], each) for each in first)
    assert len({latents(generated, "sample", run).sum().item() for generated in results}) == 6
    stats = run.engine.stats()
    # Three steps for all, and of each sample two that are decided and three behind them.
    assert (stats.generated_units, stats.prompt_units) == (6 * 2, 3 + 6 * 3)


def test_what_is_finished_is_held_once_and_not_on_the_device(started):
    run = started(sampler="edm", max_in_flight=1)
    finish_payload, held = run.engine._end, []

    def concluded(sample):
        finish_payload(sample)
        held.append((sample.state, sample.history, sample.decisions, sample.generated(9).newest_version))

    run.engine._end = concluded
    ((first, second),) = run.generate(run.request("group", num_samples=2))
    assert held == [(None, (), [], 0)] * 2
    assert first.payload.arrays["states"].shape == second.payload.arrays["states"].shape


def test_a_group_that_waits_for_its_prefix_is_counted_and_can_be_aborted(started):
    run = started(trained="window", window_start=40, shared_prefix=True, max_in_flight=2)
    run.engine.pause()
    handle, other = run.engine.submit(
        [run.request("group", num_samples=5, max_units=90), run.request("other", max_units=90)]
    )
    run.engine.pause()
    assert run.engine.stats().num_waiting == 6
    run.engine.abort(["group"])
    assert [each.reason for each in handle.result(30)] == [FinishReason.ABORTED] * 5
    run.engine.resume()
    assert other.result(30)[0].reason is FinishReason.STOP


def test_where_a_window_begins_is_drawn_for_each_group(started):
    run = started(trained="window", window=2, window_start=1, window_stop=6)
    groups = run.generate(*[run.request(seed, seed=seed, num_samples=2, max_units=10) for seed in range(24)])
    begins = [{round(float(run.array(each, "times")[0]), 5) for each in results} for results in groups]
    assert {len(each) for each in begins} == {1}
    assert len(set.union(*begins)) == 4


def test_samples_of_a_group_begin_with_the_same_noise_if_asked_to(started):
    for same in [False, True]:
        run = started(same_noise=same)
        (results,) = run.generate(run.request("group", num_samples=3))
        first = [latents(generated, "states", run)[0] for generated in results]
        assert torch.equal(first[0], first[1]) == same
        assert not torch.equal(latents(results[0], "states", run)[1], latents(results[1], "states", run)[1])


def test_regressions_are_points_of_the_sample(started):
    run = started(sampler="euler", regressions=3)
    (results,) = run.generate(run.request("group", run.prompt("x", num_given_frames=1), num_samples=2))
    for generated in results:
        assert generated.num_units == 3
        assert not {"states", "places", "steps", "offsets"} & generated.payload.arrays.keys()
        stored = latents(generated, "logprobs", run)
        assert (stored < 0).all()
        assert (logprobs_of(run.model, generated.payload, seed=1) - stored).abs().max() < 1e-6
    assert run.array(results[0], "noise_seed") != run.array(results[1], "noise_seed")
    assert run.engine.stats().generated_units == 6


def test_an_evaluation_has_a_sample_and_media_and_no_decisions(started):
    run = started(render_size=2)
    ((generated,),) = run.generate(run.request("one", temperature=0.0))
    assert generated.num_units == 0
    assert (generated.oldest_version, generated.newest_version) == (0, 0)
    assert run.array(generated, "states").shape == (0, 3, 2, 4, 4)
    assert generated.media.arrays["frames"].shape == (2, 2, 2, 3)


def test_what_is_aborted_keeps_its_decisions(started, pause_when):
    paused = pause_when(lambda engine: engine.stats().generated_units >= 10)
    run = started()
    (handle,) = run.engine.submit([run.request("one", max_units=500)])
    assert paused.wait(20)
    run.engine.abort(["one"])
    (generated,) = handle.result(30)
    assert generated.num_units == 10
    assert generated.media is None
    assert "sample" not in generated.payload.arrays
    stored = latents(generated, "logprobs", run)
    assert (logprobs_of(run.model, generated.payload, seed=1) - stored).abs().max() < 1e-6


def test_noise_is_that_of_its_place_alone():
    shape = (3, 2, 4, 4)
    places = [(seed, index, step) for seed in (0, 1, 2**63 - 1) for index in (0, 1) for step in (-1, 0, 1)]
    drawn = [noise(*place, shape) for place in places]
    assert all(torch.equal(noise(*place, shape), each) for place, each in zip(places, drawn, strict=True))
    assert len({each.sum().item() for each in drawn}) == len(places)
    many = noise(0, 0, 0, (100_000,))
    assert many.dtype == torch.float32
    assert abs(many.mean()) < 0.02
    assert abs(many.std() - 1) < 0.02


def test_a_model_that_renders_no_frames_ends_the_engine(started):
    class Blind:
        latent_spec, velocity, neutral_guidance = (
            TinyDenoiser.latent_spec,
            TinyDenoiser.velocity,
            TinyDenoiser.neutral_guidance,
        )

        def __getattr__(self, name):
            return getattr(TinyDenoiser(), name)

        def render(self, latents, prompt):
            return attrs.evolve(TinyDenoiser().render(latents, prompt), kind="latents")

    run = started(model=Blind())
    with pytest.raises(EngineError, match="the model renders a payload of kind 'latents'"):
        run.generate(run.request("one"))
    with pytest.raises(EngineError):
        run.engine.health()


def test_all_frames_given_leave_nothing_to_denoise(started):
    class Whole(TinyDenoiser):
        def latent_spec(self, prompt):
            return attrs.evolve(super().latent_spec(prompt), is_given_T=torch.ones(2, dtype=torch.bool))

    run = started(model=Whole())
    with pytest.raises(EngineError, match="all of its 2 latent frames are given"):
        run.engine.submit([run.request("one", run.prompt("x", num_given_frames=1))])
