"""Damaged files: a program that reads one reports it in a sentence, or its result is that of the sound file."""

import json
from typing import NamedTuple

from tests.soak import jobs
from tests.soak.programs import Case, complaint, leftovers, run

# --- Ways to damage a file: each says what it did -----------------------------------------------------------------

WRONG = [None, True, [], {}, [[]], [1, "x"], {"x": 1}, -1, -5, 0, 1, 2**31, 2**63, 10**30]
WRONG += [0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "../x", "-1", "/", "..", "nan"]
WRONG += ["\0", "é漢", "x" * 5000]


def flip(rng, path):
    content = bytearray(path.read_bytes())
    bits = [rng.randrange(8 * len(content)) for _ in range(rng.choice([1, 1, 8]) if content else 0)]
    for bit in bits:
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"bits {bits} flipped"


def splice(rng, path):
    """Cut off, append, insert or replace."""
    content = path.read_bytes()
    first = rng.choice([0, len(content), *rng.choices(range(len(content) + 1), k=4)])
    last = rng.choice([first, first + 1, first + 16, first + 4096, len(content), len(content)])
    n = len(content[first:last])
    filling = rng.choice([b"", b"", b"\n", b"{}", b"\0" * n, rng.randbytes(n or 64), content[:99]])
    path.write_bytes(content[:first] + filling + content[last:])
    return f"{n} bytes from {first} on replaced by {len(filling)}, {filling[:4].hex()}..."


def swap(rng, path):
    """With another file of the same ending, so often of the same kind."""
    alike = path.parent.parent.rglob(f"*{path.suffix}")
    others = sorted(p for p in alike if p.is_file() and p != path)
    if not others:
        return splice(rng, path)
    other = rng.choice(others)
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    other.write_bytes(mine)
    return f"swapped with {other.parent.name}/{other.name}"


def remove(rng, path):
    path.unlink()
    instead = rng.choice(["nothing", "a folder", "a link to nowhere"])
    if instead == "a folder":
        path.mkdir()
    elif instead == "a link to nowhere":
        path.symlink_to("nowhere")
    return f"replaced by {instead}"


