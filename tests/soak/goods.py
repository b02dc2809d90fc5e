"""Sound files of every kind that a program reads, made once by the programs themselves."""

import random
import sys

from tests.soak import programs
from tests.soak.programs import run

from conftest import SMALL_RUN, flags_of
from test_data_scale import make_texts, write_lines, write_rows

STEPS, SAVES = 12, 4
# the smallest mixture of experts that trains
MODEL = {
    **SMALL_RUN,
    "blocks": 1,
    "n_experts": 4,
    "n_head": 2,
    "T": 16,
    "vocab_size": 300,
    "microbatches": 2,
    "train_batch_size": 4,
    "val_batch_size": 4,
    "eval_steps": 1,
    "max_tokens": 4,
    "inference_batch": 1,
    "embedding_norm": False,  # as transformers knows such models
    "latent_conv": 0,
}


def train_words(goods, output, steps=STEPS, **flags):
    """main.py with the run `run` in `output`, on the sound shards."""
    flags = {
        **MODEL,
        "name": "run",
        "output_dir": output,
        "bucket_name": goods / "shards",
        "compilation_cache": goods / "cache",
        "n_device_axis": (1, 1, 1),
        "n_devices": 1,
        "training_steps": steps,
        "eval_every": 3,
        "save_steps": SAVES,
        **flags,
    }
    return ["main.py", "--preset", "tiny", *flags_of(**flags)]


def tokenize_words(source, output, ranks, *more):
    words = ["data/tokenize_shards.py", "--source", source, "--output", output]
    words += ["--tokenizer", ranks, "--shard_tokens", 4000, "--text_column", "body", "--workers", 1]
    return [*words, *more]


def ranks_words(source, output):
    words = ["data/train_tokenizer.py", "--source", source, "--output", output]
    return [*words, "--vocab_size", 300, "--text_column", "body"]


def make(folder):
    """Make them in a folder, unless they are there."""
    if (folder / "done").exists():
        return
    programs.fresh_folder(folder)
    texts = make_texts(120, lone=False)
    (folder / "text").mkdir()
    for i, text in enumerate(texts):
        (folder / "text" / f"{i:03d}.txt").write_text(text or "")
    (folder / "records").mkdir()
    for ending in (".jsonl", ".jsonl.gz", ".jsonl.zst"):
        write_lines(folder / "records" / f"r{ending}", texts)
    write_rows(folder / "records" / "r.parquet", texts)
    work = folder / "work"
    out = folder / "runs"
    for words in (
        ranks_words(folder / "text", folder / "ranks.tiktoken"),
        tokenize_words(folder / "text", folder / "shards", folder / "ranks.tiktoken"),
        train_words(folder, out, profile="10:11", keep_checkpoints=2),
        ["tools/hf.py", "export", out / "run", folder / "hf"],
        train_words(folder, folder / "part", steps=2 * SAVES),
    ):
        must(words, work)
    (folder / "done").touch()


def must(words, work):
    ended = run(words, work)
    if ended.status:
        sys.exit(f"the soak's own files cannot be made: {words[0]}: {ended.err or ended.out}")


def make_stopped(folder):
    """stopped/out: what `tokenize_shards.py` left of stopped/in, whose last file was torn then."""
    here = folder / "stopped"
    if (here / "done").exists():
        return
    programs.fresh_folder(here)
    (here / "in").mkdir()
    for i, ending in enumerate((".jsonl", ".jsonl.gz", ".jsonl")):
        write_lines(here / "in" / f"{i}{ending}", make_texts(600, lone=False))
    last = here / "in" / "2.jsonl"
    whole = last.read_bytes()
    last.write_bytes(whole[:-200])
    ended = run(stopped_words(here, folder / "ranks.tiktoken"), folder / "work")
    assert ended.status == 2 and (here / "out" / "progress.npz").exists(), ended
    last.write_bytes(whole)
    (here / "done").touch()


def stopped_words(folder, ranks):
    """Tokenize stopped/in, whose documents are more than one batch."""
    return tokenize_words(folder / "in", folder / "out", ranks, "--shard_tokens", 40_000)
