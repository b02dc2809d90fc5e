"""Tokenizers and their files: tiktoken's own, those trained here, and Hugging Face's."""

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
# GPT-2's pattern, by which tokenizers trained here cut a text into pieces before they merge byte pairs. (tiktoken
# writes it with possessive quantifiers, which the training library lacks. They change the speed and not the pieces.)
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# A piece of such a text, or a part of a piece. Every token trained here is one.
PART = r"'(?:[sdmt]|ll?|ve?|re?)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
# A text that the patterns in use cut in different places. It starts with a space since some tokenizers add one.
PROBE = " x don't I'LL (self.name) == 1234567;\n\n\t\tif aB == CamelCase:\r\n        return   1\n"
TOKENIZER_FILES = (".tiktoken", ".json")  # endings of the names of files that hold a tokenizer
CHAT_TEMPLATE = "chat_template.jinja"
# what transformers writes beside a tokenizer.json
BESIDE = ("tokenizer_config.json", CHAT_TEMPLATE)
# A letter that is followed by a space and a letter. Every tiktoken pattern, and the one above, ends a piece there. So a
# text may be cut there: its parts have together the same tokens as the whole.
CUT = re.compile("[A-Za-z](?= [A-Za-z])")


def whole_characters(text):
    """The text with U+FFFD in place of every lone surrogate. JSON and command lines can hold those, but no tokenizer
    accepts them."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class HubTokenizer:
    """A Hugging Face tokenizer.json with the methods of a `tiktoken.Encoding` that the programs use.

    A text that spells a special token, such as the end of text, is encoded as text and not as that token. `eot_token`
    is the id of the eos_token in the tokenizer_config.json beside it, or of <|endoftext|>. `bos_token` is the id of the
    bos_token there, or `eot_token`. Raises UserError.
    """

    def __init__(self, path):
        import tokenizers

        self.path = path
        content = content_of(path)
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            self.tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as e:  # the library raises this class itself
            raise UserError(
                f"is no tokenizer ({e}); copy it again", flag="tokenizer", value=path
            ) from None
        self.tokenizer.encode_special_tokens = True
        # A file may ask for truncation or padding, for the batches of its own model.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        ids = self.tokenizer.get_vocab().values()
        self.n_vocab = max(ids, default=-1) + 1
        config = read_json(os.path.dirname(path), "tokenizer_config.json")
        self.end = content_of_token(config.get("eos_token") or END_OF_TEXT)
        self.eot_token = self.id_of(self.end)
        bos_token = self.id_of(content_of_token(config.get("bos_token")))
        self.bos_token = self.eot_token if bos_token is None else bos_token
        if self.eot_token is None:
            raise UserError(
                f"has no token {self.end}; name its eos_token in the tokenizer_config.json beside "
                f"it",
                flag="tokenizer",
                value=path,
            )
        # Even if the file says "special": false. Otherwise a text that spells it would end its document there.
        self.tokenizer.add_special_tokens([self.end])

    def id_of(self, token):
        """The id of a token, None for a token that the tokenizer does not have."""
        return self.tokenizer.token_to_id(token) if isinstance(token, str) else None

    def __reduce__(self):
        # Worker processes read the file again: a pickled tokenizers.Tokenizer forgets `encode_special_tokens`.
        return HubTokenizer, (self.path,)

    def encode_ordinary(self, text):
        """The token ids of a text. None of them is the end of text."""
        ids = self.encode_text(whole_characters(text))
        if self.eot_token not in ids:
            return ids
        # Some vocabularies (Unigram's) have the end of text among their words. A text that spells it is cut in the
        # middle of it, so that its halves become other tokens.
        half = len(self.end) // 2
        middle = f"(?<={re.escape(self.end[:half])})(?={re.escape(self.end[half:])})"
        parts = map(self.encode_text, re.split(middle, whole_characters(text)))
        # If the end of text is still there, the tokenizer also uses it for characters that it does not know.
        return [token for ids in parts for token in ids if token != self.eot_token]

    def encode_text(self, text):
        """The token ids of a text, without those that the tokenizer would add before and after it."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def before_text(self):
        """The token ids that the tokenizer itself puts before every text."""
        return self.tokenizer.encode("").ids

    def encode_to_numpy(self, text, disallowed_special=()):
        """`encode_ordinary` as a uint32 array. The second argument is one that tiktoken's method has."""
        return np.array(self.encode_ordinary(text), np.uint32)

    def decode(self, ids):
        """The text of token ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def content_of_token(token):
    """The text of a token in tokenizer_config.json, which names it by a string or by an object with its content."""
    return token.get("content") if isinstance(token, dict) else token


def load_tokenizer(name):
    """The tokenizer with this name: for one of tiktoken's names or a .tiktoken file a `tiktoken.Encoding`, for a .json
    file a `HubTokenizer`. Raises UserError."""
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
    except OSError as e:  # the errors of the library requests are OSErrors too
        raise UserError(
            f"cannot be fetched ({type(e).__name__}); name a folder of ranks in TIKTOKEN_CACHE_DIR",
            flag="tokenizer",
            value=name,
        ) from None


def content_of(path):
    """The bytes of a tokenizer's file, local or remote. Raises UserError."""
    content = read_file(path)
    if content is None:
        raise UserError("there is no such file; give another", flag="tokenizer", value=path)
    return content


