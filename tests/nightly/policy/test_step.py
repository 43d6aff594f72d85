import pytest

from cosmos_core.protocols import Aggregation
from tests.unit.policy.training.test_step import batch, check_two_replicas

__all__ = ["batch"]


@pytest.mark.parametrize("aggregation", [Aggregation.TOKEN_MEAN, Aggregation.SEQUENCE_MEAN_TOKEN_SUM])
def test_two_replicas_do_what_one_does(model, kit, batch, aggregation):
    check_two_replicas(model, kit, batch, aggregation)
