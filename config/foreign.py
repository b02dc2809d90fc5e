"""What other programs call the flags here: nanoGPT, nanochat, Hugging Face, torchtitan, MaxText and lm_eval.

Whoever gives such a flag gets an answer: what it is called here. foreign_flags.txt has pairs of lines: first names that
other programs use, then the answer. An answer fits a program that has each flag that it names (--FLAG, or MODEL for the
argument of that name). Where several pairs have a name, the first whose answer fits is given.
"""

import os
import re

from config.parser import Hints

FOREIGN = os.path.join(os.path.dirname(__file__), "foreign_flags.txt")


def said_of(name, known):
    """In words: what a flag of another program is here, in a program with the flags `known`; "" of any other name."""
    name = name.split(".")[-1]  # torchtitan's have their section before them
    with open(FOREIGN) as f:
        lines = f.read().splitlines()
    said = ""
    for names, words in zip(lines[::2], lines[1::2]):
        named = re.findall(r"--(?:no_)?(\w+)|\b(MODEL)\b", words)
        if {name, name.removeprefix("no_")} & {*names.split()}:
            said = "belongs to another program here"
            if known.keys() >= {flag or argument.lower() for flag, argument in named}:
                return words.strip()
    return said


def hints(of_word=lambda word: ""):
    """The `Hints` of a program. of_word(word) -> what a word that belongs to no flag should have been, or ""."""
    return Hints(said_of, of_word)
