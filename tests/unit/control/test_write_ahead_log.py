from __future__ import annotations

from cosmos_core.control.journal import Journal, replay
from cosmos_core.control.write_ahead_log import begin_term


def test_a_term_is_in_the_file_itself_so_that_it_never_comes_again(tmp_path, run):
    it = run()
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.append(it.events[0])
        started = begin_term(it.state, journal)
        assert started.term == it.state.term == 1
        copy = tmp_path / "copy.sqlite"
        copy.write_bytes((tmp_path / "journal.sqlite").read_bytes())
        assert replay(copy).term == 1
