"""`cosmos replica` as functions: one more replica for a run that goes on, from any machine that sees its folder."""
