"""Damaged files: a program that reads one says so in a sentence, or its result is that of the sound file."""

import json
import re
import shutil
from typing import NamedTuple

from tests.soak import goods
from tests.soak.programs import complaint, fresh_folder, leftovers, run
from tests.soak.wounds import wound

# --- What is read, and by which programs --------------------------------------------------------------------------


class Subject(NamedTuple):
    """Files of the goods that are damaged, and the readers of them.

    sealed: whether the programs hold checksums of these files, so that they never believe a damaged one. Others may
    be what somebody wrote, and then only have to be understood or refused.
    """

    weight: int
    good: str
    files: str
    sealed: bool
    readers: str


SUBJECTS = [
    Subject(10, "shards", "*/*.npy", True, "evaluate_shards evaluate_shards again train"),
    Subject(
        16, "shards", "*/manifest.json", True, "evaluate_shards evaluate_shards again again train"
    ),
    Subject(3, "shards", "tokenizer.tiktoken", True, "train again"),
    Subject(6, "ranks.tiktoken", "", False, "tokenize"),
    Subject(
        18, "run", "checkpoints/**/*", True, "evaluate verify verify sample export export list"
    ),
    Subject(6, "run", "config.json", True, "evaluate export compare trace list sample prune"),
    Subject(4, "run", "metrics.jsonl", False, "compare"),
    Subject(4, "run", "tokenizer.tiktoken", True, "sample export"),
    Subject(6, "run", "plugins/**/*", False, "trace"),
    Subject(8, "part", "checkpoints/**/*", True, "resume"),
    Subject(3, "part", "*.*", False, "resume"),
    Subject(3, "cache", "*", False, "train"),
    Subject(6, "hf", "*.safetensors", False, "evaluate_hf import init_from"),
    Subject(12, "hf", "*.json", False, "evaluate_hf import sample_hf tokenize_hf tokenize_hf"),
    Subject(4, "records", "r.jsonl", False, "tokenize_jsonl ranks_jsonl evaluate_jsonl"),
    Subject(4, "records", "r.jsonl.gz", True, "tokenize_gz ranks_gz evaluate_gz"),
    Subject(4, "records", "r.jsonl.zst", False, "tokenize_zst ranks_zst evaluate_zst"),
    Subject(4, "records", "r.parquet", False, "tokenize_parquet ranks_parquet evaluate_parquet"),
    Subject(4, "text", "*.txt", False, "tokenize_text ranks_text"),
    Subject(6, "stopped", "out/*", True, "finish"),
    Subject(3, "stopped", "in/[01]*", True, "finish"),  # what was read before it stopped
]
RECORDS = dict(jsonl="r.jsonl", gz="r.jsonl.gz", zst="r.jsonl.zst", parquet="r.parquet")


def words_of(reader, at, out):
    """Command line of a reader. at / name: where that good lies, damaged or not; out: a new path for what it makes."""
    name, _, kind = reader.partition("_")
    cache = ("--compilation_cache", at / "cache")
    source = at / "records" / RECORDS[kind] if kind in RECORDS else at / "text"
    model = at / "hf" if kind == "hf" else at / "run"
    score = ["tools/evaluate.py", model, *cache, "--text_column", "body", "--limit", 40]
    ranks = at / "hf" / "tokenizer.json" if kind == "hf" else at / "ranks.tiktoken"
    lines = dict(
        evaluate=[*score, "--json", "--data", source if kind in RECORDS else at / "shards"],
        sample=["tools/sample.py", model, *cache, "--prompt", "the"],
        verify=["tools/checkpoints.py", "verify", at / "run"],
        list=["tools/checkpoints.py", "list", at / "run"],
        prune=["tools/checkpoints.py", "prune", at / "run", "--keep", 1, "--dry_run"],
        export=["tools/hf.py", "export", at / "run", out],
        compare=["tools/compare.py", at / "run", "--output", out.with_suffix(".png")],
        trace=["tools/trace.py", at / "run"],
        tokenize=goods.tokenize_words(source, out, ranks),
        again=goods.tokenize_words(at / "text", at / "shards", at / "ranks.tiktoken"),
        finish=goods.stopped_words(
            at / "stopped" / "in", at / "stopped" / "out", at / "ranks.tiktoken"
        ),
        ranks=goods.ranks_words(source, out.with_suffix(".tiktoken")),
        resume=goods.train_words(at, (at / "part").parent),
        train=goods.train_words(at, out, steps=2),
        init=goods.train_words(at, out, steps=2, init_from=at / "hf"),
    )
    lines["import"] = ["tools/hf.py", "import", at / "hf", out]
    return lines[name]


