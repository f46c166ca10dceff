"""Completion in bash, which splits words at `:` and `=`: `known:timm/resnet50` is three words."""

import os
import re

from click.shell_completion import BashComplete, CompletionItem, split_arg_string


class WholeWords(BashComplete):
    """Completes words that contain `:` or `=`, and gives bash only the part after the last of these."""

    def get_completion_args(self) -> tuple[list[str], str]:
        whole = re.sub(r"\n?([:=]+)\n?", r"\1", "\n".join(_words()))
        _, *args, begun = (" ".join(split_arg_string(word)) for word in whole.split("\n"))
        return args, begun

    def format_completion(self, item: CompletionItem) -> str:
        _, begun = self.get_completion_args()
        last = _words()[-1]
        before = begun if last and not last.strip(":=") else begun.removesuffix(last)
        if begun.startswith("--"):
            before = before.partition("=")[2]
        return f"{item.type},{item.value.removeprefix(before)}"


def _words() -> list[str]:
    """Return the words up to and including the one being completed."""
    return os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]
