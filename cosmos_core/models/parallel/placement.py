"""Arithmetic of pipelines, without torch: which stages a process holds, and which layers a stage has.

Source of the v shape: arXiv:2401.10241, section 6.
"""

from __future__ import annotations

from cosmos_core.errors import ConfigError


def stage_indices(*, size: int, place: int, per_process: int, is_v_shaped: bool) -> tuple[int, ...]:
    """The stages of one process, in the order of the model.

    Args:
        size: Processes of the pipeline.
        place: Place of the process among them.
        per_process: Stages of each.
        is_v_shaped: Whether the order of processes turns round after each pass, instead of starting anew.
    """
    return tuple(turn * size + (size - 1 - place if is_v_shaped and turn % 2 else place) for turn in range(per_process))


def layer_spans(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage, as even as can be.

    What does not divide goes to stages in the middle first: the first has the embedding, the last the output layer.

    Raises:
        ConfigError: There are more stages than layers.
    """
    if num_layers < num_stages:
        raise ConfigError(
            f"policy.mesh.pp: {num_stages} pipeline stages need as many layers, and the model has {num_layers}; "
            "lower pp, or choose policy.parallel.schedule = '1f1b', which has one stage a process"
        )
    middle_first = [*range(1, num_stages - 1), 0, num_stages - 1]
    size, rest = divmod(num_layers, num_stages)
    longer = frozenset(middle_first[:rest])
    spans: list[range] = []
    for stage in range(num_stages):
        start = spans[-1].stop if spans else 0
        spans.append(range(start, start + size + (stage in longer)))
    return spans
