"""Names and commands in messages: short lists, and words that a shell reads back unchanged."""

import subprocess

import pytest

from ckptfix.core.wording import first_names, no_option, shell_join, shell_quote


def test_a_list_is_cut() -> None:
    assert first_names("abcdef") == "a, b, c, d and 2 more"


PLAIN = ["model.pth", "a/b c.pth", "it's.pth", "$HOME", "*.pth", "größe.pth", "", "back\\slash", "--only"]
ODD = ["two\nlines.pth", "tab\t'quoted'\\.pth", "esc\x1b[31m1", "bytes\udcff\udc80.pth", "no\u200bwidth 12", "\x017"]


@pytest.mark.parametrize("word", [*PLAIN, *ODD])
def test_bash_reads_the_word_that_was_meant(word: str) -> None:
    text = shell_quote(word)
    assert text.isprintable()
    done = subprocess.run(["bash", "-c", f"printf %s {text}"], capture_output=True, check=True)
    assert done.stdout == word.encode("utf-8", "surrogateescape")


def test_words_are_joined_by_blanks() -> None:
    assert shell_join(["ckptfix", "repair", "a b.pth", "-o", "x\ny"]) == r"ckptfix repair 'a b.pth' -o $'x\012y'"


@pytest.mark.parametrize(("name", "word"), [("a-x", "a-x"), ("./-x", "./-x"), ("-x", "./-x"), ("--fill", "./--fill")])
def test_a_file_is_not_an_option(name: str, word: str) -> None:
    assert no_option(name) == word
