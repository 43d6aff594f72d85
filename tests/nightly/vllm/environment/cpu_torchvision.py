"""Lets torchvision's wheel of PyPI, which is built for CUDA, be imported beside a torch for CPUs.

`make` installs this file with a `.pth` into the environment of the tests of vLLM, and nowhere else. What of torchvision
is written in Python works then; its compiled operators, none of which is used, are declared only.
"""

import importlib.metadata
import sys

_OPERATORS = ("nms", "qnms")


class CpuFinder:
    """First among the finders of modules: it prepares for torchvision when that is looked up, and finds nothing."""

    def __init__(self):
        self._library = None

    def find_spec(self, name, path=None, target=None):
        """Declare the operators that torchvision's Python code refers to, once, where its own library cannot load."""
        if name == "torchvision" and self._library is None and _is_for_cpu("torch") and not _is_for_cpu(name):
            import torch

            self._library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in _OPERATORS:
                self._library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _is_for_cpu(distribution):
    return importlib.metadata.version(distribution).endswith("+cpu")


sys.meta_path.insert(0, CpuFinder())
