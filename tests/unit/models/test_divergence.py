import itertools
import math

import torch
import torch.distributed as dist

from cosmos_core.models import head
from cosmos_core.models.head import Vocabulary
from cosmos_core.models.parallel.collectives import copy_to_group
from cosmos_core.protocols.frozen import Divergence, KLTarget
from cosmos_core.testing.worlds import run_world

VOCABULARY, DECISIONS, HIDDEN = 12, 5, 6
KINDS = ["forward-kl", "reverse-kl", "jsd"]


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(DECISIONS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.arange(DECISIONS)


def evaluate(hidden, weight, targets, vocabulary=None, **asked):
    return head.evaluate(
        lambda each: each @ weight.T,
        hidden,
        targets,
        vocabulary=vocabulary or Vocabulary(start=0, size=VOCABULARY),
        temperature=0.5,
        with_entropy=False,
        **asked,
    )


def expected(divergence, ours, theirs):
    """By the definitions, in float64, outcome by outcome."""
    if divergence.top is not None:
        ids = theirs.topk(divergence.top).indices
        ours, theirs = (torch.cat([p.gather(-1, ids), 1 - p.gather(-1, ids).sum(-1, True)], -1) for p in (ours, theirs))

    def kl(p, q):
        return (p * (p / q).log()).sum(-1)

    if divergence.kind == "forward-kl":
        return kl(theirs, ours)
    if divergence.kind == "reverse-kl":
        return kl(ours, theirs)
    mixture = divergence.beta * theirs + (1 - divergence.beta) * ours
    return divergence.beta * kl(theirs, mixture) + (1 - divergence.beta) * kl(ours, mixture)


def probs(hidden, weight):
    return torch.softmax((hidden.double() @ weight.double().T) / 0.5, -1)


def test_divergences_and_their_gradients_are_those_of_the_definitions(monkeypatch):
    for kind in KINDS:
        for top in [None, 3, VOCABULARY + 5]:
            for chunk in [1 << 25, 2 * VOCABULARY]:
                monkeypatch.setitem(head.CHUNK_ELEMENTS, "cpu", chunk)
                divergence = Divergence(kind=kind, beta=0.3, top=top)
                hidden, weight, targets = draw(0)
                other_hidden, other_weight, _ = draw(1)
                with torch.no_grad():
                    theirs = evaluate(other_hidden, other_weight, targets, prediction_for=divergence)
                decided = evaluate(
                    hidden, weight, targets, kl_target=KLTarget(prediction=theirs.prediction, comparison=divergence)
                )
                asked = Divergence(kind=kind, beta=0.3, top=top if top == 3 else None)
                want = expected(asked, probs(hidden, weight), probs(other_hidden, other_weight).detach())
                torch.testing.assert_close(decided.divergence_N.double(), want, rtol=1e-5, atol=1e-6)
                scores = torch.arange(1.0, DECISIONS + 1)
                grads = torch.autograd.grad((decided.divergence_N * scores).sum(), (hidden, weight))
                for mine, true in zip(grads, torch.autograd.grad((want * scores).sum(), (hidden, weight)), strict=True):
                    torch.testing.assert_close(mine, true, rtol=1e-4, atol=2e-5)
                torch.testing.assert_close(decided.logprobs_N, evaluate(hidden, weight, targets).logprobs_N)


def test_telling_fewer_outcomes_apart_never_gives_more():
    for kind in KINDS:
        hidden, weight, targets = draw(0)
        other = draw(1)
        found = []
        for top in (1, 2, 4, 8, None):
            divergence = Divergence(kind=kind, top=top)
            look = evaluate(*other[:2], targets, prediction_for=divergence).prediction
            kl_target = KLTarget(prediction=look, comparison=divergence)
            found.append(evaluate(hidden, weight, targets, kl_target=kl_target).divergence_N)
        for fewer, more in itertools.pairwise(found):
            assert (fewer <= more + 1e-5).all()


def test_ids_are_kept_of_a_part_of_the_vocabulary_alone(monkeypatch):
    """Twice as many bytes as the log-probs of all tokens would say nothing."""
    for top, names in [(None, {"logprobs"}), (99, {"logprobs"}), (3, {"logprobs", "ids"})]:
        for chunk in [1 << 25, 2 * VOCABULARY]:
            monkeypatch.setitem(head.CHUNK_ELEMENTS, "cpu", chunk)
            hidden, weight, targets = draw(0)
            look = evaluate(hidden, weight, targets, prediction_for=Divergence(kind="jsd", top=top)).prediction
            assert {*look} == names
            whole = probs(hidden, weight).log().float()
            ids = look.get("ids", torch.arange(VOCABULARY).expand(DECISIONS, -1))
            torch.testing.assert_close(look["logprobs"], whole.gather(-1, ids), rtol=1e-4, atol=1e-5)
            assert not look["logprobs"].requires_grad


def test_an_impossible_outcome_is_no_nan():
    hidden, weight, targets = draw(0)
    look = evaluate(*draw(1)[:2], targets, prediction_for=Divergence(kind="jsd")).prediction
    logprobs = look["logprobs"].clone()
    logprobs[:, -1] = -math.inf
    prediction = {**look, "logprobs": logprobs}
    for kind in ("forward-kl", "jsd"):
        kl_target = KLTarget(prediction=prediction, comparison=Divergence(kind=kind))
        assert evaluate(hidden, weight, targets, kl_target=kl_target).divergence_N.isfinite().all()


def test_a_split_vocabulary_gives_the_same_on_each_process():
    for top in [None, 3, 9]:
        divergence = Divergence(kind="jsd", beta=0.3, top=top)
        hidden, weight, targets = draw(0)
        look = evaluate(*draw(1)[:2], targets, prediction_for=divergence).prediction
        whole = evaluate(
            hidden, weight, targets, kl_target=KLTarget(prediction=look, comparison=divergence)
        ).divergence_N
        grads = torch.autograd.grad((whole * torch.arange(1.0, 6.0)).sum(), (hidden, weight))
        for rank, (ids, logprobs, divergence_N, hidden_grad, weight_grad) in enumerate(run_world(2, split, top)):
            torch.testing.assert_close(logprobs, look["logprobs"])
            assert (ids is None) == (top is None)
            assert ids is None or torch.equal(ids, look["ids"])
            torch.testing.assert_close(divergence_N, whole.detach())
            torch.testing.assert_close(hidden_grad, grads[0], rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(weight_grad, grads[1][rank * 6 : rank * 6 + 6], rtol=1e-4, atol=2e-5)


def split(top):
    group, rank = dist.group.WORLD, dist.get_rank()
    divergence = Divergence(kind="jsd", beta=0.3, top=top)
    vocabulary = Vocabulary(start=rank * 6, size=6, most=6, group=group)
    hidden, weight, targets = draw(0)
    other_hidden, other_weight, _ = draw(1)
    own, other = (each.detach()[rank * 6 : rank * 6 + 6].clone().requires_grad_() for each in (weight, other_weight))
    with torch.no_grad():
        look = evaluate(other_hidden, other, targets, vocabulary, prediction_for=divergence).prediction
    copied = copy_to_group(hidden, group)
    decided = evaluate(copied, own, targets, vocabulary, kl_target=KLTarget(prediction=look, comparison=divergence))
    grads = torch.autograd.grad((decided.divergence_N * torch.arange(1.0, 6.0)).sum(), (hidden, own))
    return look.get("ids"), look["logprobs"], decided.divergence_N.detach(), *grads
