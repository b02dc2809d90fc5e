"""Where a long text may be cut: pieces whose tokens, one after the other, are those of the whole."""

import json
import re
import string

import regex  # tiktoken's too

# After a letter that a space and a letter follow. Every pattern of tiktoken's, and ours, ends a word there and begins
# the next one with the space, so a cut changes no token. Hugging Face's tokenizers: see `may_be_cut`.
CUT = re.compile("[A-Za-z](?= [A-Za-z])")

# Parts of Hugging Face's tokenizers that do the same to a text and to its pieces
LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Nmt", "Precompiled"}
LOCAL_PRE_TOKENIZERS = {"Digits", "Punctuation"}
CUT_AT_SPACES = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}

# What a regular expression consists of: a class of characters, one character, or what opens a group
ATOM = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[\^?(?:\\.|[^\]\\])+\]|\((?:\?[a-z]*[:=!>])?|.", re.DOTALL)
ESCAPES = {*"pPsSdDwWrntzZ", *string.punctuation}  # those that Oniguruma and Python's regex read alike
NESTED = re.compile(r"\[(?:\\.|[^\\])*?(\[|&&)", re.DOTALL)  # a class in a class


def may_be_cut(tokenizer):
    """Whether the tokens of a text are those of its pieces, cut as CUT says, by the definition of a
    tokenizers.Tokenizer. Where that cannot be read off, or something is put before every text, they may not be."""
    normalizers = parts_of(tokenizer.normalizer, "normalizers")
    if not all(map(is_local, normalizers)) or not cuts_at_spaces(parts_of(tokenizer.pre_tokenizer, "pretokenizers")):
        return False
    if normalizers:  # what it makes of a letter and a space must be these
        made = [tokenizer.normalizer.normalize_str(f"{x} {x}") for x in string.ascii_letters]
        if not all(re.fullmatch("[A-Za-z] [A-Za-z]", text) for text in made):
            return False
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
    return not any(token.rstrip or re.search(r"\s", token.content) for token in added)


def parts_of(part, inner):
    """The parts of a normaliser or pre-tokenizer in order, as tokenizer.json writes them; inner: its name for those of
    a sequence."""
    if part is None:
        return []
    waiting, found = [json.loads(part.__getstate__())], []
    while waiting:
        first = waiting.pop(0)
        if first["type"] == "Sequence":
            waiting = first[inner] + waiting
        else:
            found.append(first)
    return found


def is_local(normalizer):
    """Whether a normaliser does the same to a text and to its pieces."""
    kind, pattern = normalizer["type"], normalizer.get("pattern", {})
    if kind == "Strip":
        return not normalizer["strip_left"]  # at its right a piece has a letter
    if kind == "Replace":
        return pattern.get("Regex") == " {2,}" or bool(re.fullmatch("[^A-Za-z ]+", pattern.get("String", "")))
    return kind in LOCAL_NORMALIZERS


def cuts_at_spaces(pre_tokenizers):
    """Whether the pre-tokenizers cut wherever CUT does, and what they do to a word depends on the word alone."""
    for i, part in enumerate(pre_tokenizers):
        kind, pattern = part["type"], part.get("pattern", {})
        cuts = kind in CUT_AT_SPACES or part.get("use_regex") or (kind == "Metaspace" and part["split"])
        local = kind in LOCAL_PRE_TOKENIZERS
        if kind == "Split" and part["behavior"] in ("Isolated", "Removed") and not part["invert"]:
            pattern = pattern.get("Regex") or regex.escape(pattern["String"])
            local = stops_at_spaces(pattern)
            cuts = local and matches_letters(pattern)
        if cuts:  # "first" is what begins a text, which the words of pieces may do too
            return all(later.get("prepend_scheme") != "first" for later in pre_tokenizers[i + 1 :])
        if not local:
            return False
    return False


def stops_at_spaces(pattern):
    """Whether no match of a regular expression goes from a letter on to a space, or depends on its standing there.
    Also False for what this does not read: anchors, classes in classes, looking behind, groups that hold a space."""
    try:
        regex.compile(pattern)
    except regex.error:
        return False
    atoms, depth, after_letter = ATOM.findall(pattern), 0, False
    escapes = set(re.findall(r"\\(.)", pattern, re.DOTALL))
    if escapes - ESCAPES or "^" in atoms or ("(", "?") in zip(atoms, atoms[1:]):
        return False
    for atom in atoms:
        if atom[0] == "(" or atom == ")":
            depth += 1 if atom[0] == "(" else -1
        elif atom == "|":
            after_letter &= depth > 0
        elif atom not in ("*", "+", "?"):
            letter = any(regex.match(atom, x) for x in string.ascii_letters)
            space = regex.match(atom, " ") or atom in ("$", r"\z", r"\Z")  # a space, or the end of a piece
            if NESTED.match(atom) or (space and (letter or after_letter or depth)):
                return False
            after_letter |= letter
    return True


def matches_letters(pattern):
    """Whether a regular expression that `stops_at_spaces` matches any letter before a space, that letter alone."""
    matches = [regex.match(pattern, f"{x} a") for x in string.ascii_letters]
    return all(m and m.end() == 1 for m in matches)
