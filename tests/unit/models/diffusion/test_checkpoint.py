"""The other parts of a checkpoint go beside an exported transformer without being copied."""

import pytest
from torch import nn

from cosmos_core.models.diffusion.checkpoint import export_transformer


@pytest.mark.parametrize("is_cached", [False, True])
def test_weights_of_other_parts_are_linked_also_from_the_cache_of_a_hub(tmp_path, is_cached):
    """There, a file is named by its hash, and its name is a link to it."""
    part = tmp_path / "checkpoint" / "vae"
    part.mkdir(parents=True)
    weights = part / "diffusion_pytorch_model.safetensors"
    stored = tmp_path / "0abc" if is_cached else weights
    stored.write_bytes(b"weights")
    if is_cached:
        weights.symlink_to(stored)
    (part / "config.json").write_text("{}")
    export_transformer(
        nn.Linear(1, 1),
        {"_class_name": "Linear", "_diffusers_version": "0"},
        tmp_path / "exported",
        tmp_path / "checkpoint",
    )
    exported = tmp_path / "exported" / "vae"
    assert (exported / weights.name).samefile(stored)
    assert not (exported / weights.name).is_symlink()
    assert not (exported / "config.json").samefile(part / "config.json")
