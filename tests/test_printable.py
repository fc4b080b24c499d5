"""Text from elsewhere: nothing in it steers a terminal, and pages of it are cut."""

from __future__ import annotations

from moe_routing_bench.core.text import SHORT, one_line, printable, short

NASTY = "a\x1b[31m\u202eb\nc"


def test_what_cannot_be_printed_is_replaced() -> None:
    assert printable(NASTY) == "a?[31m?b?c"
    assert printable(NASTY, bad=" ", keep="\n") == "a [31m b\nc"
    assert printable(12) == "12"


def test_what_is_too_long_is_cut() -> None:
    assert printable("abcd", 4) == "abcd" and printable("abcde", 4) == "abcd..."
    assert short("x" * SHORT) == "x" * SHORT and short("x" * 10**6) == "x" * SHORT + "..."
    assert one_line(f"{NASTY}\ud800", 100) == "a [31m b c?"
    assert one_line("abcdef", 5) == "ab..."
