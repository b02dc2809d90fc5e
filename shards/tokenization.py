"""Tokenizers: tiktoken's own, those trained here, and Hugging Face's; and the files that hold them."""

import base64
import functools
import hashlib
import json
import os
import re

import numpy as np

from runtime.files import read_file, read_json, write_file
from runtime.messages import UserError
from shards import manifest, published

END_OF_TEXT = "<|endoftext|>"
# How text is cut before byte pairs are merged, for tokenizers trained here: GPT-2's pattern. (tiktoken writes it with
# possessive quantifiers, which the training library lacks; they change speed, not the cuts.)
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# A piece of such a text, or a part of one: all that a token trained here can be.
PART = r"'(?:[sdmt]|ll?|ve?|re?)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
# What patterns in use cut in different places. The space before it is one that some tokenizers add to a text.
PROBE = " x don't I'LL (self.name) == 1234567;\n\n\t\tif aB == CamelCase:\r\n        return   1\n"
TOKENIZER_FILES = (".tiktoken", ".json")  # endings of the names of files that hold a tokenizer
# A letter before a space and a letter: every tiktoken pattern, and ours, ends a word there, so the tokens of the parts
# of a text that is cut there are those of the whole.
CUT = re.compile("[A-Za-z](?= [A-Za-z])")


def whole_characters(text):
    """The text with U+FFFD for every lone surrogate, which JSON and a command line can hold and no tokenizer takes."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class HubTokenizer:
    """A Hugging Face tokenizer.json with the methods of a `tiktoken.Encoding` that the programs use.

    Text that spells a special token or the end of text stays text. `eot_token` is the eos_token of the
    tokenizer_config.json beside it, or <|endoftext|>; `bos_token` its bos_token, or the same. Raises UserError.
    """

    def __init__(self, path):
        import tokenizers

        self.path = path
        content = content_of(path)
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            self.tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as e:  # the library raises no other class
            raise UserError(
                f"is no tokenizer ({e}); copy it again", flag="tokenizer", value=path
            ) from None
        self.tokenizer.encode_special_tokens = True
        # a file may ask for either, for the batches of its own model
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        ids = self.tokenizer.get_vocab().values()
        self.n_vocab = max(ids, default=-1) + 1
        config = read_json(os.path.dirname(path), "tokenizer_config.json")
        self.end = content_of_token(config.get("eos_token") or END_OF_TEXT)
        self.eot_token = self.id_of(self.end)
        begin = self.id_of(content_of_token(config.get("bos_token")))
        self.bos_token = self.eot_token if begin is None else begin
        if self.eot_token is None:
            raise UserError(
                f"has no token {self.end}; name its eos_token in the tokenizer_config.json beside "
                f"it",
                flag="tokenizer",
                value=path,
            )
        # whatever the file says of it ("special": false): text that spells it must not split a document
        self.tokenizer.add_special_tokens([self.end])

    def id_of(self, token):
        """The id of a token, None where there is none."""
        return self.tokenizer.token_to_id(token) if isinstance(token, str) else None

    def __reduce__(self):
        # a pickled tokenizers.Tokenizer would forget that special tokens are text
        return HubTokenizer, (self.path,)

    def encode_ordinary(self, text):
        """Token ids of a text, none of which is the end of text."""
        ids = self.encode_text(whole_characters(text))
        if self.eot_token not in ids:
            return ids
        # Some vocabularies (Unigram's) have the end among their words. Text that spells it is cut within it.
        half = len(self.end) // 2
        middle = f"(?<={re.escape(self.end[:half])})(?={re.escape(self.end[half:])})"
        parts = map(self.encode_text, re.split(middle, whole_characters(text)))
        # where it still comes, it is what the tokenizer has for characters that it does not know
        return [token for ids in parts for token in ids if token != self.eot_token]

    def encode_text(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def before_text(self):
        """Token ids that the tokenizer itself puts before every text."""
        return self.tokenizer.encode("").ids

    def encode_to_numpy(self, text, disallowed_special=()):
        return np.array(self.encode_ordinary(text), np.uint32)

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def content_of_token(token):
    """The text of a token as tokenizer_config.json names it."""
    return token.get("content") if isinstance(token, dict) else token


def load_tokenizer(name):
    """The `tiktoken.Encoding` of a name or of a .tiktoken file, or the `HubTokenizer` of a .json. Raises UserError."""
    import tiktoken

    if name.endswith(".json"):
        return HubTokenizer(name)
    if name.endswith(".tiktoken"):
        return load_ranks(name)
    names = tiktoken.list_encoding_names()
    if name not in names:
        raise UserError(
            f"neither a file ending in .tiktoken or .json nor one of {', '.join(names)}",
            flag="tokenizer",
            value=name,
        )
    try:
        return tiktoken.get_encoding(name)
    except OSError as e:  # requests' errors are OSErrors too
        raise UserError(
            f"cannot be fetched ({type(e).__name__}); name a folder of ranks in TIKTOKEN_CACHE_DIR",
            flag="tokenizer",
            value=name,
        ) from None


def content_of(path):
    """Bytes of a tokenizer's file, local or remote. Raises UserError."""
    content = read_file(path)
    if content is None:
        raise UserError("there is no such file; give another", flag="tokenizer", value=path)
    return content


