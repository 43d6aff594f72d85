"""The environment `textarena`: games of TextArena, in which a language model moves turn by turn."""
