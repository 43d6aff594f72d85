"""Parameters that a pipeline holds twice: a tied embedding, which enters the first stage and leaves from the last.

Each of the two processes has a copy of its own and a gradient of its own; their sum is the parameter's. Both then take
the same optimizer step, so the copies stay equal.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Self

import attrs
import torch
import torch.distributed as dist

from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.gradients import GradientBuffer


@attrs.frozen(kw_only=True, eq=False)
class Ties:
    """What this process shares with another place of its pipeline.

    Attributes:
        world: The processes of the replica.
        partners: For each parameter that is held twice, in the order of names, the place in the pipeline of the other.
    """

    world: World
    partners: Mapping[str, int]

    @classmethod
    def of(cls, module: torch.nn.Module, world: World) -> Self:
        """Find them; every process of the replica calls it."""
        mesh = world.mesh
        if mesh.size("pp") == 1:
            return cls(world=world, partners={})
        own = [mesh.place("pp"), [name for name, each in module.named_parameters() if each.requires_grad]]
        holders: dict[str, set[int]] = defaultdict(set)
        for answer in world.exchange(json.dumps(own).encode()):
            place, names = json.loads(answer)
            for name in names:
                holders[name].add(place)
        here = mesh.place("pp")
        return cls(
            world=world,
            partners={
                name: next(iter(places - {here}))
                for name, places in sorted(holders.items())
                if here in places and len(places) > 1
            },
        )

    def sum(self, gradients: GradientBuffer) -> None:
        """Add to each gradient that of the other holder."""
        group = self.world.mesh.group("pp") if self.partners else None
        for name, place in self.partners.items():
            assert group is not None
            own = gradients.of(name)
            other = torch.empty_like(own)
            peer = dist.get_global_rank(group, place)
            requests = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, own, peer, group),
                    dist.P2POp(dist.irecv, other, peer, group),
                ]
            )
            for request in requests:
                request.wait()
            own += other
