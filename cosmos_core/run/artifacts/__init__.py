"""What becomes of a run's model: exported, generating, evaluated."""
