"""Balancing, against transformers' own loss and hand-worked numbers."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from cosmos_model_moe import balance
from cosmos_model_moe.gating import SIGMOID, SOFTMAX


def test_one_sequence_is_the_loss_of_transformers():
    logits_UE = torch.randn(13, 6, generator=torch.Generator().manual_seed(1))
    probabilities_UE = SOFTMAX.probabilities(logits_UE)
    experts_UK = probabilities_UE.topk(2).indices
    ours_S = balance.sequence_balance(
        probabilities_UE, experts_UK, torch.zeros(13, dtype=torch.int64), 1, counts_per_choice=False
    )
    theirs = load_balancing_loss_func((logits_UE,), num_experts=6, top_k=2)
    assert ours_S.tolist() == pytest.approx([theirs.item()], abs=1e-6)


def test_each_sequence_is_its_own_loss_whatever_lies_beside_it():
    logits_UE = torch.randn(12, 4, generator=torch.Generator().manual_seed(2))
    probabilities_UE = SOFTMAX.probabilities(logits_UE)
    experts_UK = probabilities_UE.topk(2).indices
    sequence_U = torch.tensor([0] * 7 + [1] * 4 + [3])
    ours_S = balance.sequence_balance(probabilities_UE, experts_UK, sequence_U, 4, counts_per_choice=False)
    parts = logits_UE.split([7, 4, 1])
    alone = [load_balancing_loss_func((part,), num_experts=4, top_k=2).item() for part in parts]
    assert ours_S.tolist() == pytest.approx([alone[0], alone[1], 0.0, alone[2]], abs=1e-6)


def test_deepseeks_loss_by_hand():
    # Two units, three experts, one chosen: loads 3/(1·2)·(2, 0, 0), mean affinities (0.55, 0.25, 0.2).
    probabilities_UE = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.2, 0.3]])
    experts_UK = torch.tensor([[0], [0]])
    loss_S = balance.sequence_balance(probabilities_UE, experts_UK, torch.zeros(2).long(), 1, counts_per_choice=True)
    assert loss_S.tolist() == pytest.approx([3.0 * 0.55])


def test_equal_loads_and_affinities(subtests):
    for counts_per_choice, expected in [(True, 1.0), (False, 2.0)]:
        with subtests.test(counts_per_choice=counts_per_choice, expected=expected):
            experts_UK = torch.tensor([[0, 1], [2, 3]])
            loss_S = balance.sequence_balance(
                torch.full((2, 4), 0.25), experts_UK, torch.zeros(2).long(), 1, counts_per_choice=counts_per_choice
            )
            assert loss_S.tolist() == [expected]


def test_parts_of_a_sequence_on_two_processes_add_up():
    logits_UE = torch.randn(10, 4, generator=torch.Generator().manual_seed(3))
    probabilities_UE = SIGMOID.probabilities(logits_UE)
    experts_UK = probabilities_UE.topk(2).indices
    sequence_U = torch.tensor([0] * 6 + [1] * 4)
    whole_S = balance.sequence_balance(probabilities_UE, experts_UK, sequence_U, 2, counts_per_choice=True)
    zs_S = balance.sequence_z(logits_UE, sequence_U, 2)
    halves = [slice(0, 5), slice(5, 10)]
    sent = {}

    def total_of(key):
        def total(tensor):
            sent.setdefault(key, []).append(tensor)
            return sum(sent[key][-2:])

        return total

    parts = {}
    # The first round finds out what each half would send; in the second every half has both.
    for _ in range(2):
        for number, half in enumerate(halves):
            parts[number] = (
                balance.sequence_balance(
                    probabilities_UE[half],
                    experts_UK[half],
                    sequence_U[half],
                    2,
                    counts_per_choice=True,
                    total=total_of("b"),
                ),
                balance.sequence_z(logits_UE[half], sequence_U[half], 2, total=total_of("z")),
            )
    assert (parts[0][0] + parts[1][0]).tolist() == pytest.approx(whole_S.tolist(), abs=1e-6)
    assert (parts[0][1] + parts[1][1]).tolist() == pytest.approx(zs_S.tolist(), abs=1e-6)


def test_the_gradient_of_the_balance_moves_affinity_away_from_the_busy():
    logits_UE = torch.zeros(3, 3, requires_grad=True)
    experts_UK = torch.tensor([[0], [0], [1]])
    loss_S = balance.sequence_balance(
        SOFTMAX.probabilities(logits_UE), experts_UK, torch.zeros(3).long(), 1, counts_per_choice=False
    )
    loss_S.sum().backward()
    gradient_E = logits_UE.grad.sum(0)
    assert gradient_E[0] > gradient_E[1] > gradient_E[2]


def test_the_z_loss_by_hand():
    logits_UE = torch.tensor([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]])
    ln2 = torch.tensor(2.0).log().item()
    loss_S = balance.sequence_z(logits_UE, torch.tensor([0, 0, 1]), 2)
    assert loss_S.tolist() == pytest.approx([(ln2**2 + (1 + ln2) ** 2) / 2, (5 + ln2) ** 2])


def test_the_bias_rises_where_load_is_short():
    bias_E = torch.tensor([0.0, 0.5, 0.0, -0.5])
    load_E = balance.load_of(torch.tensor([[0, 1], [0, 1], [0, 2]]), 4)
    assert load_E.tolist() == [3, 2, 1, 0]
    balance.move_bias(bias_E, load_E, 0.1)
    assert bias_E.tolist() == pytest.approx([-0.1, 0.4, 0.1, -0.4])
    balance.move_bias(bias_E, torch.full((4,), 2.0), 0.1)
    assert bias_E.tolist() == pytest.approx([-0.1, 0.4, 0.1, -0.4])


def test_imbalance():
    assert balance.imbalance(torch.tensor([3.0, 2.0, 1.0, 0.0])) == pytest.approx(1.0)
    assert balance.imbalance(torch.full((4,), 2.0)) == 0.0
    assert balance.imbalance(torch.zeros(4)) == 0.0
