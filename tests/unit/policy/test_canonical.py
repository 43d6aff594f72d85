import torch

from cosmos_core.policy.canonical import canonical_tensors


def test_tied_weights_are_there_once_under_their_first_name(model, kit):
    module = model.build(seed=0, dtype=torch.float32, device=kit.CPU)
    tensors = canonical_tensors(module)
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in module.parameters())


def test_they_are_views_without_gradient(model, kit):
    module = model.build(seed=0, dtype=torch.float32, device=kit.CPU)
    tensor = canonical_tensors(module)["model.norm.weight"]
    assert not tensor.requires_grad
    tensor.fill_(3.0)
    assert module.model.norm.weight[0].item() == 3.0


def test_of_buffers_only_persistent_floating_ones():
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    assert list(canonical_tensors(module)) == ["weight", "bias", "running_mean", "running_var"]
