"""benchmarks/peers.md agrees with its files."""

import peers


def test_the_page_says_what_was_found():
    assert peers.PAGE.read_text() == peers.page()