def edit_json(rng, path):
    """Change a value, a name or an entry of a JSON file, or of a line of one."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    n = rng.randrange(len(lines))
    content = json.loads(lines[n])
    places = list(entries(content, ""))
    if not places:
        return splice(rng, path)
    parent, key, name = rng.choice(places)
    old = parent.pop(key)
    how = rng.choice(["removed", "renamed", "changed", "changed", "changed", "changed"])
    if how == "renamed" and isinstance(parent, dict):
        parent[f"{key}x"] = old
    elif how == "changed":
        near = (
            [2 * old, -old, old + 1] if isinstance(old, int | float) else [f"{old}x", str(old)[1:]]
        )
        new = rng.choice(rng.choice([near, WRONG, WRONG]))
        parent.insert(key, new) if isinstance(parent, list) else parent.update({key: new})
        how = f"{old!r:.30} -> {new!r:.30}"
    lines[n] = json.dumps(content)
    path.write_text("\n".join(lines) + "\n")
    return f"{name} {how}"


def entries(content, name):
    """(a list or dictionary, an index or key in it, its full name) of all in a content."""
    if isinstance(content, dict | list):
        for key in content if isinstance(content, dict) else range(len(content)):
            yield content, key, f"{name}.{key}"
            yield from entries(content[key], f"{name}.{key}")


def damage(rng, path):
    """Damage a file; says how."""
    ways = [flip, flip, splice, splice, splice, swap, remove]
    if path.suffix in (".json", ".jsonl") or path.name in ("metadata", "metrics", "_METADATA"):
        ways += [edit_json] * 9
    way = rng.choice(ways)
    return f"{way.__name__}: {way(rng, path)}"


# --- What is damaged, and which jobs read it ----------------------------------------------------------------------


class Subject(NamedTuple):
    """Sound files that are damaged, and the jobs that read them.

    sealed: whether the programs hold checksums of these files, so that they never believe a damaged one. Others may
    be what somebody wrote, and then only have to be understood or refused.
    """

    weight: int
    name: str
    files: str
    sealed: bool
    readers: str


SUBJECTS = [
    Subject(10, "shards", "*/*.npy", True, "evaluate evaluate again train"),
    Subject(16, "shards", "*/manifest.json", True, "evaluate evaluate again again train"),
    Subject(3, "shards", "tokenizer.tiktoken", True, "train again"),
    Subject(6, "ranks.tiktoken", "", False, "tokenize"),
    Subject(18, "sound", "run/checkpoints/**/*", True, "evaluate verify verify sample export list"),
    Subject(6, "sound", "run/config.json", True, "evaluate export compare trace list sample"),
    Subject(4, "sound", "run/metrics.jsonl", False, "compare"),
    Subject(4, "sound", "run/tokenizer.tiktoken", True, "sample export"),
    Subject(6, "sound", "run/plugins/**/*", False, "trace"),
    Subject(8, "part", "run/checkpoints/**/*", True, "resume"),
    Subject(3, "part", "run/*.*", False, "resume"),
    Subject(3, "cache", "*", False, "train"),
    Subject(6, "hf", "*.safetensors", False, "evaluate_hf import init"),
    Subject(12, "hf", "*.json", False, "evaluate_hf import sample_hf tokenize_hf tokenize_hf"),
    Subject(4, "records", "r.jsonl", False, "tokenize_jsonl ranks_jsonl evaluate_jsonl"),
    Subject(4, "records", "r.jsonl.gz", True, "tokenize_gz ranks_gz evaluate_gz"),
    Subject(4, "records", "r.jsonl.zst", False, "tokenize_zst ranks_zst evaluate_zst"),
    Subject(4, "records", "r.parquet", False, "tokenize_parquet ranks_parquet evaluate_parquet"),
    Subject(4, "text", "*.txt", False, "tokenize ranks"),
    Subject(6, "progress", "*", True, "finish"),
]


def outcome(sealed, ended, result, right):
    """(class, what is wrong or None) of a program that read a damaged file."""
    wrong = complaint(ended)
    if wrong:
        return wrong, wrong
    if ended.status:
        return "refused", None
    if result == right:
        return "same result", None
    said = ended.out + ended.err
    told = any(words in said for words in ("damaged", "has no tokenizer", "not verified"))
    if sealed and not told:
        return "silent", "another result, without a word"
    lost = isinstance(result, tuple) and len(result[1]) < len(right[1])  # of training
    if lost and "metrics.jsonl" not in said:
        return "silent", "rows of metrics.jsonl are lost without a word"
    return "other content", None


class Kind:
    """Cases of damaged files."""

    def __init__(self, sound):
        self.sound, self.expected = sound, {}
        jobs.make(sound)

    def read(self, reader, folder, copied=(), change=lambda at: None):
        """(Ended, result or None, what change(at) said) of a job, after a change of its own copies."""
        at, out = jobs.places(self.sound, folder, reader, copied)
        said = change(at)
        ended = run(jobs.words_of(reader, at, out), folder / "work")
        result = jobs.result_of(reader, at, out, ended.out) if ended.status == 0 else None
        return ended, result, said

    def case(self, rng, folder):
        subject = rng.choices(SUBJECTS, [s.weight for s in SUBJECTS])[0]
        reader = rng.choice(subject.readers.split())
        if reader not in self.expected:
            ended, self.expected[reader], _ = self.read(reader, folder)
            assert ended.status == 0, ended

        def change(at):
            root = at / subject.name
            files = root.glob(subject.files) if subject.files else [root]
            # Orbax draws names, so that sizes are what a repeated case has in common
            files = sorted((p.stat().st_size, str(p), p) for p in files if p.is_file())
            path = rng.choice(files)[-1]
            return f"{path.relative_to(at.own)}: {damage(rng, path)}"

        ended, result, said = self.read(reader, folder, {subject.name}, change)
        sealed = subject.sealed and reader not in ("list", "compare")  # which show what they read
        how, wrong = outcome(sealed, ended, result, self.expected[reader])
        wrong = wrong or leftovers(folder)
        return Case(f"{reader}: {said}", how, wrong, ended)
