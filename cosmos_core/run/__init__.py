"""From a recipe to a finished run: plan, launch, supervise, summarise."""
