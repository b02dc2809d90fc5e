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

END_OF_TEXT = "<|endoftext|>"
# How text is cut before byte pairs are merged, for tokenizers trained here: GPT-2's pattern. (tiktoken writes it with
# possessive quantifiers, which the training library lacks; they change speed, not the cuts.)
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TOKENIZER_FILES = (".tiktoken", ".json")  # endings of the names of files that hold a tokenizer
# A letter before a space and a letter: every tiktoken pattern, and ours, ends a word there, so the tokens of the parts
# of a text that is cut there are those of the whole.
CUT = re.compile("[A-Za-z](?= [A-Za-z])")


def whole_characters(text):
    """The text with U+FFFD for every lone surrogate, which JSON and a command line can hold and no tokenizer takes."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class HubTokenizer:
    """A Hugging Face tokenizer.json with the methods of a `tiktoken.Encoding` that the programs use.

    Text that spells a special token stays text. `eot_token` is the eos_token of the tokenizer_config.json beside it, or
    <|endoftext|>; `bos_token` its bos_token, or the same. Raises UserError.
    """

    def __init__(self, path):
        import tokenizers

        self.path = path
        content = content_of(path)
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            self.tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as e:  # the library raises no other class
            raise UserError(f"--tokenizer {path}: is no tokenizer ({e}); copy it again.") from None
        self.tokenizer.encode_special_tokens = True
        # a file may ask for either, for the batches of its own model
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        ids = self.tokenizer.get_vocab().values()
        self.n_vocab = max(ids, default=-1) + 1
        config = read_json(os.path.dirname(path), "tokenizer_config.json")
        end = config.get("eos_token") or END_OF_TEXT
        self.eot_token = self.id_of(end)
        begin = self.id_of(config.get("bos_token"))
        self.bos_token = self.eot_token if begin is None else begin
        if self.eot_token is None:
            raise UserError(
                f"--tokenizer {path}: has no token {end}; name its eos_token in the tokenizer_config.json beside it."
            )

    def id_of(self, token):
        """The id of a token as tokenizer_config.json names it, None where there is none."""
        token = token.get("content") if isinstance(token, dict) else token
        return self.tokenizer.token_to_id(token) if isinstance(token, str) else None

    def __reduce__(self):
        # a pickled tokenizers.Tokenizer would forget that special tokens are text
        return HubTokenizer, (self.path,)

    def encode_ordinary(self, text):
        return self.tokenizer.encode(whole_characters(text), add_special_tokens=False).ids

    def before_text(self):
        """Token ids that the tokenizer itself puts before every text."""
        return self.tokenizer.encode("").ids

    def encode_to_numpy(self, text, disallowed_special=()):
        return np.array(self.encode_ordinary(text), np.uint32)

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)


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
            f"--tokenizer {name}: neither a file ending in .tiktoken or .json nor one of {', '.join(names)}."
        )
    try:
        return tiktoken.get_encoding(name)
    except OSError as e:  # requests' errors are OSErrors too
        raise UserError(
            f"--tokenizer {name}: cannot be fetched ({type(e).__name__}); name a folder of ranks in TIKTOKEN_CACHE_DIR."
        ) from None


def content_of(path):
    """Bytes of a tokenizer's file, local or remote. Raises UserError."""
    content = read_file(path)
    if content is None:
        raise UserError(f"--tokenizer {path}: there is no such file; give another.")
    return content


def load_ranks(path):
    """The `tiktoken.Encoding` of a file of ranks. Raises UserError."""
    import tiktoken

    ranks = {}
    try:
        # not by tiktoken's loader, which caches by name and so would miss a file made anew
        for line in content_of(path).splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        # tiktoken itself panics at others
        every_byte = all(bytes([b]) in ranks for b in range(256))
        if not every_byte or sorted(ranks.values()) != list(range(len(ranks))):
            raise ValueError("not all bytes are in it, or not the ranks 0, 1, 2, ..., each once")
    except ValueError as e:
        raise UserError(f"--tokenizer {path}: not a file of tiktoken ranks ({e}).") from None
    return tiktoken.Encoding(
        os.path.basename(path).removesuffix(".tiktoken"),
        pat_str=PATTERN,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
    )


def dump_ranks(ranks):
    """The bytes of a file of tiktoken ranks, {token bytes: rank}."""
    tokens = sorted(ranks, key=ranks.get)
    return b"".join(base64.b64encode(token) + b" %d\n" % ranks[token] for token in tokens)


def text_of(encoding, ids):
    """Text of token ids. Those that only the model knows are left out; bytes that are not UTF-8 become U+FFFD."""
    return encoding.decode([t for t in ids if known(encoding, t)])


@functools.cache
def known(encoding, token):
    """Whether the tokenizer has this token id; a tiktoken vocabulary may have gaps."""
    try:
        encoding.decode([token])
    except KeyError:
        return False
    return True


def content_sha256(encoding):
    """Hash of a tokenizer's file, which a manifest keeps: of its ranks or of the whole tokenizer.json."""
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


def meaning(encoding):
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


def made_shards(encoding, name, sha256):
    """Whether shards were made with a tokenizer, by `name` and `sha256`, or one whose end of text, tokens but special
    ones, and order of the merges are the same; None where nothing tells."""
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
    return end == its_end and meaning(encoding) == meaning(other)


def shards_tokenizer(root, manifest, flag=""):
    """Name or file of the tokenizer of shards below `root`: of --tokenizer, `flag`, or of their manifest; or ""."""
    return flag or in_folder(root, manifest.get("tokenizer", ""))


def in_folder(folder, name):
    """The tokenizer that a file in `folder` calls `name`: a path where it is a file, too."""
    return os.path.join(folder, name) if name.endswith(TOKENIZER_FILES) else name


def keep_tokenizer(folder, name):
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
        raise UserError(str(e).removeprefix("--tokenizer ")) from None
