"""The tracker `mlflow`: every metric of a run in MLflow."""
