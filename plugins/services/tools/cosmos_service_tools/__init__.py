"""Commands that no run needs: recipes that ship with the core, a recipe of one's own, and the state of a machine."""
