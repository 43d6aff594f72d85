"""Regions of fused, stacked and padded parameters, found by watching a loader like vLLM's; no vLLM is needed."""

import pytest
import torch
from torch import nn

from cosmos_core.errors import AttestationError, EngineError
from cosmos_core.protocols import TensorSlice
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.weights import slices
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.quantization import dequantise, quantise_tensors
from cosmos_engine_vllm.held import HeldWeights
from cosmos_engine_vllm.regions import find_regions
from cosmos_engine_vllm.shares import Shares

TENSORS = {
    "embed": torch.randn(5, 4),
    "q": torch.randn(4, 4),
    "k": torch.randn(2, 4),
    "v": torch.randn(2, 4),
    "gate_up": torch.randn(6, 4),
    "down": torch.randn(4, 3),
    "bias": torch.randn(4),
}
PLACES = {"q": (0, 4), "k": (4, 6), "v": (6, 8)}


def empty(*shape):
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


class VocabParallelEmbedding(nn.Module):
    """By its name, vLLM's: rows that pad it are nobody's."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = empty(rows, columns)


class Fused(nn.Module):
    """Loads as vLLM's models do: rows of one parameter, halves that are swapped, a padded vocabulary."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.gate_up = VocabParallelEmbedding(8, 4), empty(8, 4), empty(6, 4)
        self.down, self.bias = empty(4, 3), empty(4)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in PLACES:
                first, last = PLACES[name]
                self.qkv.data.narrow(0, first, last - first).copy_(tensor)
            elif name == "gate_up":
                self.gate_up.data[3:].copy_(tensor[:3])
                self.gate_up.data[:3].copy_(tensor[3:])
            elif name == "embed":
                self.embed.weight[: tensor.shape[0]].data.copy_(tensor)
            else:
                self.get_parameter(name).data.copy_(tensor)


class Held:
    """A model of one rank, as the engine and its only worker see it together."""

    def __init__(self, model, tensors, quantization="none"):
        self.form, self.matrices = FORMATS.get(quantization), {name: tuple(tensors[name].shape) for name in MATRICES}
        facts = meta(tensors)
        self.sent = facts if self.form is None else meta(quantise_tensors(self.form, tensors, self.matrices))
        self.weights = HeldWeights(model, find_regions(model, facts), self.sent, form=self.form, matrices=self.matrices)
        self.shares = Shares(self.sent, [self.weights.shards()], "Fused")

    def digest(self):
        return self.shares.combine([self.weights.digests(self.shares.rank_shards()[0])])


MATRICES = ("q", "k", "v", "gate_up", "down")


def meta(tensors):
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def written(tensors, limit=10**9):
    return [
        (piece, tensor[slices.within(piece, slices.whole(name, tuple(tensor.shape)))])
        for name, tensor in tensors.items()
        for piece in slices.chunks(slices.whole(name, tuple(tensor.shape)), limit)
    ]


def load(held, tensors, limit=10**9):
    held.weights.copy(written(tensors, limit))
    held.weights.check(written(tensors, limit), 0)


def test_slices_of_any_size_arrive_where_the_loader_puts_whole_tensors(subtests):
    for limit in [10**9, 5, 1]:
        with subtests.test(limit=limit):
            expected, model = Fused(), Fused()
            expected.load_weights(TENSORS.items())
            load(Held(model, TENSORS), TENSORS, limit)
            for name, parameter in expected.named_parameters():
                torch.testing.assert_close(model.get_parameter(name), parameter, atol=0, rtol=0)


def test_the_digest_is_of_the_canonical_tensors_and_of_what_is_there_now():
    model = Fused()
    loaded = Held(model, TENSORS)
    load(loaded, TENSORS)
    assert loaded.digest() == digest_of(TENSORS)
    model.qkv.data[7, 3] += 1
    assert loaded.digest() != digest_of(TENSORS)
    model.qkv.data[7, 3] = TENSORS["v"][1, 3]
    assert loaded.digest() == digest_of(TENSORS)
    model.gate_up.data = model.gate_up.data.flip(0)
    assert loaded.digest() != digest_of(TENSORS)