def result_of(reader, at, out, ended):
    """What a reader made, without times and places: equal where its input was."""
    name = reader.partition("_")[0]
    if name == "resume":  # which does not read the older checkpoint
        return goods.trained((at / "part").parent / "run", last=goods.STEPS)
    if name in ("train", "init"):
        return goods.trained(out / "run")
    if name == "again":  # which does not read shards; who trains on them does
        return goods.shards(at / "shards", contents=False)
    if name in ("finish", "tokenize"):
        return goods.shards(at / "stopped" / "out" if name == "finish" else out)
    if name in ("export", "ranks"):
        return goods.hashes(out if name == "export" else out.with_suffix(".tiktoken"))
    if name == "import":
        return goods.fingerprints(out)
    if name == "evaluate":
        rows = json.loads(ended.out)["data"]
        return [{k: v for k, v in row.items() if k != "data"} for row in rows]
    said = ended.out.replace(str(at / "run"), "RUN")
    return re.sub(r"\S*compare\S*|\S+\.png", "PICTURE", said)


# --- A case -------------------------------------------------------------------------------------------------------

# what a reader changes is its own copy, in any case
CHANGED = dict(resume="part", again="shards", finish="stopped", train="cache")
FALL_BACK = {"evaluate", "sample", "export"}  # on an older checkpoint


def read(reader, sound, folder, copied=(), change=lambda at: None):
    """(Ended, result or None, what change(at) said) of a reader on the goods, after a change of its own copies."""
    fresh_folder(folder)
    copied = {*copied, CHANGED.get(reader, "cache")}
    at, out = goods.Places(sound, folder / "own", copied), folder / "out"
    if reader == "finish":
        goods.stop(at / "stopped", at / "ranks.tiktoken")
    said = change(at)
    ended = run(words_of(reader, at, out), folder / "work", seconds=90)
    result = result_of(reader, at, out, ended) if ended.status == 0 else None
    return ended, result, said


def forget_newest(at):
    shutil.rmtree(at / "run" / "checkpoints" / str(goods.STEPS))


class Kind:
    """Cases of damaged files."""

    def __init__(self, folder):
        self.sound, self.expected = folder / "goods", {}
        goods.make(self.sound)

    def expect(self, reader, folder):
        """Results that are right: of the sound files, and of the older checkpoint where one is passed over."""
        if reader not in self.expected:
            rights = [read(reader, self.sound, folder)]
            if reader in FALL_BACK:
                rights.append(read(reader, self.sound, folder, {"run"}, forget_newest))
            wrong = [ended for ended, *_ in rights if ended.status]
            assert not wrong, (reader, wrong)
            self.expected[reader] = [result for _, result, _ in rights]
        return self.expected[reader]

    def case(self, rng, folder):
        """(what was tried, how it ended, what is wrong with that or None, the Ended)."""
        subject = rng.choices(SUBJECTS, [s.weight for s in SUBJECTS])[0]
        reader = rng.choice(subject.readers.split())
        right = self.expect(reader, folder)

        def change(at):
            root = at / subject.good
            files = [root]
            if subject.files:
                files = sorted(p for p in root.glob(subject.files) if p.is_file())
            path = rng.choice(files)
            name = path.relative_to(root) if path != root else path.name
            return f"{subject.good}/{name}: {wound(rng, path)}"

        ended, result, said = read(reader, self.sound, folder, {subject.good}, change)
        sealed = subject.sealed and reader not in ("list", "compare")  # which show what they read
        how, wrong = outcome(sealed, ended, result, right)
        left = leftovers(folder)
        if left and not wrong:
            how, wrong = "leftovers", f"left {left[0]}"
        return f"{reader}: {said}", how, wrong, ended


def outcome(sealed, ended, result, right):
    """(class, what is wrong or None) of a program that read a damaged file."""
    wrong = complaint(ended)
    if wrong:
        return wrong, wrong
    if ended.status:
        return "refused", None
    if result == right[0]:
        return "same result", None
    said = ended.out + ended.err
    if result in right:
        told = "damaged" in said
        return "older checkpoint", None if told else "an older checkpoint, without a word"
    told = "has no tokenizer" in said or "not verified" in said
    if sealed and not told:
        return "silent", "another result, without a word"
    lost = isinstance(result, tuple) and len(result[1]) < len(right[0][1])  # of `trained`
    if lost and "metrics.jsonl" not in said:
        return "silent", "rows of metrics.jsonl are lost without a word"
    return "other content", None
