"""Looking at a run from outside: status, the screen, the audit."""