def test_a_slice_across_regions_reaches_both():
    model = Fused()
    loaded = Held(model, TENSORS)
    piece = TensorSlice(name="gate_up", start=(2, 1), shape=(2, 2))
    loaded.weights.copy([(piece, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))])
    assert model.gate_up[5].tolist() == [0, 1, 2, 0]
    assert model.gate_up[0].tolist() == [0, 3, 4, 0]
    assert model.gate_up.count_nonzero() == 4


def test_parameters_are_looked_up_once_an_update(monkeypatch):
    model, calls = Fused(), []
    loaded, found = Held(model, TENSORS), model.named_parameters
    monkeypatch.setattr(model, "named_parameters", lambda: calls.append(1) or found())
    loaded.weights.copy(written(TENSORS, limit=1))
    assert len(calls) == 1


def test_a_search_for_regions_writes_nothing():
    model = Fused()
    Held(model, TENSORS)
    assert not any(parameter.any() for parameter in model.parameters())


def test_values_held_in_more_bits_give_the_digest_of_what_was_sent():
    tensors = {name: tensor.bfloat16() for name, tensor in TENSORS.items()}
    loaded = Held(Fused(), tensors)
    load(loaded, tensors)
    assert loaded.digest() == digest_of(tensors)


class Down(nn.Module):
    """Has one parameter, and a loader of the test's own."""

    def __init__(self, loader):
        super().__init__()
        self.down, self.loader = empty(4, 3), loader

    def load_weights(self, weights):
        for _, tensor in weights:
            self.loader(self, tensor)


def test_a_tensor_that_is_held_in_another_form_is_refused(subtests):
    for name, loader, message in [
        (
            "partly",
            lambda model, tensor: model.down.data[:2].copy_(tensor[:2]),
            "no tensor of the model goes into.*down",
        ),
        ("changed", lambda model, tensor: model.down.data.copy_(tensor + 1), "no data"),
        ("turned", lambda model, tensor: model.down.data.view(3, 4).copy_(tensor.t()), "turned or folded"),
        ("read", lambda model, tensor: model.down.data.fill_(tensor.sum().item()), "cannot be given 'down' alone"),
        ("twice", lambda model, tensor: [model.down.data[i : i + 2].copy_(tensor[1:3]) for i in (0, 2)], "form of its"),
    ]:
        with subtests.test(name=name, loader=loader, message=message), pytest.raises(EngineError, match=message):
            find_regions(Down(loader), {"down": TENSORS["down"].to("meta")})


class Experts(nn.Module):
    """Loads as vLLM's experts do where each rank has whole ones: those of others are passed over."""

    def __init__(self, first, last):
        super().__init__()
        self.mine, self.gate, self.w2 = range(first, last), empty(4, 4), empty(last - first, 4, 3)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "gate":
                self.gate.data.copy_(tensor)
            elif int(name.partition(".")[2]) in self.mine:
                self.w2.data[int(name.partition(".")[2]) - self.mine.start].copy_(tensor)


def test_each_rank_has_whole_experts_and_attests_these():
    tensors = {"gate": torch.randn(4, 4), **{f"expert.{number}": torch.randn(4, 3) for number in range(4)}}
    facts, models = meta(tensors), [Experts(0, 2), Experts(2, 4)]
    ranks = [HeldWeights(model, find_regions(model, facts), facts) for model in models]
    shares = Shares(facts, [rank.shards() for rank in ranks], "Experts")
    held = [{piece.name for piece, _ in layout} for layout in shares.layout().values()]
    assert held == [{"gate", "expert.0", "expert.1"}, {"gate", "expert.2", "expert.3"}]
    for index, rank in enumerate(ranks):
        pieces = [(piece, data) for piece, data in written(tensors) if piece.name in held[index]]
        rank.copy(pieces)
        rank.check(pieces, index)
    found = [rank.digests(shares.rank_shards()[index]) for index, rank in enumerate(ranks)]
    assert shares.combine(found) == digest_of(tensors)


def test_a_tensor_of_which_no_rank_has_all_is_refused():
    half = TensorSlice(name="down", start=(0, 0), shape=(2, 3))
    with pytest.raises(EngineError, match="copies 6 of the 12 values of 'down'"):
        Shares(meta({"down": TENSORS["down"]}), [{"down": [half]}, {"down": [half]}], "Odd")