def load_ranks(path):
    """The `tiktoken.Encoding` of a file of ranks: a published one, or one that data/train_tokenizer.py wrote. Raises
    UserError, also where the ranks must come from another program, whose way to cut text is not known."""
    import tiktoken

    ranks = {}
    try:
        # not by tiktoken's loader, which caches by name and so would miss a file made anew
        for line in content_of(path).splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        # tiktoken itself panics at others
        if not all(bytes([b]) in ranks for b in range(256)):
            raise ValueError("not all bytes are in it")
        # of the ranks, since a copy may have other line ends
        sha256 = hashlib.sha256(dump_ranks(ranks)).hexdigest()
        if known := published.encoding_arguments(sha256, ranks):
            return tiktoken.Encoding(**known)
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise ValueError("not the ranks 0, 1, 2, ..., each once")
    except ValueError as e:
        raise UserError(
            f"not a file of tiktoken ranks ({e})", flag="tokenizer", value=path
        ) from None
    if foreign := cut_by_pattern(ranks):
        raise UserError(
            f"comes from another program, and ranks do not say where that cuts text "
            f"(data/train_tokenizer.py makes no token like {foreign[0]!r}, the first of {len(foreign):,}); give the "
            f"tokenizer.json of its model or, of a published file, a whole copy",
            flag="tokenizer",
            value=path,
        )
    return tiktoken.Encoding(
        os.path.basename(path).removesuffix(".tiktoken"),
        pat_str=PATTERN,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
    )


def cut_by_pattern(ranks):
    """The tokens, by rank, that no text cut by `PATTERN` contains. Training with it makes none, and other patterns soon
    make some: the first one of cl100k_base has rank 280."""
    # the library that trains, so both know the same letters
    from tokenizers import Regex, pre_tokenizers

    cut = pre_tokenizers.Split(Regex(PART), "isolated")
    found = []
    for token in sorted(ranks, key=ranks.get):
        try:
            text = token.decode()
        except UnicodeDecodeError:  # a part of a character
            continue
        if len(cut.pre_tokenize_str(text)) > 1:
            found.append(text)
    return found


def dump_ranks(ranks):
    """The bytes of a file of tiktoken ranks, {token bytes: rank}."""
    tokens = sorted(ranks, key=ranks.get)
    return b"".join(base64.b64encode(token) + b" %d\n" % ranks[token] for token in tokens)


def text_of(encoding, ids):
    """Text of token ids. Those that only the model knows are left out; bytes that are not UTF-8 become U+FFFD."""
    return encoding.decode([t for t in ids if has_token(encoding, t)])


def check_ids(encoding, ids, vocab_size, where):
    """Raises UserError, which begins with `where`, for a token id that a model of this vocabulary does not know: a
    tokenizer may have more tokens."""
    top = int(max(ids, default=0))
    if top >= vocab_size:
        raise UserError(
            f"{where} has token {text_of(encoding, [top])!r}, whose id {top} is beyond the model's vocabulary of "
            f"{vocab_size}; leave it out."
        )


@functools.cache
def has_token(encoding, token):
    """Whether the tokenizer has this token id; a tiktoken vocabulary may have gaps."""
    try:
        encoding.decode([token])
    except KeyError:
        return False
    return True


def content_sha256(encoding):
    """Hash of a tokenizer's file, which a manifest keeps: of its ranks, on which the pattern depends, too, or of the
    whole tokenizer.json."""
    if isinstance(encoding, HubTokenizer):
        return encoding.sha256
    return hashlib.sha256(dump_ranks(encoding._mergeable_ranks)).hexdigest()


def special_tokens(encoding):
    """Ids of a tokenizer's special tokens, which no text becomes."""
    if isinstance(encoding, HubTokenizer):
        added = encoding.tokenizer.get_added_tokens_decoder()
        return {number for number, token in added.items() if token.special}
    return set(encoding._special_tokens.values())


