"""`bash run.sh local` once there is an environment: any text becomes shards and a run; which flags are added."""

import os
import re

import numpy as np
import pytest
from helpers import refusal

from config import command_line
from data.own_text import name_of, name_of_tokenizer
from runtime import platforms
from shards import manifest, tokenization
from tools import local

STORY = "Once upon a time there was a child named Tom. He found a red ball in the park. "
STDLIB = "--data data/shards/stdlib"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder, on a machine without an accelerator, with shards of the standard library."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platforms, "accelerator", lambda: "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    for split in ("train", "val"):
        folder = tmp_path / local.STDLIB / split
        folder.mkdir(parents=True)
        (folder / manifest.NAME).touch()


def write(name, text):
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "w") as f:
        f.write(text)
    return name


def text_in(folder):
    """The text of all shards in a folder, training first."""
    encoding = tokenization.load_tokenizer(os.path.join(folder, "tokenizer.tiktoken"))
    parts = []
    for split in ("train", "val"):
        ids = np.load(os.path.join(folder, split, "000000.npy")).tolist()
        parts.append(encoding.decode([token for token in ids if token != encoding.eot_token]))
    return "".join(parts)


ADDED = {  # flags, and what main.py gets
    "": f"--preset tiny {STDLIB}",
    "--preset=moe1b": f"--preset=moe1b {STDLIB}",
    "--seed 1 --n-device-axis 1 2 2": f"--preset tiny --seed 1 --n-device-axis 1 2 2 {STDLIB} --n_devices 4",
    "--n_device_axis 2 2 1 --n_devices 4": f"--preset tiny --n_device_axis 2 2 1 --n_devices 4 {STDLIB}",
    "--n_device_axis 0 2 1": f"--preset tiny --n_device_axis 0 2 1 {STDLIB}",
    "--data gs://b/c": "--preset tiny --data gs://b/c",
    "--bucket-name=gs://b/c": "--preset tiny --bucket-name=gs://b/c",
    "--preset list": "--preset list",
    "--help --wandb": "--preset tiny --help --wandb",
}


def test_flags_that_are_not_given_are_added(monkeypatch):
    """Simulated devices only for a mesh that is asked for, and not beside those of XLA_FLAGS or an accelerator."""
    for flags, wanted in ADDED.items():
        assert local.main(flags.split()) == wanted.split(), flags
    odd = ["--prompt", "a  b\n'c' --preset $HOME * é", "--output_dir=x y;z"]
    assert local.main(odd) == ["--preset", "tiny", *odd, *STDLIB.split()]
    mesh = "--n_device_axis 2 1 1".split()
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert "--n_devices" not in local.main(mesh)
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(platforms, "accelerator", lambda: "gpu")
    assert "--n_devices" not in local.main(mesh)
    refusal(lambda: local.main(["--max_lrr", "1"]), "--max_lrr", "--max_lr")


def test_a_config_keeps_its_preset_and_its_data(tmp_path):
    path = write("a.json", '{"preset": "gpt2-tiny", "data": "gs://b/c", "seed": 3}')
    assert local.main(["--config", path]) == ["--config", path]


NAMES = {  # {name of a text: of its shards and its run}
    "My Book.txt": "My-Book",
    "input (1).txt": "input-1",
    "corpus.v1.txt": "corpus.v1",
    "corpus.v2.txt": "corpus.v2",
    ".hidden.txt": "hidden",
    "a[b].txt": "a-b-",
    "plain": "plain",
    "книга.md": "книга",
    "x/README": "README",
}


def test_text_of_any_name_becomes_shards_and_a_run_of_its_own():
    folders = set()
    for i, (path, name) in enumerate(NAMES.items()):
        text = f"Text {i}. {STORY}" * 5
        words = local.main(["--data", write(path, text)])
        folder = f"data/shards/{name.strip('-')}"
        added = ["--data", folder, "--name", name.strip("-")]
        assert words == ["--preset", "tiny", "--data", path, *added]
        assert text_in(folder) == text
        folders.add(folder)
        command_line.check(["here", *words][1:], elsewhere=False)
    assert len(folders) == len(NAMES)


