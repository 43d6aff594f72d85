"""Sphinx directives whose text is made from the code, so that it cannot say anything else than the code."""
