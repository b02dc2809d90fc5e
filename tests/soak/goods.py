"""Sound files of every kind that a program reads, made once by the programs themselves."""

import contextlib
import hashlib
import json
import shutil
import sys

from conftest import SMALL_RUN, flags_of
from test_data_programs import make_texts, write_lines, write_rows
from test_resume import metrics_of

from tests.soak import programs
from tests.soak.programs import run

STEPS, SAVES = 12, 4
# of a manifest: what depends on where the source is
PLACES = ("source", "source_listing_sha256", "manifest_sha256")
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
        "data": goods / "shards",
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
        train_words(folder, folder / "many", keep_checkpoints=9),
    ):
        must(words, work)
    make_stopped(folder)
    (folder / "done").touch()


def must(words, work):
    ended = run(words, work)
    if ended.status:
        sys.exit(f"the soak's own files cannot be made: {words[0]}: {ended.err or ended.out}")


def make_stopped(folder):
    """stopped/in, a source of which `stop` tokenizes a part."""
    source = folder / "stopped" / "in"
    source.mkdir(parents=True)
    for i, ending in enumerate((".jsonl", ".jsonl.gz", ".jsonl")):
        write_lines(source / f"{i}{ending}", make_texts(600, lone=False))


def stop(folder, ranks):
    """Leave in `folder`, a copy of stopped, what an interrupted run does: the last file was torn while it ran."""
    last = folder / "in" / "2.jsonl"
    whole = last.read_bytes()
    last.write_bytes(whole[:-200])
    ended = run(stopped_words(folder / "in", folder / "out", ranks), folder.parent / "stop")
    assert ended.status == 2 and (folder / "out" / "progress.npz").exists(), ended
    last.write_bytes(whole)


def stopped_words(source, output, ranks, *more):
    """Tokenize stopped/in, whose documents are more than one batch."""
    return tokenize_words(source, output, ranks, "--shard_tokens", 40_000, *more)


# --- Places ---------------------------------------------------------------------------------------------------------


class Places:
    """`at / name`: the path of a good, those of `copied` in a copy that is this case's own."""

    def __init__(self, sound, own, copied):
        self.sound, self.own, self.copied = sound, own, copied
        for name in copied:
            there, here = place(sound, name), place(own, name)
            here.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if there.is_dir() else shutil.copy2
            copy(there, here)

    def __truediv__(self, name):
        return place(self.own if name in self.copied else self.sound, name)


def place(root, name):
    """A run's folder has the run's name."""
    return root / {"run": "runs/run", "part": "part/run"}.get(name, name)


# --- Results --------------------------------------------------------------------------------------------------------


def trained(run, last=None):
    """(fingerprints, rows of metrics.jsonl) of a run; last: the one checkpoint that counts."""
    found = fingerprints(run)
    return found.get(str(last)) if last else found, metrics_of(run)


def fingerprints(run):
    """{step: sums of the saved arrays} of a run's checkpoints."""
    found = {}
    for path in (run / "checkpoints").glob("*/meta/metadata"):
        with contextlib.suppress(ValueError):  # a damaged one
            found[path.parts[-3]] = json.loads(path.read_bytes())["fingerprint"]
    return found


def hashes(path):
    files = [path] if path.is_file() else path.rglob("*")
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files if p.is_file()}


def shards(folder, contents=True):
    """{path: content} of a folder of shards, without where their source is; contents: of the shards too."""
    found = {}
    for path in folder.rglob("*.npy"):
        found[f"{path.parent.name}/{path.name}"] = hashes(path) if contents else path.is_file()
    for path in folder.rglob("manifest.json"):
        manifest = json.loads(path.read_text())
        found[path.parent.name] = {k: v for k, v in manifest.items() if k not in PLACES}
    return found
