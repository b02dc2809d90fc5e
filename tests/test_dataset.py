"""The order of sequences: a pure function of shards, seed and number, whatever the mesh and however a batch is cut."""

import hashlib
import io
import json
import re
import shutil
import threading
from functools import partial
from types import SimpleNamespace

import fsspec
import jax
import numpy as np
import pytest
from families import SMALL_GPT2
from helpers import BYTE_RANKS, describe, refusal, small_tokenizer, write_bin
from small_models import small_config

import dataset
from collectives import BATCH_SPEC
from runtime import messages
from shards import manifest, storage, tokenization
from shards.corpus import Corpus, permute
from shards.missing import remedy
from shards.mixture import Mixture
from training.device_mesh import make_mesh


@pytest.fixture
def corpus(shards):
    return Corpus(small_config(), str(shards), "train")


def as_set(rows):
    return sorted(map(tuple, rows.tolist()))


@pytest.mark.parametrize("window", [1 << 30, 3200])
def test_an_epoch_visits_every_sequence_once_and_the_next_in_another_order(
    corpus, monkeypatch, window
):
    monkeypatch.setattr("shards.corpus.WINDOW", window)
    N = corpus.n_sequences
    assert N == sum((len(np.load(s.path)) - 1) // 32 for s in corpus.shards)
    order = partial(corpus.sequences, seed=3)
    epochs = [order(np.arange(N) + e * N) for e in range(2)]
    in_place = corpus.read(np.arange(N), np.arange(len(corpus.shards)))
    # sequences overlap by their target alone
    assert np.array_equal(in_place[1], np.load(corpus.shards[0].path)[32:65])
    assert in_place.dtype == np.int32
    assert as_set(epochs[0]) == as_set(epochs[1]) == as_set(in_place)
    assert not np.array_equal(*epochs) and not np.array_equal(epochs[0], in_place)
    assert not np.array_equal(epochs[0], corpus.sequences(np.arange(N), seed=4))
    # any piece, asked for alone and across the epochs' border, is the same
    piece = np.arange(N - 7, N + 7)
    assert np.array_equal(order(piece), np.concatenate(epochs)[piece])


@pytest.mark.parametrize(
    "mesh_shape, accumulation_steps", [((1, 1, 1), 4), ((2, 2, 2), 1), ((4, 1, 2), 2)]
)
def test_batches_hold_the_same_integers_on_every_mesh(corpus, mesh_shape, accumulation_steps):
    mesh, order = make_mesh(small_config(mesh_shape)), partial(corpus.sequences, seed=0)
    for first in (0, 32):
        shape = (accumulation_steps, 4, 8 // accumulation_steps, 32)
        batch = dataset.put_batch(order, first, shape, mesh)
        tokens, targets = (np.asarray(part).reshape(32, 32) for part in batch)
        rows = order(np.arange(first, first + 32))
        assert np.array_equal(tokens, rows[:, :-1]) and np.array_equal(targets, rows[:, 1:])


def test_a_host_reads_the_sequences_of_its_devices_alone(corpus, monkeypatch):
    """Here each half of dp, of a mesh (2,2,2) on two hosts."""
    mesh, shape = make_mesh(small_config((2, 2, 2))), (2, 4, 4, 32)
    order = partial(corpus.sequences, seed=0)
    whole = dataset.put_batch(order, 32, shape, mesh)
    devices = jax.sharding.NamedSharding(mesh, BATCH_SPEC).devices_indices_map(shape)
    monkeypatch.setattr(dataset, "NamedSharding", lambda *_: host)
    monkeypatch.setattr(
        jax, "make_array_from_callback", lambda _, host, part: [part(i) for i in host.indices]
    )
    for half in (mesh.devices[0], mesh.devices[1]):
        mine, read = {device: devices[device] for device in half.ravel()}, []
        indices = list(mine.values())
        host = SimpleNamespace(addressable_devices_indices_map=lambda _: mine, indices=indices)
        parts = dataset.put_batch(lambda n: (read.extend(n), order(n))[1], 32, shape, mesh)
        assert len(set(read)) == len(read) == 16
        for array, its_parts in zip(whole, parts):
            for index, part in zip(indices, its_parts, strict=True):
                assert np.array_equal(np.asarray(array)[index], part)


# --- Mixtures ---------------------------------------------------------------------------------------------------


@pytest.fixture
def corpora(tmp_path):
    """Three corpora a, b and c of 200, 70 and 33 sequences of 32 tokens, whose tokens tell them apart; no val in c."""
    for i, (name, n) in enumerate(dict(a=200, b=70, c=33).items()):
        for split in ("train", "val") if name != "c" else ("train",):
            (tmp_path / name / split).mkdir(parents=True)
            ids = np.random.default_rng(i).integers(80 * i, 80 * i + 80, n * 32 + 1)
            np.save(tmp_path / name / split / "000000.npy", ids.astype(np.uint16))
    return tmp_path


def mixture(corpora, mix, n=10**6):
    return Mixture(small_config(data=str(corpora), mix=mix), "train", n)


def validation(corpora, mix):
    return Mixture(small_config(data=str(corpora), mix=mix), "val")


PHASED = "a:3,b:1 until 0.25, b:1,c:1 until 0.7, a:1,c:3"


@pytest.mark.parametrize(
    "mix, borders, weights",
    [
        ("a:0.7,b:0.3", [], [(0.7, 0.3)]),
        ("a:0.12345,b:0.87655", [], [(0.12345, 0.87655)]),
        ("a:0.5,b:0.3,c:0.2", [], [(0.5, 0.3, 0.2)]),
        (PHASED, [251, 702], [(3, 1, 0), (0, 1, 1), (1, 0, 3)]),
    ],
)
def test_a_mixture_holds_its_weights(corpora, mix, borders, weights):
    """To within a sequence or two, wherever it is read. Every corpus is read as alone and without a gap, also where a
    phase ends."""
    mixed, N, rng = mixture(corpora, mix, 1003), 1003, np.random.default_rng(1)
    assert mixed.names == list("abc")[: len(weights[0])] and mixed.borders == borders
    for first in (0,) if borders else (12_345, 10**12, 0):
        rows = mixed.sequences(np.arange(first, first + N), seed=5)
        which = rows.max(1) // 80
        for of_phase, weight in zip(np.split(which, borders), weights, strict=True):
            for part in np.split(of_phase, range(50, len(of_phase), 50)):
                counts = np.bincount(part, minlength=len(weight))
                assert np.abs(counts - len(part) * np.divide(weight, sum(weight))).max() <= 2
                assert not counts[np.equal(weight, 0)].any()
        epochs = zip(*(mixed.epochs(n).values() for n in (first, first + N)))
        for k, (corpus, around) in enumerate(zip(mixed.corpora, epochs, strict=True)):
            before, after = (round(epoch * corpus.n_sequences) for epoch in around)
            alone = corpus.sequences(np.arange(before, after), seed=5)
            assert np.array_equal(rows[which == k], alone)
        for _ in range(20):  # however a run is stopped, and its batches are cut
            piece = rng.choice(N, rng.integers(1, 40), replace=False)
            assert np.array_equal(mixed.sequences(first + piece, seed=5), rows[piece])
        assert not np.array_equal(mixed.sequences(first + piece, seed=6), rows[piece])
    for n in (0, 1, 250, 251, 252, 702, 703):
        seen = np.bincount(which[:n], minlength=len(mixed.corpora))
        epochs = [count / corpus.n_sequences for count, corpus in zip(seen, mixed.corpora)]
        assert list(mixed.epochs(n).values()) == epochs


def test_validation_is_mixed_too_and_repeats_nothing(corpora):
    val = validation(corpora, "a:2,b:1,c:1")
    assert val.names == ["a", "b"] and val.n_sequences == 211  # then comes b's first again
    assert len(set(as_set(val.sequences(np.arange(211), seed=0)))) == 211
    assert max(val.epochs(211).values()) == 1 < max(val.epochs(212).values())
    one = mixture(corpora / "a", "")
    addresses = mixture("nowhere", f"{corpora}/a:1,file://{corpora}/b:1")
    assert one.epochs(100) == {"data/epoch": 0.5} and one.n_sequences == 200
    assert [c.n_sequences for c in addresses.corpora] == [200, 70]
    # the mean of phases, a: 0.5 x 0.75 + 0.25 x 0.25, b: 0.5 x 0.25 + 0.25 + 0.25 x 0.25; c has no val
    val = validation(corpora, "a:3,b:1 until 0.5, b:1 until 0.75, a:1,b:1,c:2")
    assert val.names == ["a", "b"] and val.shares.tolist() == [[1, 1]]
    assert val.n_sequences == 141 and val.borders == []


def test_the_last_phase_continues_beyond_the_run(corpora):
    """As a run with skipped batches reads."""
    beyond = mixture(corpora, PHASED, 600).sequences(np.arange(600, 680), seed=2).max(1) // 80
    assert np.bincount(beyond).tolist() == [20, 0, 60]


def test_the_order_is_that_of_earlier_versions(corpora):
    """The digest is of 3,000 sequences as version 3ab0dbc read them: runs from then resume with the same data."""
    rows = mixture(corpora, "a:0.12345,b:0.5,c:0.37655").sequences(np.arange(3000), seed=7)
    assert hashlib.sha256(rows.tobytes()).hexdigest().startswith("0e6e65b8655b83e4")


NO_MIXES = "a", "a:0.7,b", ":1", "a:0,b:1", "a:nan", "a:1e999", "a:1,a:2", "a:1 until 80%, b:1"


@pytest.mark.parametrize(
    "mix, said",
    [
        *[(mix, "a folder that is named once in its phase, a colon and") for mix in NO_MIXES],
        ("a:1,b:1e-9", "b has less"),
        ("a:1 until 0.5, nothing:1", "nothing/train"),
        ("a:1 until 0.5", "nothing follows the last until"),
        ("a:1 until 0.5, b:1 until 0.5, a:1", "a share of the run above 0.5 and below 1"),
        ("a:1 until 0.004, b:1", "a phase of it has no sequence in a run of 100"),
    ],
)
def test_a_wrong_mixture_is_named(corpora, mix, said):
    refusal(lambda: mixture(corpora, mix, 100), said)


def test_a_border_may_move_where_nothing_is_read_yet(corpora):
    mixed = mixture(corpora, PHASED, 1000)  # with borders at 250 and 700
    allowed = [([250, 700], 900), ([250, 800], 700), ([300, 900], 250), ([250, 600], 600), ([], 0)]
    for borders, n in allowed:
        mixed.check_borders(borders, n)
    for moved in (([240, 700], 900), ([250, 800], 701), ([300, 900], 251), ([200, 700], 230)):
        refusal(lambda: mixed.check_borders(*moved), "give the same --training_steps")


def test_a_run_of_phases_resumes_and_keeps_what_it_read(corpora, train, tmp_path, capsys):
    """8 sequences a step, so the border lies at sequence 24: after step 3."""
    flags = dict(data=corpora, mix="a:1 until 0.5, b:3,c:1", eval_steps=1, save_steps=2)
    flags = SMALL_GPT2 | flags | dict(blocks=1, vocab_size=250)
    folder = tmp_path / "runs" / "run"

    def rows():
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        named = ("loss/train_loss", "data/epoch_a", "data/epoch_b", "data/epoch_c")
        return [[json.loads(line)[name] for name in named] for line in lines]

    train(**flags, training_steps=6)
    whole = rows()
    said = capsys.readouterr().out
    not_verified = re.findall("warning: .*/(./[a-z]+) has no manifest.json", said)
    assert not_verified == ["a/train", "b/train", "c/train", "a/val", "b/val"]
    assert [round(200 * row[1]) for row in whole] == [8, 16, 24, 24, 24, 24]
    assert [round(70 * row[2]) for row in whole] == [0, 0, 0, 6, 12, 18]
    for step in ("4", "6"):
        shutil.rmtree(folder / "checkpoints" / step)
    train(**flags, training_steps=6)
    assert rows() == whole
    said = "change after [48] sequences now, but after [24] when the first"
    refusal(lambda: train(**flags, training_steps=12), said)


def test_corpora_must_share_a_tokenizer(corpora):
    describe(corpora / "a")
    describe(corpora / "b", **small_tokenizer(corpora / "b", 199))
    refusal(
        lambda: mixture(corpora, "a:1,b:1"), "--mix: ", "a/train, ", "b/train were made with diff"
    )


# --- Prefetch ---------------------------------------------------------------------------------------------------


def test_prefetch_makes_three_ahead_and_raises_in_turn():
    """It calls busy() and counts the time only where an item is not ready."""
    begun, go, busy = threading.Semaphore(0), threading.Event(), []

    def make(n):
        begun.release()
        assert n < 4 or go.wait(20)
        if n == 7:
            raise messages.UserError("shard gone")
        return n

    batches = dataset.Prefetch(make, range(9), busy=lambda: busy.append(begun))
    assert next(batches) == 0
    assert all(begun.acquire(timeout=20) for _ in range(4))  # of 0 to 3
    assert len(batches.ahead) == 3 and not begun.acquire(blocking=False)
    assert [item.result() for item in batches.ahead] == [1, 2, 3]
    before, waited = len(busy), batches.waited
    assert [next(batches) for _ in range(3)] == [1, 2, 3]
    assert (len(busy), batches.waited) == (before, waited)
    threading.Timer(0.1, go.set).start()
    assert next(batches) == 4
    assert len(busy) == before + 1 and 0.05 < batches.waited - waited < 20
    assert batches.error(2) is None and "shard gone" in str(batches.error(3))
    assert [next(batches), next(batches)] == [5, 6]
    with pytest.raises(messages.UserError, match="shard gone"):
        next(batches)
    assert list(batches) == [8]


def refused(folder, **flags):
    return refusal(lambda: Corpus(small_config(**flags), str(folder), "train"))


def test_bad_shards_are_named(tmp_path):
    assert "no shards" in refused(tmp_path)
    (tmp_path / "train").mkdir()
    path = tmp_path / "train" / "000000.npy"
    np.save(path, np.arange(200, dtype=np.uint16))
    assert Corpus(small_config(vocab_size=200), str(tmp_path), "train").n_sequences == 6
    assert "have no 513 tokens" in refused(tmp_path, T=512)
    assert f"{path} holds token id 199" in refused(tmp_path, vocab_size=199)
    path.write_bytes(path.read_bytes()[:-10])
    assert f"{path} is damaged" in refused(tmp_path)
    path.write_bytes(b"no array")
    assert "is no .npy file" in refused(tmp_path)
    np.save(path, np.zeros((3, 100), np.uint16))
    assert "one row" in refused(tmp_path)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_npy_is_read(tmp_path, version):
    """And what macOS puts beside a shard is none."""
    (tmp_path / "train").mkdir()
    ids = np.random.default_rng(0).integers(0, 200, 1000).astype(np.uint16)
    with open(tmp_path / "train/000000.npy", "wb") as file:
        np.lib.format.write_array(file, ids, version)
    (tmp_path / "train/._000000.npy").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X")
    corpus = Corpus(small_config(vocab_size=200), str(tmp_path), "train")
    rows = corpus.read(np.arange(corpus.n_sequences), np.arange(1))
    assert np.array_equal(rows[:, :-1].ravel(), ids[: rows[:, :-1].size])


@pytest.fixture
def published(tmp_path):
    """The same tokens as .npy files in npy/train and npy/val, and in bin/ as llm.c publishes shards."""
    for split, lengths in dict(train=[1000, 700], val=[900, 400]).items():
        (tmp_path / "npy" / split).mkdir(parents=True)
        for i, n in enumerate(lengths):
            ids = np.random.default_rng(n).integers(0, 250, n).astype(np.uint16)
            np.save(tmp_path / "npy" / split / f"{i:06d}.npy", ids)
            write_bin(tmp_path / "bin" / f"fineweb_{split}_{i:06d}.bin", ids)
    return tmp_path


def test_published_shards_are_the_same_sequences_as_npy(published):
    """Read as they are, from one folder for both splits; not its other files, nor the file that --data may name."""
    for name in ("._fineweb_train_000000.bin", "fineweb_train_old.bin", "train.bin", "notes.txt"):
        (published / "bin" / name).write_bytes(b"no shard")
    for split in ("train", "val"):
        read = []
        for kind in ("npy", "bin"):
            corpus = Corpus(small_config(vocab_size=250), str(published / kind), split)
            assert corpus.n_sequences == {"train": 52, "val": 40}[split]
            read.append(corpus.sequences(np.arange(100), seed=3))
        assert np.array_equal(*read)
    said = refused(published / "bin/fineweb_train_000001.bin")
    assert "NAME_train_000001.bin" in said and f"give {published}/bin with" in said
    (published / "bin/train").mkdir()
    np.save(published / "bin/train/000000.npy", np.arange(99, dtype=np.uint16))
    assert Corpus(small_config(), str(published / "bin"), "train").n_sequences == 3


def test_bad_published_shards_are_named(published):
    path = published / "bin/fineweb_train_000000.bin"
    content = path.read_bytes()
    for damaged, said in [
        (content[:-2], f"it has {len(content) - 2:,} bytes, and by its header {len(content):,}"),
        (
            content[1024:],
            f"it begins with {np.frombuffer(content[1024:], 'i4')[:2].tolist()} and not with",
        ),
        (content[:4] + b"\2" + content[5:], "it begins with [20240520, 2]"),
        (content[:8] + b"\xff" * 4 + content[12:], "it has 3,024 bytes, and by its header 1,022"),
        (content[:7], "it has 7 bytes, and by its header 1,024"),
        (b"", "it begins with [0, 0]"),
    ]:
        path.write_bytes(damaged)
        assert f"{path} is damaged ({said}" in (found := refused(published / "bin")), found


def test_validation_may_take_the_first_tokens_alone(published):
    """Whole sequences of them, over several shards, each once; training takes all."""
    ids = np.load(published / "npy/val/000000.npy"), np.load(published / "npy/val/000001.npy")
    in_order = [x[i : i + 33] for x in ids for i in range(0, len(x) - 32, 32)]
    for n_tokens, n in ((32, 1), (100, 3), (29 * 32, 29), (10**9, 40), (0, 40)):
        cfg = small_config(vocab_size=250, val_tokens=n_tokens)
        val = Corpus(cfg, str(published / "bin"), "val")
        rows = val.sequences(np.arange(val.n_sequences), seed=0)
        assert as_set(rows) == as_set(np.array(in_order[:n]))
        assert Corpus(cfg, str(published / "bin"), "train").n_sequences == 52
    refusal(lambda: small_config(val_tokens=31), "--val_tokens 31", "--T 32")


def test_hidden_files_are_not_beside_a_manifest(described):
    (described / "train/._000000.npy").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X")
    assert open_described(described).n_sequences


def test_other_layouts_are_told_what_is_expected(tmp_path, monkeypatch):
    """Shards in the root, as of edu_fineweb10B, the shard itself, one split of them, and nanoGPT's .bin."""
    monkeypatch.chdir(tmp_path)
    for name in ("root/edufineweb_val_000000.npy", "whole/train/000000.npy"):
        (tmp_path / name).parent.mkdir(parents=True)
        np.save(tmp_path / name, np.arange(99, dtype=np.uint16))
    (tmp_path / "openwebtext").mkdir()
    for name in ("train.bin", "val.bin", "meta.pkl"):
        (tmp_path / "openwebtext" / name).write_bytes(bytes(99))
    for data, *words in [
        ("root", "move the .npy files in root to root/train and root/val"),
        ("root/edufineweb_val_000000.npy", "move the .npy files in root to root/train and"),
        ("whole/train", "give the folder above, whole"),
        ("openwebtext", "openwebtext/train and openwebtext/val", "fromfile(BIN, 'uint16')"),
        ("openwebtext/train.bin", "openwebtext/train and openwebtext/val", "fromfile("),
    ]:
        said = refused(data)
        assert "no shards" in said and "run.sh" not in said and all(w in said for w in words), said
    assert "data/prepare.py" in refused("openwebtext/train.bin/none")


@pytest.mark.parametrize("address", ["{}", "memory://layouts"])
def test_a_path_that_exists_is_no_glob(tmp_path, address):
    """Of --data and of the folders that --mix names in it."""
    place, fs = fsspec.core.url_to_fs(address.format(tmp_path))[::-1]
    for name, token in {"a[1]": 1, "a1": 2}.items():
        file = io.BytesIO()
        np.save(file, np.full(99, token, np.uint16))
        fs.makedirs(f"{place}/{name}/train", exist_ok=True)
        fs.pipe_file(f"{place}/{name}/train/0.npy", file.getvalue())
    data = address.format(tmp_path)
    flags = dict(cache_dir=str(tmp_path / "cache"), vocab_size=9)
    for mixed in (dict(data=f"{data}/a[1]"), dict(data=data, mix="a[1]:1")):
        mixture = Mixture(small_config(**flags, **mixed), "train")
        assert set(mixture.corpora[0].sequences(np.arange(2), 0).ravel()) == {1}
    assert "such as" in refused(data) or "memory" in address
    assert "a[1]" not in remedy(f"{tmp_path}/a[0-9]/train")


# --- Manifests --------------------------------------------------------------------------------------------------


@pytest.fixture
def described(tmp_path, monkeypatch):
    """Three shards of several blocks, with their manifest and tokenizer, in a folder of its own."""
    monkeypatch.setattr(storage, "BLOCK", 512)
    (tmp_path / "a" / "train").mkdir(parents=True)
    for i, n in enumerate((1001, 1001, 700)):
        ids = np.random.default_rng(i).integers(0, 200, n).astype(np.uint16)
        np.save(tmp_path / "a" / "train" / f"{i:06d}.npy", ids)
    return describe(tmp_path / "a")


def open_described(folder, **flags):
    return Mixture(small_config(data=str(folder), **flags), "train")


def encoding_of(mixed):
    """The tokenizer that a mixture names, checked against its shards."""
    encoding = tokenization.load_tokenizer(mixed.tokenizer)
    mixed.check_encoding(encoding)
    return encoding


def test_an_edited_manifest_is_refused(described):
    path = described / "train" / "manifest.json"
    made = json.loads(path.read_text())
    for key in made:
        for others in (made | {key: "x"}, {k: v for k, v in made.items() if k != key}):
            path.write_text(json.dumps(others))
            assert f"{path}: manifest_sha256 does not match" in refused(described)
    path.write_text(json.dumps(dict(reversed(made.items()))))  # laid out otherwise, it is the same
    assert open_described(described).n_sequences


def test_files_and_manifest_agree(described):
    train, said = described / "train", partial(refused, described)
    content = (train / "000001.npy").read_bytes()
    (train / "000001.npy").unlink()
    assert "train/000001.npy is missing" in said()
    for other in (content[:-2], content + b"\0\0", b""):
        (train / "000001.npy").write_bytes(other)
        assert f"000001.npy is damaged (it has {len(other):,} bytes" in said()
    (train / "000001.npy").write_bytes(content)
    for name in ("000003.npy", "other.npy"):
        (train / name).write_bytes(content)
        assert f"{train}/{name} lies beside {train}/manifest.json" in said()
        (train / name).unlink()
    path = train / manifest.NAME
    path.write_text(manifest.dump(json.loads(path.read_text()) | {"dtype": "uint32"}))
    assert f"(it has {len(content):,} bytes; {path} says {128 + 4 * 1001:,})" in said()
    describe(described)
    (train / "notes.txt").write_text("no shard")
    assert open_described(described).n_sequences


def with_ranks(folder, swap=()):
    """Write the ranks of all bytes, two of them swapped; what a manifest says of them."""
    ranks = BYTE_RANKS | {b"ab": 256, b"cd": 257}
    if swap:
        one, other = swap
        ranks[one], ranks[other] = ranks[other], ranks[one]
    path = folder / "tokenizer.tiktoken"
    path.write_bytes(tokenization.dump_ranks(ranks))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"tokenizer": path.name, "tokenizer_sha256": sha256, "vocab_size": 259}


@pytest.mark.parametrize("kind", ["ranks", "json", "flag"])
def test_a_tokenizers_content_is_compared_with_the_manifest(described, tmp_path, kind):
    """Of the file beside the shards, or of --tokenizer, whatever its name."""
    flags = dict(vocab_size=259)
    assert "--vocab_size 199" in refused(described, vocab_size=199)
    if kind != "json":
        describe(described, **with_ranks(described))
    if kind == "flag":
        flags["tokenizer"] = str(tmp_path / "tokenizer.tiktoken")
        with_ranks(tmp_path)
    assert encoding_of(open_described(described, **flags)).n_vocab == 200 + 59 * (kind != "json")
    if kind == "json":
        path = described / "tokenizer.json"
        path.write_text(path.read_text().replace("<7>", "<x>"))
    else:
        with_ranks(described if kind == "ranks" else tmp_path, (b"ab", b"cd"))
    said = f"is not the tokenizer that made the shards in {described}/train (tokenizer_sha256"
    refusal(lambda: encoding_of(open_described(described, **flags)), said)


def test_the_end_of_text_is_compared_with_the_manifest(corpora):
    """Of corpora that are mixed, and of the tokenizer: two manifests may have the same hash of ranks, or of a
    tokenizer.json beside which another eos_token is named."""
    made = with_ranks(corpora) | {"tokenizer": "small"}
    for name in "ab":
        describe(corpora / name, **made)
    flags = dict(mix="a:1,b:1", vocab_size=259, tokenizer=str(corpora / "tokenizer.tiktoken"))
    assert encoding_of(open_described(corpora, **flags)).eot_token == 258
    describe(corpora / "b", **made, end_of_text=258)
    assert encoding_of(open_described(corpora, **flags))
    for other in (dict(end_of_text=257), dict(tokenizer="x.tiktoken", vocab_size=258)):
        describe(corpora / "b", **made | other)
        said = "b/train (their documents begin with token 257, its end of text is 258)"
        refusal(lambda: encoding_of(open_described(corpora, **flags)), said)
        describe(corpora / "a", **made, end_of_text=258)
        refusal(lambda: open_described(corpora, **flags), "made with different tokenizers")
        describe(corpora / "a", **made)


@pytest.mark.parametrize(
    "lines", [[b"YQ== 0", b"Yg== 0"], [b"YQ== -1"], [b"YQ== 99999999999999999999"], []]
)
def test_ranks_that_tiktoken_would_panic_at_are_refused(tmp_path, lines):
    path = tmp_path / "x.tiktoken"
    path.write_bytes(b"\n".join(lines))
    said = f"--tokenizer {path}: not a file of tiktoken ranks"
    refusal(lambda: tokenization.load_tokenizer(str(path)), said)


def test_permute_puts_every_index_everywhere_alike():
    """Counts over 2,000 keys of where each index of a small size lies, and of where two of them lie together."""
    keys = 2000
    for size in (2, 3, 5, 8, 17, 32, 33):
        drawn = [permute(np.arange(size), size, [5, key]) for key in range(keys)]
        places, pairs = np.zeros((2, size, size))
        for permuted in drawn:
            places[np.arange(size), permuted] += 1
            pairs[permuted[0], permuted[1]] += 1
        pairs = pairs[~np.eye(size, dtype=bool)]
        for counts, free in ((places, (size - 1) ** 2), (pairs, pairs.size - 1)):
            chi_square = ((counts - counts.mean()) ** 2).sum() / counts.mean()
            # its mean and its deviation
            assert chi_square < free + 4 * (2 * free) ** 0.5, (size, chi_square, free)


def test_permute_is_a_permutation_that_depends_on_its_key():
    for size in (1, 2, 3, 7, 64, 1000, 4097):
        a, b = (permute(np.arange(size), size, [5, key]) for key in (0, 1))
        assert sorted(a) == list(range(size)) == sorted(b)
        assert size < 7 or not np.array_equal(a, b)
    one_by_one = [int(permute(np.array([i]), 1000, [5, 0])[0]) for i in range(50)]
    assert one_by_one == permute(np.arange(50), 1000, [5, 0]).tolist()
    assert one_by_one[:6] == [963, 683, 680, 129, 462, 123], "the order of every run's data changes"


def test_validation_has_the_tokenizer_of_training(corpora, train):
    """A split whose manifest names another tokenizer than the other's."""
    describe(corpora / "a")
    path = corpora / "a" / "val" / "manifest.json"
    path.write_text(manifest.dump(json.loads(path.read_text()) | {"tokenizer_sha256": "0" * 64}))
    said = f"made the shards in {corpora}/a/val "
    refusal(lambda: train(data=corpora / "a", training_steps=1), said)
