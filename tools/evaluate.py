"""Measure a model: loss, perplexity and bits per byte on shards or text, and scores in the tasks of lm_eval.

python tools/evaluate.py runs/tiny --data data/shards/stdlib README.md
python tools/evaluate.py runs/tiny --tasks hellaswag,arc_easy

For standard errors, the tokens of one sequence of shards, or of one document of text, are a cluster: clusters are taken
as independent, the tokens in them are not.
"""

if not __package__:
    import startup

    startup.prepare()

import functools
import math
import os
import sys
from collections import Counter
from importlib.metadata import version

import utils
from runtime import interrupts
from runtime.files import check_writable, is_remote, to_json, write_file
from runtime.messages import UserError, masked, warn
from runtime.pulse import Pulse
from shards import tokenization
from tools import common

if __name__ == "__main__":
    options_given = common.read_options(common.Evaluate, "tools/evaluate.py")

import numpy as np
from tqdm import tqdm

from data.command_line import Source
from data.encoding import count_lost, encode_text
from data.sources.formats import find, open_source
from data.sources.text import read_text
from inference import weights
from inference.scores import Piece, make_scorer, weighted_mean
from shards import manifest
from shards.corpus import Corpus
from shards.storage import list_split


def open_shards(options, cfg, path):
    """The `Corpus` of shards that --data names; None where it names no shards. Raises UserError, also where the shards
    were made with another tokenizer than the model's."""
    folders = [path, f"{path}/val"]
    if not is_remote(path):
        folders = map(os.path.abspath, folders)
    folder = next(filter(list_split, folders), None)
    if not folder:
        return None
    root, name = os.path.split(folder.rstrip("/"))
    shards = [(root, folder, manifest.read(folder))]
    weights.check_tokenizer(f"--data {path}", options.model, shards)
    corpus = Corpus(cfg, root, name)
    if corpus.unverified:
        warn(corpus.unverified)
    return corpus


def texts(path, column):
    """Yield the texts of the documents in a file, a folder or a glob. Raises UserError."""
    if not is_remote(path) and not os.path.exists(path) and not find(path)[-1]:
        raise UserError("there is no such file or folder", flag="data", value=path)
    for document in open_source(Source(source=path, text_column=column)).read({}):
        yield read_text(document)[0]


def text_pieces(documents, encoding, m, T, stride, limit, sizes):
    """Yield windows of documents as `Piece`s, at most `limit` of them. Each token is a target in only one window.

    Appends the bytes of each document, as far as they are scored, to `sizes`. m: a utils.Model. Raises UserError for a
    token that the model's vocabulary lacks.
    """
    left = limit
    for text in filter(None, documents):
        if not left:
            return
        ids = np.concatenate([[encoding.eot_token], encode_text(text, encoding)])
        tokenization.check_ids(encoding, ids, m.vocab_size, "--data: a document")
        last = T + (left - 1) * stride  # index of the last target that `limit` allows
        if last < len(ids) - 1:
            ids = ids[: last + 1]
            text = tokenization.text_of(encoding, ids[1:].tolist())
        sizes.append(len(text.encode()))
        for start in range(0, max(1, len(ids) - 1 - (T - stride)), stride):
            yield Piece(ids[start : start + T + 1], T - stride if start else 0, len(sizes) - 1)
            left -= 1


def count_losses(documents, encoding, counts):
    """Yield the documents, and add the `count_lost` of each to `counts`."""
    for text in documents:
        counts.update(count_lost(text, encoding))
        yield text


