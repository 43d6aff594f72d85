"""Pictures of coloured shapes, with a question about each."""

from cosmos_dataset_shapes.dataset import Shapes, ShapesOptions
from cosmos_dataset_shapes.drawing import Drawing

__all__ = ["Drawing", "Shapes", "ShapesOptions"]
