import threading

import pytest
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.policy.publication import Publications


class Publisher:
    def __init__(self):
        self.go = threading.Event()
        self.staged = []
        self.error = None

    def stage(self, version, tensors, dtype):
        self.staged.append((version, {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()}))
        return version

    def seal(self, snapshot):
        self.go.wait(10)
        if self.error:
            raise self.error
        return f"sealed {snapshot}"


def test_training_goes_on_while_a_version_is_sealed():
    publisher, reports = Publisher(), []
    publications = Publications(publisher, torch.bfloat16, reports.append)
    assert publications.newest == -1
    weight = torch.ones(2)
    publications.publish(3, {"w": weight})
    weight.fill_(9.0)
    assert (publications.newest, reports) == (3, [])
    publisher.go.set()
    publications.close()
    assert reports == ["sealed 3"]
    ((_, tensors),) = publisher.staged
    assert tensors["w"].dtype == torch.bfloat16
    assert tensors["w"].tolist() == [1.0, 1.0]


def test_a_failure_in_the_background_comes_up():
    publisher = Publisher()
    publisher.error = WeightSyncError("no room")
    publisher.go.set()
    publications = Publications(publisher, torch.float32, print)
    publications.publish(1, {})
    with pytest.raises(WeightSyncError, match="no room"):
        publications.close()
