"""From a recipe to a job: what it needs, and what makes it impossible. No process starts here."""
