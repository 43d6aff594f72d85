"""Conformance kits: one class a kind. What a plugin declares is tested; what it does not declare must be refused."""
