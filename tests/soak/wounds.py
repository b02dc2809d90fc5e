"""Ways to damage a file, each a function of a random.Random, and of the path, that says what it did."""

import json
import shutil

WRONG = [None, True, [], {}, [[]], [1, "x"], {"x": 1}, -1, -5, 0, 1, 2**31, 2**63, 10**30]
WRONG += [0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "../x", "-1", "/", "..", "nan"]
WRONG += ["\0", "é漢", "x" * 5000]


def truncate(rng, path):
    content = path.read_bytes()
    n = rng.randrange(len(content)) if content else 0
    path.write_bytes(content[:n])
    return f"cut to {n} of {len(content)} bytes"


def empty(rng, path):
    path.write_bytes(b"")
    return "emptied"


def flip(rng, path):
    content = bytearray(path.read_bytes())
    number = rng.choice([1, 1, 1, 8]) if content else 0
    at = sorted(rng.randrange(8 * len(content)) for _ in range(number))
    for bit in at:
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"bits {at} flipped"


def replace_bytes(rng, path):
    content = path.read_bytes()
    first = rng.randrange(len(content) + 1)
    n = min(rng.choice([1, 4, 16, 512, 4096]), len(content) - first)
    filling = rng.choice([b"\0" * n, b"\xff" * n, rng.randbytes(n), content[:n]])
    path.write_bytes(content[:first] + filling + content[first + n :])
    return f"{n} bytes from {first} on replaced by {filling[:4].hex()}..."


def insert(rng, path):
    content = path.read_bytes()
    first = rng.randrange(len(content) + 1)
    more = rng.choice([b"\n", b"\0", b"x", rng.randbytes(9), content[:99]])
    path.write_bytes(content[:first] + more + content[first:])
    return f"{more[:4].hex()}... inserted at {first}"


def append(rng, path):
    more = rng.choice([b"\n", b"\0" * 512, b"{}", rng.randbytes(64)])
    path.write_bytes(path.read_bytes() + more)
    return f"{more[:4].hex()}... appended"


def swap(rng, path):
    """With another file of the same ending, so often of the same kind."""
    others = sorted(
        p for p in path.parent.parent.rglob(f"*{path.suffix}") if p.is_file() and p != path
    )
    if not others:
        return empty(rng, path)
    other = rng.choice(others)
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    other.write_bytes(mine)
    return f"swapped with {other.parent.name}/{other.name}"


def remove(rng, path):
    path.unlink()
    return "removed"


def folder(rng, path):
    path.unlink()
    path.mkdir()
    return "replaced by a folder"


def link(rng, path):
    path.unlink()
    path.symlink_to("nowhere")
    return "replaced by a link to nowhere"


def edit_json(rng, path):
    """Change a value, a name or an entry of a JSON file, or of a line of one."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    n = rng.randrange(len(lines))
    content = json.loads(lines[n])
    done = edit(rng, content)
    lines[n] = json.dumps(content)
    path.write_text("\n".join(lines) + "\n")
    return done


def edit(rng, content):
    """Change something inside of `content`; says what."""
    places = [(content, key, "") for key in keys(content)]
    for parent, key, where in places:
        inner = parent[key]
        places += [(inner, k, f"{where}.{key}") for k in keys(inner)]
    if not places:
        return "nothing to edit"
    parent, key, where = rng.choice(places)
    old = parent[key]
    how = rng.choice(["wrong", "wrong", "wrong", "near", "near", "removed", "renamed"])
    if how == "removed" or (how == "renamed" and isinstance(parent, list)):
        del parent[key]
        return f"{where}.{key} removed"
    if how == "renamed":
        parent[f"{key}x"] = parent.pop(key)
        return f"{where}.{key} renamed"
    parent[key] = near(rng, old) if how == "near" else rng.choice(WRONG)
    return f"{where}.{key}: {old!r:.30} -> {parent[key]!r:.30}"


def keys(content):
    if isinstance(content, dict):
        return list(content)
    return list(range(len(content))) if isinstance(content, list) else []


def near(rng, old):
    """A value of the same kind."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice([old + 1, old - 1, -old, 2 * old])
    if isinstance(old, float):
        return rng.choice([old * 2, -old, old + 1e-9])
    if isinstance(old, str) and old:
        at = rng.randrange(len(old))
        return old[:at] + rng.choice("0aZ/. ") + old[at + 1 :]
    return str(old)


ANY = [truncate, truncate, empty, flip, flip, flip, replace_bytes, replace_bytes]
ANY += [insert, append, swap, remove, folder, link]


def wound(rng, path):
    """Damage a file; says how."""
    ways = ANY
    if path.suffix in (".json", ".jsonl") or path.name in ("metadata", "metrics", "_METADATA"):
        ways = ANY + [edit_json] * 14
    if path.is_dir():  # as an object of Orbax's may be
        shutil.rmtree(path)
        return "removed"
    way = rng.choice(ways)
    return f"{way.__name__}: {way(rng, path)}"