def test_a_text_keeps_its_name_and_another_one_does_not_take_it(capsys):
    """Neither one of the same name elsewhere, nor the same after somebody changed it, nor other ways to read it."""
    path = write("a/input.txt", STORY * 9)
    first = local.main(["--data", path])
    ranks = "data/shards/input.tiktoken"
    made = os.stat(ranks).st_mtime_ns
    assert local.main(["--data", path]) == first and os.stat(ranks).st_mtime_ns == made
    capsys.readouterr()
    others = []
    for change in (
        ["--data", write("b/input.txt", STORY * 9)],
        ["--data", path, "--val_fraction", "0.3"],
    ):
        others.append(local.main(change)[-1])
        assert "data/shards/input holds another text" in capsys.readouterr().out
    write(path, STORY * 10)
    others.append(local.main(["--data", path])[-1])
    assert len({first[-1], *others}) == 4 and all(name.startswith("input-") for name in others)
    for flags in (["--tokenizer", "gpt2x.tiktoken"], ["--vocab_size", "300"]):
        if flags[0] == "--tokenizer":
            os.link(ranks, flags[1])
        *_, name = local.main(["--data", path, *flags])
        assert name == "input-gpt2x" if flags[0] == "--tokenizer" else name == "input-300"
    sizes = [
        manifest.read(f"data/shards/{name}/train")["vocab_size"] for name in ("input", "input-300")
    ]
    assert sizes[0] < sizes[1] <= 300


def test_text_for_weights_is_tokenized_as_theirs_was():
    path = write("first.txt", STORY * 9)
    local.main(["--data", path])
    run = write("runs/a/config.json", '{"encoding": "tokenizer.tiktoken", "T": 16}')
    run = os.path.dirname(run)
    assert local.main(["--data", path, "--init_from", run])[-1] == "first", "they have none"
    os.link("data/shards/first.tiktoken", f"{run}/tokenizer.tiktoken")
    *_, folder, _, name = local.main(["--data", write("more.txt", STORY * 20), "--init_from", run])
    assert (folder, name) == ("data/shards/more-a", "more-a")
    made = [manifest.read(f"data/shards/{name}/train") for name in ("first", "more-a")]
    assert made[0]["tokenizer_sha256"] == made[1]["tokenizer_sha256"]
    assert name_of_tokenizer("x/b c.tiktoken") == "b-c" and name_of_tokenizer("gpt2") == "gpt2"
    assert name_of_tokenizer("models/Qwen3-0.6B/tokenizer.json") == "Qwen3-0.6B"


def test_a_folder_is_text_unless_it_holds_shards(capsys):
    """What is left out of it is told once."""
    write("books/a.md", STORY * 9)
    write("books/cover.png", "\x89PNG\0\0\0\0")
    write("books/list.json", '{"title": "x"}')
    assert local.main(["--data", "books/"])[-1] == "books"
    said = capsys.readouterr().err
    assert said.count("1 binary file (") == said.count("1 record file (") == 1 and "--" not in said
    assert local.main(["--data", "books/*.md"])[-1].startswith("books-")
    for shards in ("made/train/0.npy", "several/web/train/0.npy", "published/a_train_000001.bin"):
        write(shards, "")
        folder = shards.split("/")[0]
        assert local.main(["--data", folder]) == ["--preset", "tiny", "--data", folder]


def test_records_have_their_flags():
    path = write("rows.csv", "id,body\n" + "".join(f'{i},"{STORY}{i}"\n' for i in range(40)))
    refusal(
        lambda: local.main(["--data", path]),
        "--data",
        "no column text, only id, body",
        "--text_column",
    )
    words = local.main(["--data", path, "--text_column", "body"])
    assert (
        "--text_column" not in words
        and words[-1] == "rows"
        and STORY in text_in("data/shards/rows")
    )


def test_what_is_no_text_is_refused_by_the_name_that_was_given(monkeypatch):
    """No sentence names a flag of another program, or one that nobody gave."""
    write("input.txt", "x")
    write("empty.txt", "")
    write("one.txt", "a")
    write("pdf.pdf", "%PDF-1.4")
    write("bytes/a.bin", "\0" * 99)
    wanted = {
        "inputt.txt": ["no such file or folder", "the nearest is input.txt"],
        "roneneldan/TinyStories": ["no such file", "data/tokenize_shards.py"],
        "empty.txt": ["no text in it"],
        "one.txt": ["no text for val"],
        "pdf.pdf": ["binary"],
        "bytes": ["binary"],
    }
    for path, parts in wanted.items():
        said = refusal(lambda path=path: local.main(["--data", path]), *parts)
        assert not {"--source", "--output", "--text_column", "--vocab_size"} & {*said.split()}, said
    said = refusal(
        lambda: local.main(["--data", "input.txt", "--vocab_size", "99"]), "--vocab_size 99", "257"
    )


def test_names_are_those_that_a_run_may_have():
    assert name_of("/") == name_of("...") == "text"
    for name in ("a b", "ä/ö.jsonl.gz", "%$.txt", "-x.txt", "a\nb"):
        assert re.fullmatch(r"[\w+=@][\w.+=@-]*", name_of(name)), name
