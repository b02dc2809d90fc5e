"""Jobs of the programs: their command lines, the sound files that they read, and what they make."""

import contextlib
import hashlib
import json
import re
import shutil
import sys

from conftest import SMALL_RUN, flags_of
from test_data_programs import make_texts, write_lines, write_rows
from test_resume import metrics_of

from tests.soak.programs import fresh_folder, run

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
RECORDS = dict(jsonl="r.jsonl", gz="r.jsonl.gz", zst="r.jsonl.zst", parquet="r.parquet")
# what a job changes, of the sound files; all others write a new path
CHANGED = dict(resume="part", again="shards", finish="progress", prune="many")

# --- Command lines ------------------------------------------------------------------------------------------------


def train_words(at, output, steps=STEPS, **flags):
    """main.py with the run `run` in `output`, on the sound shards."""
    flags = {
        **MODEL,
        "name": "run",
        "output_dir": output,
        "data": at / "shards",
        "compilation_cache": at / "cache",
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
    words += ["--tokenizer", ranks, "--shard_tokens", 4000, "--text_column", "body"]
    return [*words, "--workers", 1, *more]


def ranks_words(source, output):
    words = ["data/train_tokenizer.py", "--source", source, "--output", output]
    return [*words, "--vocab_size", 300, "--text_column", "body"]


def words_of(job, at, out):
    """Command line of a job. at / name: where that sound file lies; out: a new path for what it makes."""
    name, _, kind = job.partition("_")
    cache = ("--compilation_cache", at / "cache")
    ranks = at / "ranks.tiktoken"
    model = at / "sound" / "run"
    data, source = at / "shards", at / "text"
    if kind in RECORDS:
        data = source = at / "records" / RECORDS[kind]
    if kind == "hf":
        ranks = at / "hf" / "tokenizer.json"
        model = at / "hf"
    if kind == "many":
        source = at / "source"
    score = ["tools/evaluate.py", model, *cache, "--text_column", "body", "--limit", 40]
    large = ("--shard_tokens", 40_000)
    lines = dict(
        evaluate=[*score, "--json", "--data", data],
        sample=["tools/sample.py", model, *cache, "--prompt", "the", "--max_tokens", 4],
        verify=["tools/checkpoints.py", "verify", model],
        list=["tools/checkpoints.py", "list", model],
        prune=["tools/checkpoints.py", "prune", at / "many" / "run", "--keep", 1],
        export=["tools/hf.py", "export", model, out / "hf"],
        compare=["tools/compare.py", model, "--output", out / "compare.png"],
        trace=["tools/trace.py", model],
        tokenize=tokenize_words(source, out, ranks, *(large if kind == "many" else ())),
        workers=tokenize_words(source, out, ranks, *large, "--workers", 2),
        again=tokenize_words(at / "text", at / "shards", ranks),
        finish=tokenize_words(at / "source", at / "progress", ranks, *large),
        ranks=ranks_words(source, out / "ranks.tiktoken"),
        resume=train_words(at, at / "part"),
        train=train_words(at, out),
        init=train_words(at, out, steps=2, init_from=at / "hf"),
    )
    lines["import"] = ["tools/hf.py", "import", at / "hf", out / "run"]
    return lines[name]


# --- Results ------------------------------------------------------------------------------------------------------


def result_of(job, at, out, said=""):
    """What a job made and said, without times and places: equal where its input was."""
    name, _, _ = job.partition("_")
    if name in ("train", "resume", "init"):
        run = (at / "part" if name == "resume" else out) / "run"
        return fingerprints(run).get("2" if name == "init" else str(STEPS)), metrics_of(run)
    if name == "again":  # which does not read shards; who trains on them does
        return shards(at / "shards", contents=False)
    if name in ("finish", "tokenize", "workers"):
        return shards(at / "progress" if name == "finish" else out)
    if name in ("export", "ranks"):
        return {path.name: sha256(path) for path in out.rglob("*") if path.is_file()}
    if name in ("import", "prune"):
        return fingerprints((at / "many" if name == "prune" else out) / "run")
    if name == "evaluate":
        rows = json.loads(said)["data"]
        return [{k: v for k, v in row.items() if k != "data"} for row in rows]
    said = said.replace(str(at / "sound" / "run"), "RUN")
    return re.sub(r"\S*compare\S*|\S+\.png", "PICTURE", said)


def fingerprints(run):
    """{step: sums of the saved arrays} of a run's checkpoints."""
    found = {}
    for path in (run / "checkpoints").glob("*/meta/metadata"):
        with contextlib.suppress(ValueError):  # a damaged one
            found[path.parts[-3]] = json.loads(path.read_bytes())["fingerprint"]
    return found


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def shards(folder, contents=True):
    """{path: content} of a folder of shards, without where their source is; contents: of the shards too."""
    found = {}
    for path in folder.rglob("*.npy"):
        found[f"{path.parent.name}/{path.name}"] = sha256(path) if contents else path.is_file()
    for path in folder.rglob("manifest.json"):
        manifest = json.loads(path.read_text())
        for place in ("source", "source_listing_sha256", "manifest_sha256"):
            manifest.pop(place, None)
        found[path.parent.name] = manifest
    return found


# --- Sound files --------------------------------------------------------------------------------------------------


def make(folder):
    """Make files of every kind that a program reads, by the programs themselves, unless they are there."""
    if (folder / "done").exists():
        return
    fresh_folder(folder)
    texts = make_texts(120, lone=False)
    for name in ("text", "records", "source"):
        (folder / name).mkdir()
    for i, text in enumerate(texts):
        (folder / "text" / f"{i:03d}.txt").write_text(text or "")
    for ending in (".jsonl", ".jsonl.gz", ".jsonl.zst"):
        write_lines(folder / "records" / f"r{ending}", texts)
    write_rows(folder / "records" / "r.parquet", texts)
    for name in ("0.jsonl", "1.jsonl.gz", "2.jsonl"):  # more documents than one batch
        write_lines(folder / "source" / name, make_texts(600, lone=False))
    for words in (
        ranks_words(folder / "text", folder / "ranks.tiktoken"),
        tokenize_words(folder / "text", folder / "shards", folder / "ranks.tiktoken"),
        train_words(folder, folder / "sound", profile="10:11", keep_checkpoints=2),
        ["tools/hf.py", "export", folder / "sound" / "run", folder / "hf"],
        train_words(folder, folder / "part", steps=2 * SAVES),
        train_words(folder, folder / "many", keep_checkpoints=9),
    ):
        ended = run(words, folder / "work")
        if ended.status:
            sys.exit(f"the soak's own files cannot be made: {words[0]}: {ended.err or ended.out}")
    # what an interrupted program leaves: its last file was torn while it ran
    torn = folder / "source" / "2.jsonl"
    whole = torn.read_bytes()
    torn.write_bytes(whole[:-200])
    ended = run(words_of("finish", folder, folder), folder / "work")
    assert ended.status == 2 and (folder / "progress" / "progress.npz").exists(), ended
    torn.write_bytes(whole)
    (folder / "done").touch()


class Places:
    """`at / name`: the path of a sound file, those of `copied` in a copy that is this case's own."""

    def __init__(self, sound, own, copied):
        self.sound, self.own, self.copied = sound, own, copied
        own.mkdir(parents=True)
        for name in copied:
            copy = shutil.copytree if (sound / name).is_dir() else shutil.copy2
            copy(sound / name, own / name)

    def __truediv__(self, name):
        return (self.own if name in self.copied else self.sound) / name


def places(sound, folder, job="", more=()):
    """(`Places` of a job, a new folder for what it makes) in the empty folder of a case."""
    fresh_folder(folder)
    copied = {"cache", *more}
    if job in CHANGED:
        copied.add(CHANGED[job])
    out = folder / "out"
    out.mkdir()
    return Places(sound, folder / "own", copied), out
