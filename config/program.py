"""The command line of a program other than main.py."""

from config import parser
from config.foreign import hints


def read_flags(kind, argv, program, of_word=lambda word: ""):
    """Command line of `program` -> an instance of the dataclass `kind`; `--help` exits. of_word: of `foreign.hints`.
    Raises UserError."""
    given, _ = parser.read_words(kind, argv, program, hints=hints(of_word))
    return kind(**given)
