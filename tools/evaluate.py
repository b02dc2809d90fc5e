"""Loss, perplexity and bits per byte of a model on shards or text, and its accuracy on multiple-choice questions.

python tools/evaluate.py runs/tiny --data data/shards/stdlib README.md

The loss is the mean over tokens, in nats. Its standard error takes tokens as drawn in clusters, which are the sequences
of shards and the documents of text. No token is dropped, whatever the capacity factor in training was.
"""

if __name__ == "__main__":
    import program

    program.begin()

import glob
import hashlib
import json
import math
import os
import sys
from argparse import Namespace
from pathlib import Path

import utils
from data import tokenization
from tools import common
from utils import UserError

if __name__ == "__main__":
    options_given = common.begin(common.Evaluate, "evaluate.py")

import numpy as np
from tqdm import tqdm

from data import sources
from data.encoding import encode_text, pieces
from data.sources.base import Document
from data.sources.text import read_text
from dataset import Corpus
from tools.scores import Piece, make_scorer, mean

# --- Shards and text --------------------------------------------------------------------------------------------


def open_shards(cfg, path):
    """The Corpus that --data names, or None where it names no shards. Raises UserError as Corpus does."""

    class OneShard(Corpus):
        def _open(self, cache):
            return [shard for shard in super()._open(cache) if os.path.samefile(shard.path, path)]

    one = path.endswith(".npy") and os.path.isfile(path)
    for folder in [os.path.dirname(path)] if one else [path, os.path.join(path, "val")]:
        if glob.glob(os.path.join(glob.escape(folder), "*.npy")):
            bucket, name = os.path.split(os.path.abspath(folder))
            return (OneShard if one else Corpus)(cfg, bucket, name)
    return None


def check_tokenizer(corpus, encoding):
    """Raises UserError where the manifest tells that the shards were made with another tokeniser than the model's."""
    made_with, ranks = (
        corpus.manifest.get("tokenizer_sha256"),
        getattr(encoding, "_mergeable_ranks", None),
    )
    if (
        made_with
        and ranks
        and hashlib.sha256(tokenization.dump_ranks(ranks)).hexdigest() != made_with
    ):
        raise UserError(
            f"--data {corpus.folder}: these shards were made with another tokeniser than the model's; "
            f"tokenise their text with the model's."
        )


def texts(path, column):
    """The documents of a text file, or of a folder or a glob of files or records. Raises UserError."""
    if os.path.isfile(path) and not sources.kind_of(path):
        yield read_text(Document(path, path, os.path.getsize(path)))[0]
    elif os.path.exists(path) or glob.glob(path, recursive=True):
        source = Namespace(source=path, config=None, split="train", text_column=column)
        for _, document in sources.open_source(source, 0).read({}):
            yield read_text(document)[0]
    else:
        raise UserError(f"--data {path}: there is no such file or folder.")


def encode(text, encoding):
    """Token ids of a document, end-of-text's first, as data/tokenize_shards.py encodes it: of any length."""
    return np.concatenate(
        [[encoding.eot_token], *(encode_text(piece, encoding) for piece in pieces(text, encoding))]
    )


def windows(ids, T, stride):
    """(ids [<= T + 1], number of targets that are context) of windows that count every target of ids once."""
    for start in range(0, max(1, len(ids) - 1 - (T - stride)), stride):
        yield ids[start : start + T + 1], T - stride if start else 0


def evaluate(options, path, cfg, encoding, score):
    """{"data", "sequences", "clusters", "tokens", "loss", ...: numbers} of one --data; each of loss, perplexity and
    bits_per_byte has its standard error beside it, None where there is one cluster alone."""
    T = options.T or cfg.model.T
    stride, sizes = options.stride or T, []  # sizes: bytes of each document
    if stride > T:
        raise UserError(
            f"--stride {stride}: must be at most --T, which is {T}, or text would be left out."
        )

    def of_text():
        left = options.limit or math.inf
        for text in filter(None, texts(path, options.text_column)):
            if not left:
                return
            ids = encode(text, encoding)
            if (last := int(min(len(ids) - 1, T + (left - 1) * stride))) < len(ids) - 1:
                ids = ids[: last + 1]
                text = tokenization.text_of(encoding, ids[1:].tolist())
            sizes.append(len(text.encode()))
            for window, first in windows(ids, T, stride):
                yield Piece(window, first, len(sizes) - 1)
                left -= 1

    if corpus := open_shards(utils.replace(cfg, T=T), path):
        check_tokenizer(corpus, encoding)
        total = min(corpus.n_sequences, options.limit or corpus.n_sequences)
        sequences = (
            Piece(corpus.sequences([i], seed=0)[0], 0, i) for i in range(total)
        )  # as in main.py's validation
    elif encoding is None:
        raise UserError(
            f"--data {path}: to read text the model needs a tokeniser, and {options.model} holds none."
        )
    else:
        sequences, total = of_text(), None
    scored = list(
        tqdm(score(sequences, T), path, total, leave=False, disable=not sys.stderr.isatty())
    )
    if not scored:
        raise UserError(f"--data {path}: there is no text in it.")
    unit, sums, tokens = map(np.array, zip(*scored))
    sums, tokens = np.bincount(unit, sums), np.bincount(unit, tokens)
    loss, error = mean(sums, tokens)
    out = dict(
        data=path, sequences=len(unit), clusters=len(sums), tokens=int(tokens.sum()), loss=loss
    )
    perplexity = float(np.exp(loss))
    out |= dict(
        loss_error=error, perplexity=perplexity, perplexity_error=error and error * perplexity
    )
    size = (
        np.array(sizes)
        if not corpus
        else tokens * corpus.bytes_per_token
        if corpus.bytes_per_token
        else None
    )
    bits = (None, None) if size is None else mean(sums / math.log(2), size)
    return out | dict(bits_per_byte=bits[0], bits_per_byte_error=bits[1])