def evaluate(options, path, cfg, encoding, score):
    """Measure on one --data: a dict of "data", "sequences", "loss" and so on. "loss_error" is a standard error, or None
    for a single cluster. Raises UserError."""
    T = options.T or cfg.model.T
    stride = options.stride or T
    if stride > T:
        raise UserError(f"must be at most --T, which is {T}", flag="stride", value=stride)
    limit = options.limit or sys.maxsize
    sizes = []  # bytes of each document
    counts = Counter()  # of characters that the tokenizer loses
    total = None
    corpus = open_shards(options, utils.replace(cfg, T=T), path)
    if corpus:  # seed 0: the order of main.py's validation
        counts = corpus.manifest
        total = min(corpus.n_sequences, limit)
        sequences = (Piece(corpus.sequences([i], seed=0)[0], 0, i) for i in range(total))
    elif encoding:
        documents = count_losses(texts(path, options.text_column), encoding, counts)
        sequences = text_pieces(documents, encoding, cfg.model, T, stride, limit, sizes)
    else:
        raise UserError(
            f"text needs a tokenizer, and {options.model} has none", flag="data", value=path
        )
    hidden = not sys.stderr.isatty()
    shown = masked(path)
    scored = list(tqdm(score(sequences, T), shown, total, leave=False, disable=hidden))
    if not scored:
        raise UserError("there is no text in it", flag="data", value=path)
    unit, sums, tokens, _ = map(np.array, zip(*scored))
    sums = np.bincount(unit, sums)  # of each cluster
    tokens = np.bincount(unit, tokens)
    loss, error = weighted_mean(sums, tokens)
    perplexity = math.exp(loss)
    n_bytes = tokens * (corpus.bytes_per_token or 0) if corpus else np.array(sizes)
    bits, bits_error = bits_per_byte(path, counts, sums, n_bytes)
    return dict(
        data=shown,
        sequences=len(unit),
        clusters=len(sums),
        tokens=int(tokens.sum()),
        loss=loss,
        loss_error=error,
        perplexity=perplexity,
        perplexity_error=error and error * perplexity,
        bits_per_byte=bits,
        bits_per_byte_error=bits_error,
    )


def bits_per_byte(path, counts, sums, n_bytes):
    """(bits per byte, standard error), each None where they have no meaning.

    counts: of characters that the tokenizer loses. sums: nats of each cluster. n_bytes: of its text; 0: unknown.
    """
    if manifest.is_lossy(counts):
        share = counts["lost_characters"] / counts["sampled_characters"]
        warn(
            f"--data {path}: the tokenizer loses {share:.1%} of its text, so it has no bits per byte"
        )
        return None, None
    if not n_bytes.any():
        return None, None
    return weighted_mean(sums / math.log(2), n_bytes)


def table(results):
    """A Markdown table of results of `evaluate`."""
    rows = []
    for result in results:
        row = {key: f"{result[key]:,}" for key in ("sequences", "clusters", "tokens")}
        for key in ("loss", "perplexity", "bits_per_byte"):
            row[key] = "-"
            if result[key] is not None:
                row[key] = common.cell(result[key], result[f"{key}_error"], ",.4f")
        rows.append({"data": result["data"]} | row)
    return common.markdown(rows)


def main(options):
    """Print and return the results: {"data": [result of `evaluate`], "tasks": lm_eval's results, with --tasks}."""
    if not options.data and not options.tasks:
        raise UserError("--data, --tasks: give at least one of them.")
    check_writable(options.output, "output")
    with Pulse("opening the model", lines=False):
        cfg, mesh, params, encoding = common.open_model(options, bool(options.tasks))
    score = functools.partial(make_scorer(cfg, mesh, options.batch_size), params)
    try:
        with common.memory_explained("give less --batch_size or --T"):
            data = [evaluate(options, path, cfg, encoding, score) for path in options.data]
    except UserError as e:
        # the modules that read text word their errors for the programs that make shards, which have --source
        if e.flag == "source":
            e.remedy = ""
        raise e.renamed(source="--data") from None
    results = dict(data=data)
    tables = [table(data)] if data else []
    if options.tasks:
        from inference import tasks  # here, since it imports lm_eval, which takes seconds

        T = options.T or cfg.model.T
        ends = weights.end_tokens(options.model)
        lm = tasks.TaskModel(cfg, mesh, encoding, options.batch_size, T, options.start, ends)
        loaded = tasks.load_tasks(options.tasks, options.include_path, lm, options.num_fewshot)
        found = tasks.evaluate_tasks(lm, params, loaded, options.limit, bootstrap=1000)
        found["config"] = dict(model=options.model, T=T, limit=options.limit, start=options.start)
        found["packages"] = {name: version(name) for name in ("lm_eval", "datasets", "jax")}
        tables += [tasks.make_table(found, kind) for kind in ("results", "groups") if kind in found]
        results["tasks"] = found
    as_json = to_json(results, default=str)
    if options.output:
        write_file(options.output, as_json + "\n")
    print(as_json if options.json else "\n".join(tables))
    return results


if __name__ == "__main__":
    interrupts.run(lambda: main(options_given))
