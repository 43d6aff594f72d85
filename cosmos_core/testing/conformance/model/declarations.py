"""Declarations: what is declared is proven, what is not is refused."""

from __future__ import annotations

from typing import Any

import attrs

from cosmos_core.config.loading import recipe_from
from cosmos_core.config.schema import MeshConfig
from cosmos_core.models.parallel.layout import undeclared
from cosmos_core.protocols import ModelCapabilities
from cosmos_core.testing.conformance.model.setting import ModelSetting
from cosmos_core.testing.conformance.plugin import fault


class ModelDeclarations(ModelSetting):
    """Mesh axes that are not declared; payload kinds are tested where payloads are made."""

    def test_undeclared_mesh_axes_are_refused(self, capabilities: ModelCapabilities) -> None:
        """A recipe that asks for what a model cannot do fails before it starts."""
        for axis in attrs.fields(MeshConfig):
            if axis.name in capabilities.mesh_axes:
                continue
            mesh = recipe_from(self._recipe(axis.name)).policy.mesh
            refused = "".join(undeclared(mesh, capabilities.mesh_axes))
            if f"policy.mesh.{axis.name}" in refused:
                continue
            fault(f"a recipe with policy.mesh.{axis.name} = 2 is taken, and the model does not declare that axis")

    def _recipe(self, axis: str) -> dict[str, Any]:
        return {
            "run": {"name": "conformance", "steps": 1},
            "model": {"plugin": self.plugin, "config": {"model_type": "any"}},
            "algorithm": {"plugin": "any"},
            "dataset": {"plugin": "any"},
            # `ep` spreads experts over the processes of other axes.
            "policy": {"mesh": {axis: 2} if axis != "ep" else {"dp_shard": 2, "ep": 2}},
        }
