"""Jobs of the programs: their command lines, the sound files that they read, and what they make.

A job is named VERB or VERB_INPUT, where the input is the name of a sound file or folder. It changes a copy of a sound
folder, or makes a new one.
"""

import contextlib
import gzip
import json
import random
import shutil
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from helpers import flags_of, metrics_of
from small_models import SMALL_RUN, given

from tests.soak.programs import run

WORDS = "hello world def return import self for in while yield é漢 \n 12 x(y) &&".split(" ")
STEPS = 12
# the smallest mixture of experts that trains
MODEL = SMALL_RUN | given("""
    --blocks 1 --n_experts 4 --n_head 2 --T 16 --vocab_size 280 --microbatches 2 --train_batch_size 4
    --val_batch_size 4 --max_tokens 4 --inference_batch 1 --no_embedding_norm --embedding_conv 0 --no_backout
    --latent_conv 0 --no_exclusive_attention
    --n_device_axis 1 1 1 --n_devices 1 --eval_every 3 --eval_steps 1 --save_steps 4 --name run
""")  # with no layers that transformers does not know
SOUND = "text source records.jsonl.gz records.parquet ranks.tiktoken shards sound hf part progress cache"
# the sound folder that a verb changes; all others make a new one
CHANGED = dict(resume="part", again="shards", finish="progress")


def train_words(at, output, steps=STEPS, **flags):
    """main.py with the run `run` in `output`, on the sound shards."""
    places = dict(output_dir=output, data=at["shards"], compilation_cache=at["cache"])
    run = MODEL | places | dict(training_steps=steps) | flags
    return ["main.py", "--preset", "tiny", *flags_of(**run)]


def words_of(job, at, place):
    """Command line of a job. at: {name: path} of the sound files; place: the folder that it makes or changes."""
    verb, _, source = job.partition("_")
    model = at["hf"] if source == "hf" else at["sound"] / "run"
    ranks = at["hf"] / "tokenizer.json" if source == "hf" else at["ranks.tiktoken"]
    named = None if source in ("", "hf") else at[source]
    texts = ["--source", named or at["text"], "--text_column", "body"]
    cache = ["--compilation_cache", at["cache"]]
    tokenize = ["data/tokenize_shards.py", *texts, "--output", place, "--tokenizer", ranks]
    tokenize += ["--shard_tokens", 10_000, "--workers", 2 if verb == "workers" else 1]
    learn = ["data/train_tokenizer.py", *texts, "--vocab_size", 280]
    score = ["tools/evaluate.py", model, *cache, "--limit", 40, "--text_column", "body", "--json"]
    lines = {
        "train": train_words(at, place),
        "resume": train_words(at, place),
        "ranks": [*learn, "--output", place / "ranks.tiktoken"],
        "evaluate": [*score, "--data", named or at["shards"]],
        "sample": ["tools/sample.py", model, *cache, "--prompt", "the", "--max_tokens", 4],
        "verify": ["tools/checkpoints.py", model],
        "export": ["tools/hf.py", "export", model, place / "hf"],
        "import": ["tools/hf.py", "import", at["hf"], place / "run"],
    }
    return lines.get(verb, tokenize)


def result_of(job, place, said="", steps=STEPS):
    """What a job made and said, without times and places: equal where its input was."""
    verb = job.partition("_")[0]
    if verb in ("train", "resume"):
        return fingerprint(place / "run", steps), metrics_of(place / "run")
    if verb == "import":
        return fingerprint(place / "run", 0)
    if verb in ("export", "ranks"):
        return {path.name: checksum(path) for path in place.rglob("*") if path.is_file()}
    if verb == "evaluate":
        return [row | {"data": ""} for row in json.loads(said)["data"]]
    if verb in ("sample", "verify"):
        return [line for line in said.splitlines() if "/sound/" not in line]
    return shards(place)


def checksum(path):
    return zlib.crc32(path.read_bytes())


def fingerprint(run, step):
    """Sums of the arrays of a run's checkpoint, None where it is damaged."""
    with contextlib.suppress(ValueError, OSError):
        return json.loads((run / f"checkpoints/{step}/meta/metadata").read_bytes())["fingerprint"]


def shards(folder):
    """{path: content} of a folder of shards, without where their source is."""
    found = {f"{p.parent.name}/{p.name}": checksum(p) for p in folder.rglob("*.npy")}
    places = dict(source="", source_listing_sha256="", manifest_sha256="")
    for path in folder.rglob("manifest.json"):
        found[path.parent.name] = json.loads(path.read_text()) | places
    return found


def make_texts(folder):
    """Text files; as many records twice; a source of more documents than one batch."""
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=200)) for _ in range(1800)]
    rows = [json.dumps({"body": text}) + "\n" for text in texts]
    for name in ("text", "source"):
        (folder / name).mkdir(parents=True)
    for i, text in enumerate(texts[:100]):
        (folder / "text" / f"{i:03d}.txt").write_text(text)
    (folder / "records.jsonl.gz").write_bytes(gzip.compress("".join(rows[:100]).encode()))
    table = pa.table({"body": texts[:100]})
    pq.write_table(table, folder / "records.parquet", row_group_size=7)
    for i in range(3):
        (folder / "source" / f"{i}.jsonl").write_text("".join(rows[600 * i :][:600]))


def make(folder):
    """Make files of every kind that a program reads, by the programs themselves."""
    make_texts(folder)
    at = {name: folder / name for name in SOUND.split()}
    for words in (
        words_of("ranks", at, folder),
        words_of("tokenize", at, at["shards"]),
        train_words(at, at["sound"], keep_checkpoints=2),
        words_of("export", at, folder),
        train_words(at, at["part"], steps=8),
    ):
        ended = run(words, folder / "work")
        assert ended.status == 0, ended
    # what an interrupted program leaves: its last file was torn while it ran
    torn = folder / "source" / "2.jsonl"
    whole = torn.read_bytes()
    torn.write_bytes(whole[:-200])
    ended = run(words_of("finish_source", at, at["progress"]), folder / "work")
    assert ended.status == 2 and (at["progress"] / "progress.npz").exists(), ended
    torn.write_bytes(whole)


def places(sound, folder, job, damaged=""):
    """({name: path} of the sound files, the folder that the job makes or changes). What the job or the case changes is
    a copy in `folder`."""
    folder.mkdir(parents=True)
    changed, out = CHANGED.get(job.partition("_")[0]), folder / "out"
    at = {name: sound / name for name in SOUND.split()}
    for name in {"cache", damaged, changed} & at.keys():
        copy = shutil.copytree if at[name].is_dir() else shutil.copy2
        at[name] = Path(copy(at[name], folder / name))
    out.mkdir()
    return at, at[changed] if changed else out
