"""Damaged files: a program that reads one reports it in a sentence, or its result is that of the sound file."""

import json

from tests.soak import jobs
from tests.soak.programs import Case, complaint, leftovers, run

WRONG = [None, True, [], {}, [[]], [1, "x"], {"x": 1}, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, 1e308]
WRONG += [float("nan"), float("inf"), "", "x", "../x", "-1", "/", "nan", "\0", "é漢", "x" * 5000]
GONE = "gone"


def flip(rng, path):
    content = bytearray(path.read_bytes() or b"\0")
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"bit {bit} flipped"


def splice(rng, path):
    """Cut off, append, insert or replace."""
    content = path.read_bytes()
    first = rng.choice([0, len(content), rng.randint(0, len(content))])
    last = rng.choice([first, first + 1, first + 4096, len(content)])
    filling = rng.choice([b"", b"\n", b"{}", b"\0" * 64, rng.randbytes(64), content[:99]])
    path.write_bytes(content[:first] + filling + content[last:])
    return f"bytes {first} to {last} replaced by {len(filling)}, {filling[:4].hex()}..."


def swap(rng, path):
    """With another file of the same ending, so often of the same kind."""
    alike = path.parent.parent.rglob(f"*{path.suffix}")
    other = rng.choice(sorted(p for p in alike if p.is_file()))
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    other.write_bytes(mine)
    return f"swapped with {other.parent.name}/{other.name}"


def remove(rng, path):
    path.unlink()
    instead = rng.choice(["nothing", "a folder", "a link to nowhere"])
    if "folder" in instead:
        path.mkdir()
    elif "link" in instead:
        path.symlink_to("nowhere")
    return f"replaced by {instead}"


def edit_json(rng, path):
    """Change or remove a value of a JSON file, or of a line of one."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    n = rng.randrange(len(lines))
    content = json.loads(lines[n])
    parent, key = rng.choice(list(entries(content)))
    old, new = parent[key], rng.choice([*WRONG, GONE, GONE])
    parent[key] = new
    if new == GONE:
        del parent[key]
    lines[n] = json.dumps(content)
    path.write_text("\n".join(lines) + "\n")
    return f"{key}: {old!r:.30} -> {new!r:.30}"


def entries(content):
    """(a list or dictionary, an index or key in it) of all in a content."""
    if isinstance(content, dict | list):
        for key in content if isinstance(content, dict) else range(len(content)):
            yield content, key
            yield from entries(content[key])


def damage(rng, path):
    """Damage a file; says how."""
    ways = [flip, splice, remove]
    if not path.name.endswith(
        "-cache"
    ):  # jax takes a compiled program for what its file's name says
        ways.append(swap)
    if path.suffix in (".json", ".jsonl") or path.name in ("metadata", "metrics", "_METADATA"):
        ways += [edit_json] * 4
    way = rng.choice(ways)
    return f"{way.__name__}: {way(rng, path)}"


# (sound folder or file, files in it that are damaged, whether they are sealed, jobs that read them). The programs hold
# checksums of sealed files, so that they never believe a damaged one. Others may be what somebody wrote, and then only
# have to be understood or refused.
SUBJECTS = [
    ("shards", "*/*.npy", True, "evaluate train"),
    ("shards", "*/manifest.json", True, "evaluate again train"),
    ("shards", "tokenizer.tiktoken", True, "train again"),
    ("sound", "run/checkpoints/**/*", True, "evaluate verify sample export"),
    ("sound", "run/config.json", True, "evaluate export sample"),
    ("sound", "run/tokenizer.tiktoken", True, "sample export"),
    ("part", "run/checkpoints/**/*", True, "resume"),
    ("part", "run/*.*", False, "resume"),
    ("cache", "*", False, "train"),
    ("hf", "*.safetensors", False, "evaluate_hf import"),
    ("hf", "*.json", False, "evaluate_hf import tokenize_hf"),
    ("records.jsonl.gz", "", True, "tokenize_records.jsonl.gz evaluate_records.jsonl.gz"),
    ("records.parquet", "", False, "tokenize_records.parquet evaluate_records.parquet"),
    ("ranks.tiktoken", "", False, "tokenize"),
    ("text", "*.txt", False, "tokenize ranks"),
    ("progress", "*", True, "finish_source"),
]


def outcome(sealed, ended, result, right, tried):
    """(class, what is wrong or None) of a program that read a file that was damaged in the way that `tried` tells."""
    wrong, said = complaint(ended), ended.out + ended.err
    if wrong or ended.status or result == right:
        return wrong or ("refused" if ended.status else "same result"), wrong
    told = any(words in said for words in ("damaged", "has no tokenizer", "not verified"))
    if sealed and not told:
        return "silent", "another result, without a word"
    lost = isinstance(result, tuple) and len(result[1]) < len(right[1])  # of training
    # a run may be copied by its checkpoints alone (docs/runs.md), so a log that is not there is no damage
    if lost and "metrics.jsonl" not in said and "metrics.jsonl: remove" not in tried:
        return "silent", "rows of metrics.jsonl are lost without a word"
    return "other content", None


EXPECTED = {}  # {job: its result from sound files}


def read(job, at, place):
    """(Ended, result or None) of a job."""
    ended = run(jobs.words_of(job, at, place), place.parent / "work")
    return ended, None if ended.status else jobs.result_of(job, place, ended.out)


def case(rng, sound, folder):
    subject, pattern, sealed, readers = rng.choice(SUBJECTS)
    job = rng.choice(readers.split())
    if job not in EXPECTED:
        ended, EXPECTED[job] = read(job, *jobs.places(sound, folder / "undisturbed", job))
        assert ended.status == 0, ended
    at, place = jobs.places(sound, folder / "damaged", job, subject)
    files = at[subject].glob(pattern) if pattern else [at[subject]]
    # Orbax draws names, so that sizes are what a repeated case has in common
    files = sorted((p.stat().st_size, str(p), p) for p in files if p.is_file())
    path = rng.choice(files)[-1]
    tried = f"{job}: {path.relative_to(folder)}: {damage(rng, path)}"
    ended, result = read(job, at, place)
    how, wrong = outcome(sealed, ended, result, EXPECTED[job], tried)
    return Case(tried, how, wrong or leftovers(folder), ended)
