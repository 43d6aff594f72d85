"""The grouping of a batch's completions into requests."""

from __future__ import annotations

from collections.abc import Sequence

from cosmos_reward_remote.wires import Seen


def groups_of(seen: Sequence[Seen], *, most_bytes: int, one_shape: bool) -> list[list[int]]:
    """The requests that a batch becomes: places in it, in order.

    Args:
        seen: The batch.
        most_bytes: Most bytes of the arrays of a request; what is larger by itself goes alone.
        one_shape: Whether the arrays of a request must have one shape.
    """
    groups: list[list[int]] = []
    latest: dict[tuple[int, ...], tuple[list[int], int]] = {}
    for index, each in enumerate(seen):
        shape = each.array.shape if one_shape else ()
        group, size_bytes = latest.get(shape, ([], 0))
        if not group or size_bytes + each.array.nbytes > most_bytes:
            group, size_bytes = [], 0
            groups.append(group)
        group.append(index)
        latest[shape] = (group, size_bytes + each.array.nbytes)
    return groups
