"""Long texts of Hugging Face's tokenizers: cut where that changes no token, or not at all."""

import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers
from tokenizers import pre_tokenizers as pre

import data.encoding
from data import tokenization
from tools import evaluate

SEQUENCE = normalizers.Sequence
# as published, or as it may be built
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
    r"""[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
QUOTED = r'"[^"]*"|\S+|\s+'


def split(pattern, behavior="isolated"):
    return pre.Split(Regex(pattern), behavior)


TOKENIZERS = {  # name: (normalizer, pre-tokenizer, whether a text may be cut)
    "gpt2": (None, pre.ByteLevel(add_prefix_space=False), True),
    "a space before": (None, pre.ByteLevel(add_prefix_space=True), True),
    "llama 2": (SEQUENCE([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None, False),
    "prepended": (normalizers.Prepend("x "), pre.Whitespace(), False),
    "metaspace": (None, pre.Metaspace(), True),
    "metaspace first": (None, pre.Metaspace(prepend_scheme="first"), True),
    "metaspace whole": (None, pre.Metaspace(prepend_scheme="first", split=False), False),
    "first of words": (
        None,
        pre.Sequence([pre.ByteLevel(False), pre.Metaspace(prepend_scheme="first")]),
        False,
    ),
    "stripped": (normalizers.Strip(), pre.ByteLevel(add_prefix_space=True), False),
    "t5": (
        SEQUENCE([normalizers.Strip(left=False), normalizers.Replace(Regex(" {2,}"), " ")]),
        pre.Metaspace(),
        False,
    ),
    "nfkc": (SEQUENCE([normalizers.NFKC(), normalizers.Lowercase()]), pre.WhitespaceSplit(), True),
    "nfc alone": (normalizers.NFC(), None, False),
    "bert": (normalizers.BertNormalizer(), pre.BertPreTokenizer(), True),
    "no spaces": (normalizers.Replace(" ", ""), pre.Metaspace(), False),
    "two words in one": (normalizers.Replace(Regex("n t"), "n_t"), pre.Whitespace(), False),
    "llama 3": (None, pre.Sequence([split(LLAMA3), pre.ByteLevel(False, use_regex=False)]), True),
    "deepseek": (
        None,
        pre.Sequence([split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK)]),
        True,
    ),
    "starcoder": (None, pre.Sequence([pre.Digits(True), pre.ByteLevel(False)]), True),
    "ours": (None, split(tokenization.PATTERN), True),
    "quoted": (None, split(QUOTED), False),
    "spaces join": (None, pre.Split(" ", "merged_with_previous"), False),
    "lines": (None, split(r"[^\n]+"), False),
    "spaces alone": (None, split(r"\s+", "removed"), False),
}


def made(kind, normalizer, pre_tokenizer, texts):
    """A tokenizers.Tokenizer of the model `kind` with 200 tokens learned of the texts, one of them added to match."""
    unknown = {} if kind == "Unigram" else {"unk_token": "<unk>"}
    tokenizer = Tokenizer(getattr(models, kind)(**unknown))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    settings = dict(special_tokens=["<unk>", "</s>"], show_progress=False, vocab_size=200)
    settings |= {"unk_token": "<unk>"} if kind == "Unigram" else {}
    tokenizer.train_from_iterator(texts, type(tokenizer.model.get_trainer())(**settings))
    tokenizer.add_tokens(["été"])
    return tokenizer


def texts():
    rng = random.Random(0)
    words = [
        "the",
        "of",
        "a",
        "in",
        "İs",
        "ﬁn",
        "don't",
        "I",
        "12",
        "3456",
        "été",
        "日本",
        '"',
        ".",
        "\n",
        "",
        "▁",
        "x\u00a0y",
        "e\u0301 n",
        "no pad",
        "\t",
        "</s>",
        "(a b)",
    ]
    found = [" ".join(rng.choices(words, k=400)) for _ in range(3)]
    found += [" lead", "trail ", "a b" * 50, "n t" * 40, "a b  c d   e " * 20]
    return [*found, '"b c d e f g h i j k l m n o" p q r ' * 5]


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordPiece"])
def test_pieces_change_no_token(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(data.encoding, "PIECE", 20)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    for name, (normalizer, pre_tokenizer, may_be_cut) in TOKENIZERS.items():
        tokenizer = made(kind, normalizer, pre_tokenizer, texts())
        tokenizer.enable_truncation(7)  # as files of encoders have it
        tokenizer.enable_padding(length=9)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        encoding = tokenization.load_tokenizer(str(tmp_path / "tokenizer.json"))
        assert encoding.may_be_cut == may_be_cut, name
        assert (
            len(encoding.encode_ordinary("été " * 30)) >= 30
            and len(encoding.encode_ordinary("a")) < 9
        )
        for text in texts():
            pieces = list(data.encoding.pieces(text, encoding))
            assert "".join(pieces) == text and len(pieces) == 1 or may_be_cut
            whole = encoding.encode_ordinary(text)
            assert [i for piece in pieces for i in encoding.encode_ordinary(piece)] == whole, (
                name,
                text,
            )
            assert evaluate.encode(text, encoding).tolist() == [encoding.eot_token, *whole]


def test_added_tokens_that_reach_over_a_cut():
    for added, may_be_cut in [
        ("new york", False),
        (AddedToken("york", rstrip=True), False),
        (AddedToken("york", lstrip=True, single_word=True), True),
    ]:
        tokenizer = made("BPE", None, pre.ByteLevel(False), ["of new york"])
        tokenizer.add_tokens([added])
        assert tokenization.may_be_cut(tokenizer) == may_be_cut