# --- Multiple choice --------------------------------------------------------------------------------------------


def questions(path):
    """Yield (context, endings, number of the right one) of a file in HellaSwag's format. Raises UserError naming file
    and line."""
    if not os.path.isfile(path):
        raise UserError(f"--hellaswag {path}: there is no such file.")
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        where = f"--hellaswag {path}: line {number}"
        try:
            row = json.loads(line)
            context = row["ctx"] if "ctx" in row else f"{row['ctx_a']} {row['ctx_b']}".strip()
            endings, label = row["endings"], int(row["label"])
        except (ValueError, TypeError, KeyError) as e:
            raise UserError(
                f'{where} is not {{"ctx": text, "endings": [texts], "label": number}} ({e!r}).'
            ) from None
        if not isinstance(endings, list) or not all(
            isinstance(t, str) and t for t in [context, *endings]
        ):
            raise UserError(
                f"{where}: its context and its endings must be texts, none of them empty."
            )
        if not 0 <= label < len(endings):
            raise UserError(
                f"{where}: its label is {label}, but its {len(endings)} endings count from 0."
            )
        yield (
            tokenization.whole_characters(context),
            [*map(tokenization.whole_characters, endings)],
            label,
        )


def choose(options, path, cfg, encoding, score):
    """{"hellaswag", "questions", "acc", "acc_error", "acc_norm", "acc_norm_error"}: the share of questions of which the
    right ending is the likeliest, by the sum of its log p and by that sum per byte of the ending. An ending follows
    its context and a space; a context too long for the model keeps its end."""
    answers, items, T = [], [], options.T or cfg.model.T
    for context, endings, label in questions(path):
        if len(items) == options.limit > 0:
            break
        before = [encoding.eot_token, *encoding.encode_ordinary(context)]
        for ending in endings:
            after = encoding.encode_ordinary(" " + ending)[:T]
            ids = np.array([*before[-(T + 1 - len(after)) :], *after])
            answers.append(Piece(ids, len(ids) - 1 - len(after), len(answers)))
        items.append((label, [len(ending.encode()) for ending in endings]))
    if not items:
        raise UserError(f"--hellaswag {path}: there are no questions in it.")
    longest = min(
        T, math.ceil(max(len(answer.ids) - 1 for answer in answers) / 64) * 64
    )  # few lengths to compile
    progress = tqdm(
        score(answers, longest), path, len(answers), leave=False, disable=not sys.stderr.isatty()
    )
    losses, right = iter([loss for _, loss, _ in progress]), []
    for label, sizes in items:
        mine = np.array([next(losses) for _ in sizes])
        right.append([mine.argmin() == label, (mine / sizes).argmin() == label])
    (acc, error), (norm, norm_error) = (
        mean(np.float64(x), np.ones(len(items))) for x in zip(*right)
    )
    out = dict(hellaswag=path, questions=len(items), acc=acc, acc_error=error)
    return out | dict(acc_norm=norm, acc_norm_error=norm_error)


# --- The program ------------------------------------------------------------------------------------------------


def table(rows):
    """Lines of a table of the dicts `rows`, which have the same keys: numbers with their standard errors."""
    shown = {str: "{}", int: "{:,}", float: "{:,.4f}", type(None): "-"}
    cells = [[key for key in rows[0] if not key.endswith("_error")]]
    for row in rows:
        text = {key: shown[type(value)].format(value) for key, value in row.items()}
        errors = {
            key: f" ± {text[key + '_error']}"
            for key in cells[0]
            if row.get(f"{key}_error") is not None
        }
        cells.append([text[key] + errors.get(key, "") for key in cells[0]])
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in cells]


def main(options):
    """Print and return the results, {"data": [dicts of `evaluate`], "hellaswag": [dicts of `choose`]}."""
    if not options.data and not options.hellaswag:
        raise UserError("--data, --hellaswag: give at least one of them.")
    cfg, mesh, params, encoding = common.open_model(options, text=bool(options.hellaswag))
    score = make_scorer(cfg, mesh, params, options.batch_size)
    try:
        results = {
            name: [measure(options, path, cfg, encoding, score) for path in getattr(options, name)]
            for name, measure in (("data", evaluate), ("hellaswag", choose))
        }
    except (
        UserError
    ) as e:  # the modules that read shards and text know them by the flags of other programs
        raise UserError(
            str(e).replace("--bucket_name", "--data").replace("--source", "--data")
        ) from None
    if options.json:
        print(utils.to_json(results))
    else:
        print("\n".join(line for rows in results.values() if rows for line in table(rows)))
    return results


if __name__ == "__main__":
    common.run(lambda: main(options_given))