def test_a_parameter_or_a_saved_buffer_that_no_tensor_goes_into_is_named():
    model = Fused()
    model.derived = empty(2, 2)
    with pytest.raises(EngineError, match=r"has 1 parameters that no tensor of the model goes into.*are derived:"):
        find_regions(model, meta(TENSORS))
    del model.derived
    model.register_buffer("scale", torch.ones(2))
    model.register_buffer("table", torch.arange(3.0), persistent=False)
    find_regions(model, meta(TENSORS))
    model.scale[1] = 0.5
    with pytest.raises(EngineError, match="first are scale:"):
        find_regions(model, meta(TENSORS))


def test_what_is_not_what_was_written_is_named():
    model = Fused()
    held = Held(model, TENSORS)
    held.weights.copy(written(TENSORS))
    held.weights.check(written(TENSORS), 3)
    model.qkv.data[5, 2] += 1
    with pytest.raises(AttestationError, match=r"^k: vLLM's rank 3 does not hold"):
        held.weights.check(written(TENSORS), 3)


def test_parameters_are_made_of_codes_and_scales(subtests):
    for quantization in sorted(FORMATS):
        with subtests.test(quantization=quantization):
            model = Fused()
            held = Held(model, TENSORS, quantization)
            published = quantise_tensors(held.form, TENSORS, held.matrices)
            load(held, published, limit=3)
            assert held.digest() == digest_of(published)
            expected = Fused()
            rounded = {name: dequantise(held.form, name, published, TENSORS[name].shape[-1]) for name in MATRICES}
            expected.load_weights({**TENSORS, **rounded}.items())
            for name, parameter in expected.named_parameters():
                torch.testing.assert_close(model.get_parameter(name), parameter, atol=0, rtol=0)
            model.gate_up.data[4, 1] += 1
            with pytest.raises(AttestationError, match=rf"^gate_up: the parameter gate_up .* its {quantization} codes"):
                held.weights.check(written(published), 0)


def test_columns_that_are_cut_within_a_block_have_the_whole_blocks_codes(subtests):
    for quantization in sorted(FORMATS):
        with subtests.test(quantization=quantization):
            form, matrix = FORMATS[quantization], torch.randn(6, 80)
            published = quantise_tensors(form, {"w": matrix}, {"w": (6, 80)})
            whole = dequantise(form, "w", published, 80)
            ranks = []
            for first, last in ((0, 20), (20, 80)):
                model = Down(lambda model, tensor, part=slice(first, last): model.down.data.copy_(tensor[:, part]))
                model.down = empty(6, last - first)
                regions = find_regions(model, meta({"w": matrix}))
                ranks.append((model, HeldWeights(model, regions, meta(published), form=form, matrices={"w": (6, 80)})))
            shares = Shares(meta(published), [held.shards() for _, held in ranks], "Cut")
            for rank, (_, held) in enumerate(ranks):
                pieces = [
                    (shard, published[name][slices.within(shard, slices.whole(name, tuple(published[name].shape)))])
                    for name, shards in shares.shards[rank].items()
                    for shard in shards
                ]
                held.copy(pieces)
                held.check(pieces, rank)
            digests = [held.digests(shares.rank_shards()[rank]) for rank, (_, held) in enumerate(ranks)]
            assert shares.combine(digests) == digest_of(published)
            assert torch.equal(torch.cat([model.down for model, _ in ranks], 1), whole)
            # The scales of a row are the same on both; of one that has another they are not attested.
            digests[1]["w::scale"][-1 if form.block is None else 0] += 1
            if form.block is None:
                with pytest.raises(AttestationError, match="w::scale: ranks 0 and 1 of vLLM hold other values"):
                    shares.combine(digests)
            else:
                with pytest.raises(AttestationError, match="ranks 0 and 1"):
                    shares.combine(digests)


def test_rows_of_a_fused_parameter_are_known_by_their_tensor():
    model = Fused()
    held = Held(model, TENSORS).weights
    assert [held.owner_of(model.qkv, row) for row in (0, 3, 4, 6, 7)] == ["q", "q", "k", "v", "v"]
    assert [held.owner_of(model.gate_up, row) for row in (0, 5)] == ["gate_up", "gate_up"]
    assert [held.owner_of(model.embed.weight, row) for row in (4, 5)] == ["embed", ""]