def load_ranks(path):
    """The `tiktoken.Encoding` of a file of ranks, either a published one or one that data/train_tokenizer.py wrote.

    Ranks do not say by which pattern a text is cut before they apply. So it raises UserError also where the ranks come
    from another program, whose pattern is unknown.
    """
    import tiktoken

    ranks = {}
    try:
        # Not by tiktoken's own loader, which caches files by name: it would miss that a file was made again.
        for line in content_of(path).splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        # tiktoken itself panics if a byte is missing.
        if not all(bytes([b]) in ranks for b in range(256)):
            raise ValueError("not all bytes are in it")
        # The hash of the ranks and not of the file, since a copy may have other line endings.
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
    """The tokens, in the order of their ranks, that no piece of a text cut by `PATTERN` contains. Training with PATTERN
    makes no such token, and training with another pattern soon makes some: the first of cl100k_base has rank 280."""
    # The library that also trains, so that both agree on which characters are letters.
    from tokenizers import Regex, pre_tokenizers

    cut = pre_tokenizers.Split(Regex(PART), "isolated")
    found = []
    for token in sorted(ranks, key=ranks.get):
        try:
            text = token.decode()
        except UnicodeDecodeError:  # the token is a part of a character
            continue
        if len(cut.pre_tokenize_str(text)) > 1:
            found.append(text)
    return found


def dump_ranks(ranks):
    """The bytes of a file of these tiktoken ranks, {token bytes: rank}."""
    tokens = sorted(ranks, key=ranks.get)
    return b"".join(base64.b64encode(token) + b" %d\n" % ranks[token] for token in tokens)


def text_of(encoding, ids):
    """The text of token ids. Ids that only the model has are left out; bytes that are not UTF-8 become U+FFFD."""
    return encoding.decode([t for t in ids if has_token(encoding, t)])


def check_ids(encoding, ids, vocab_size, where):
    """Raises UserError, whose message starts with `where`, for a token id beyond the model's vocabulary: a tokenizer
    may have more tokens than the model."""
    top = int(max(ids, default=0))
    if top >= vocab_size:
        raise UserError(
            f"{where} has token {text_of(encoding, [top])!r}, whose id {top} is beyond the model's vocabulary of "
            f"{vocab_size}; leave it out."
        )


@functools.cache
def has_token(encoding, token):
    """Whether the tokenizer has a token with this id; the ids of a tiktoken vocabulary may have gaps."""
    try:
        encoding.decode([token])
    except KeyError:
        return False
    return True


def content_sha256(encoding):
    """The sha256 of a tokenizer, which manifests store: that of its ranks, which also determine its pattern, or that of
    the whole tokenizer.json."""
    if isinstance(encoding, HubTokenizer):
        return encoding.sha256
    return hashlib.sha256(dump_ranks(encoding._mergeable_ranks)).hexdigest()


@functools.cache
def special_tokens(encoding):
    """The ids of a tokenizer's special tokens. No text is encoded as one of them."""
    if isinstance(encoding, HubTokenizer):
        added = encoding.tokenizer.get_added_tokens_decoder()
        return {number for number, token in added.items() if token.special}
    return set(encoding._special_tokens.values())


def ordinary(encoding, ids):
    """The token ids without special tokens. Only these make the text of an answer, as in transformers and vLLM."""
    special = special_tokens(encoding)
    return [token for token in ids if token not in special]


