"""Questions about videos and images, labelled by the ontologies of Cosmos-Reason1."""

from cosmos_dataset_reason.dataset import ReasonDataset
from cosmos_dataset_reason.ontology import CAPABILITIES, COMMON_SENSE, EMBODIMENTS, levels
from cosmos_dataset_reason.options import ReasonOptions

__all__ = ["CAPABILITIES", "COMMON_SENSE", "EMBODIMENTS", "ReasonDataset", "ReasonOptions", "levels"]
