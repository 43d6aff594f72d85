"""Rows of latents: each is encoded by one process of those that train on it, and encoding is progress."""

from types import SimpleNamespace

import pytest

from cosmos_core.config.schema import MeshConfig
from cosmos_core.errors import DataError
from cosmos_core.policy.batches.share import ShareReader
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.protocols import NoOptions
from cosmos_core.testing.worlds import run_world
from cosmos_core.transport.directives import GroupRef, TrainOrder
from cosmos_core.types import Prompt
from tests.world_model import World as WorldModel

BAD = 3


class Counting(WorldModel):
    """Notes what it encodes in `context.encoded`; one row cannot be."""

    def encode_demonstration(self, prompt):
        self.context.encoded.append(prompt.text)
        if prompt.text == str(BAD):
            raise DataError("no video")
        return super().encode_demonstration(prompt)


class Rows:
    def row(self, split, index):
        return Prompt(text=str(index), demonstration=f"video {index}")


def reader_of(world, advance):
    model = Counting(NoOptions(), SimpleNamespace(path=None, encoded=[]))
    return ShareReader(
        model=model, payloads=None, dataset=Rows, longest=9, world=world, seed=5, advance=lambda: advance.append(1)
    )


def order_of(number):
    groups = tuple(GroupRef(position=row, row=row) for row in range(number))
    shares = (tuple(range(number)),)
    return TrainOrder(step=1, attempt=1, stage=0, groups=groups, shares=shares, publish=False)


def shared(axes, number):
    """What a process trains on, encoded, and counted as progress."""
    world, advanced = (World(form_mesh(MeshConfig(**axes), "cpu")) if axes else single_world()), []
    reader = reader_of(world, advanced)
    share = reader.read(order_of(number), solo(world=world), SimpleNamespace())
    held = {
        each.place: {name: bytes(array.data) for name, array in each.payload.arrays.items()} for each in share.sequences
    }
    return held, reader.model.context.encoded, len(advanced), share.dropped, share.counts


@pytest.mark.timeout(60)
def test_each_row_is_encoded_by_one_process():
    number = 9
    whole, encoded, advanced, dropped, counts = shared({}, number)
    assert sorted(whole) == [row for row in range(number) if row != BAD]
    assert (sorted(encoded), advanced) == ([str(row) for row in range(number)], number - 1)
    found = run_world(4, shared, {"dp_shard": 2, "cp": 2}, number)
    assert sorted(text for _, texts, *_ in found for text in texts) == sorted(encoded)
    assert max(len(texts) for _, texts, *_ in found) <= 3
    for first, second in (found[:2], found[2:]):
        assert first[0] == second[0]
        assert (first[3], first[4]) == (second[3], second[4]) == (dropped, counts)
    assert {**found[0][0], **found[2][0]} == whole
    assert not found[0][0].keys() & found[2][0].keys()
