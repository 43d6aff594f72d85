"""Pictures of coloured shapes, with a question about each."""

from cosmos_dataset_shapes.drawing import Drawing
from cosmos_dataset_shapes.plugin import Shapes, ShapesOptions

__all__ = ["Drawing", "Shapes", "ShapesOptions"]
