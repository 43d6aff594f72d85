"""Uses of a run's model: exporting, generating, evaluating."""