def byte_letters():
    """{byte: the letter that GPT-2's tokenizer writes for it}: printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted({*range(256)} - {*printable})
    letters = {b: chr(256 + i) for i, b in enumerate(others)}
    return letters | {b: chr(b) for b in printable}


def tokens_of(encoding):
    """{id: token} of a tokenizer of any kind, as a byte-level tokenizer.json spells them."""
    if isinstance(encoding, HubTokenizer):
        return {number: token for token, number in encoding.tokenizer.get_vocab().items()}
    letters = byte_letters()
    tokens = {number: name for name, number in encoding._special_tokens.items()}
    for token, rank in encoding._mergeable_ranks.items():
        tokens[rank] = "".join(letters[b] for b in token)
    return tokens


@functools.cache
def longest_token(encoding):
    """Characters of the longest token that text becomes, as `tokens_of` spells it: a text of n tokens has at most n
    times these, unless the tokenizer drops or joins some."""
    special = special_tokens(encoding)
    return max(len(token) for number, token in tokens_of(encoding).items() if number not in special)


def tokens_and_merges(encoding):
    """({id: token} of those that text becomes, the tokens that pairs of others merge into, in that order)."""
    tokens = tokens_of(encoding)
    if isinstance(encoding, HubTokenizer):
        content = json.loads(encoding.tokenizer.to_str())
        merged = map("".join, content["model"].get("merges", []))
    else:
        ranks = sorted(encoding._mergeable_ranks.values())
        merged = [tokens[rank] for rank in ranks if len(tokens[rank]) > 1]
    for number in {*special_tokens(encoding), encoding.eot_token}:
        tokens.pop(number, None)
    return tokens, list(dict.fromkeys(merged))  # some files list all pairs that make a token


def made_shards(encoding, name, made):
    """Whether shards with the manifest `made` were made with a tokenizer, or with another, `name`, that has the same
    end of text, tokens but special ones, order of the merges and cuts; None where nothing tells."""
    sha256 = made.get("tokenizer_sha256")
    if manifest.end_of_text(made) not in (None, encoding.eot_token):
        return False
    if sha256 == content_sha256(encoding):
        return True
    if sha256 and not name.endswith(".json") and not isinstance(encoding, HubTokenizer):
        return False  # both hashes are of ranks
    if not name:
        return None
    try:
        other = load_tokenizer(name)
    except UserError:  # shards that were copied without it, or no network
        return None
    end, its_end = (tokens_of(one).get(other.eot_token) for one in (encoding, other))
    same_tokens = end == its_end and tokens_and_merges(encoding) == tokens_and_merges(other)
    return same_tokens and encoding.encode_ordinary(PROBE) == other.encode_ordinary(PROBE)


def shards_tokenizer(root, manifest, flag=""):
    """Name or file of the tokenizer of shards below `root`: of --tokenizer, `flag`, or of their manifest; or ""."""
    return flag or in_folder(root, manifest.get("tokenizer", ""))


def in_folder(folder, name):
    """The tokenizer that a file in `folder` calls `name`: a path where it is a file, too."""
    return os.path.join(folder, name) if name.endswith(TOKENIZER_FILES) else name


def copy_tokenizer(folder, name):
    """Copy the files of the tokenizer `name`, if any, into a folder; returns its name there. Raises UserError."""
    ending = os.path.splitext(name)[1]
    if ending not in TOKENIZER_FILES:
        return name
    copies = {f"tokenizer{ending}": name}
    if ending == ".json":  # the tokenizer last: where it is there, all are
        beside = os.path.join(os.path.dirname(name), "tokenizer_config.json")
        copies = {"tokenizer_config.json": beside} | copies
    for copy, path in copies.items():
        content = read_file(path)
        at = os.path.join(folder, copy)
        there = read_file(at)
        if content in (None, there):
            continue
        if there is not None:
            raise UserError(
                f"{at} is another file than the {copy} of --tokenizer {name}; move it away, or give another folder."
            )
        write_file(at, content)
    return f"tokenizer{ending}"


def folder_tokenizer_name(folder):
    """Name or file of the tokenizer of a run directory or folder in the Hugging Face format; "" where it has none."""
    config = read_json(folder, "config.json")
    return in_folder(folder, config.get("encoding", "tokenizer.json") or "")


def folder_tokenizer(folder):
    """The tokenizer of a run directory or folder in the Hugging Face format, or None where it has none."""
    name = folder_tokenizer_name(folder)
    if not name or (name.endswith(TOKENIZER_FILES) and read_file(name) is None):
        return None
    try:
        return load_tokenizer(name)
    except UserError as e:  # no flag named it
        raise e.renamed(tokenizer="") from None