def byte_letters():
    """{byte: the character that GPT-2's tokenizer writes for it}. Printable bytes are written as themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted({*range(256)} - {*printable})
    letters = {b: chr(256 + i) for i, b in enumerate(others)}
    return letters | {b: chr(b) for b in printable}


def tokens_of(encoding):
    """{id: token} of any tokenizer, as a byte-level tokenizer.json would spell them."""
    if isinstance(encoding, HubTokenizer):
        return {number: token for token, number in encoding.tokenizer.get_vocab().items()}
    letters = byte_letters()
    tokens = {number: name for name, number in encoding._special_tokens.items()}
    for token, rank in encoding._mergeable_ranks.items():
        tokens[rank] = "".join(letters[b] for b in token)
    return tokens


@functools.cache
def longest_token(encoding):
    """The number of characters of the longest token that is not special, as `tokens_of` spells it. A text of n tokens
    has at most n times as many characters, unless the tokenizer drops or joins some."""
    special = special_tokens(encoding)
    return max(len(token) for number, token in tokens_of(encoding).items() if number not in special)


def tokens_and_merges(encoding):
    """({id: token} of the tokens that are not special, [the tokens that pairs of others merge into, in the order of
    the merges])."""
    tokens = tokens_of(encoding)
    if isinstance(encoding, HubTokenizer):
        content = json.loads(encoding.tokenizer.to_str())
        merged = map("".join, content["model"].get("merges", []))
    else:
        ranks = sorted(encoding._mergeable_ranks.values())
        merged = [tokens[rank] for rank in ranks if len(tokens[rank]) > 1]
    for number in {*special_tokens(encoding), encoding.eot_token}:
        tokens.pop(number, None)
    # Without duplicates: some files list several pairs that make the same token.
    return tokens, list(dict.fromkeys(merged))


def made_shards(encoding, name, made):
    """Whether shards can be read with the tokenizer `encoding`. made: their manifest. name: their own tokenizer.

    They can be if `encoding` made them, or if their own tokenizer has the same end of text, the same tokens except
    special ones, the same order of merges and the same cuts. Returns None where that is unknown.
    """
    sha256 = made.get("tokenizer_sha256")
    if manifest.end_of_text(made) not in (None, encoding.eot_token):
        return False
    if sha256 == content_sha256(encoding):
        return True
    if sha256 and not name.endswith(".json") and not isinstance(encoding, HubTokenizer):
        return False  # both are hashes of ranks, so the ranks differ
    if not name:
        return None
    try:
        other = load_tokenizer(name)
    except UserError:  # the shards were copied without their tokenizer, or there is no network
        return None
    end = tokens_of(encoding).get(other.eot_token)
    its_end = tokens_of(other).get(other.eot_token)
    same_tokens = end == its_end and tokens_and_merges(encoding) == tokens_and_merges(other)
    return same_tokens and encoding.encode_ordinary(PROBE) == other.encode_ordinary(PROBE)


def shards_tokenizer(root, manifest, flag=""):
    """The name or file of the tokenizer of shards below `root`: what --tokenizer gives as `flag`, else what their
    manifest names; "" where neither names one."""
    return flag or in_folder(root, manifest.get("tokenizer", ""))


def in_folder(folder, name):
    """The tokenizer that a file in `folder` calls `name`: if that is the name of a file, its path."""
    return os.path.join(folder, name) if name.endswith(TOKENIZER_FILES) else name


def copy_tokenizer(folder, name):
    """Copy the files of the tokenizer `name` into a folder, and return its name there. One of tiktoken's names has no
    files. Raises UserError where the folder has another tokenizer."""
    ending = os.path.splitext(name)[1]
    if ending not in TOKENIZER_FILES:
        return name
    copies = {f"tokenizer{ending}": name}
    if (
        ending == ".json"
    ):  # the tokenizer itself is copied last: where it is, the other files are too
        beside = os.path.dirname(name)
        copies = {file: os.path.join(beside, file) for file in BESIDE} | copies
    for copy, path in copies.items():
        content = read_file(path)
        at = os.path.join(folder, copy)
        there = read_file(at)
        if content in (None, there):  # there is nothing to copy, or it is there already
            continue
        if there is not None:
            raise UserError(
                f"{at} is another file than the {copy} of --tokenizer {name}; move it away, or give another folder."
            )
        write_file(at, content)
    return f"tokenizer{ending}"


def folder_tokenizer_name(folder):
    """The name or file of the tokenizer of a run directory or a folder in the Hugging Face format; "" where it has
    none."""
    config = read_json(folder, "config.json")
    return in_folder(folder, config.get("encoding", "tokenizer.json") or "")


def has_chat_template(folder):
    """Whether the tokenizer of a folder has a chat template, in a file of its own or, as earlier, in its config."""
    if read_json(folder, "tokenizer_config.json").get("chat_template"):
        return True
    return read_file(os.path.join(folder, CHAT_TEMPLATE)) is not None


def folder_tokenizer(folder):
    """The tokenizer of a run directory or a folder in the Hugging Face format; None where it has none."""
    name = folder_tokenizer_name(folder)
    if not name or (name.endswith(TOKENIZER_FILES) and read_file(name) is None):
        return None
    try:
        return load_tokenizer(name)
    except UserError as e:  # the message names --tokenizer, which the user did not give
        raise e.renamed(tokenizer="") from None
