"""The order of sequences: a pure function of shards, seed and number, whatever the mesh and however a batch is cut."""

import numpy as np
import pytest
from conftest import small_config

import dataset
import main
import utils


@pytest.fixture
def corpus(shards):
    return dataset.Corpus(small_config(bucket_name=str(shards)), "train")


def test_permute_is_a_permutation_that_depends_on_its_key():
    for size in (1, 2, 3, 7, 64, 1000, 4097):
        a, b = (dataset.permute(np.arange(size), size, [5, key]) for key in (0, 1))
        assert sorted(a) == list(range(size)) == sorted(b)
        assert size < 7 or not np.array_equal(a, b)
    one_by_one = [int(dataset.permute(np.array([i]), 1000, [5, 0])[0]) for i in range(50)]
    assert one_by_one == dataset.permute(np.arange(50), 1000, [5, 0]).tolist()


def in_order(corpus, places):
    return corpus.read(places, np.arange(len(corpus.names)))


def as_set(rows):
    return sorted(map(tuple, rows.tolist()))


@pytest.mark.parametrize("window", [1 << 20, 100])
def test_an_epoch_visits_every_sequence_once_and_the_next_in_another_order(corpus, monkeypatch, window):
    monkeypatch.setattr(dataset, "WINDOW", window)
    N = corpus.n_sequences
    assert N == sum((len(np.load(f"{corpus.folder}/{n}")) - 1) // 32 for n in corpus.names)
    order = dataset.Shuffled(corpus, seed=3)
    epochs = [order(np.arange(N) + e * N) for e in range(2)]
    in_place = in_order(corpus, np.arange(N))
    assert as_set(epochs[0]) == as_set(epochs[1]) == as_set(in_place)
    assert not np.array_equal(*epochs) and not np.array_equal(epochs[0], in_place)
    assert not np.array_equal(epochs[0], dataset.Shuffled(corpus, seed=4)(np.arange(N)))
    # any piece, asked for alone and across the epochs' border, is the same
    piece = np.arange(N - 7, N + 7)
    assert np.array_equal(order(piece), np.concatenate(epochs)[piece])


def test_sequences_overlap_by_their_target_alone(corpus):
    rows, shard = in_order(corpus, np.arange(3)), np.load(f"{corpus.folder}/{corpus.names[0]}")
    assert np.array_equal(rows[1], shard[32:65]) and rows.dtype == np.int32


@pytest.mark.parametrize("mesh_shape, grad_step", [((1, 1, 1), 1), ((1, 1, 1), 4), ((2, 2, 2), 1), ((4, 1, 2), 2)])
def test_batches_hold_the_same_integers_on_every_mesh(corpus, mesh_shape, grad_step):
    cfg = small_config(mesh_shape)
    mesh, order = main.make_mesh(cfg), dataset.Shuffled(corpus, 0)
    seen = []
    for first in (0, 32):
        shape = (grad_step, 4, 32 // grad_step // 4, 32)
        tokens, targets = dataset.put_batch(order, first, shape, mesh)
        seen.append((np.asarray(tokens).reshape(32, 32), np.asarray(targets).reshape(32, 32)))
    rows = order(np.arange(64)).reshape(2, 32, 33)
    for (tokens, targets), row in zip(seen, rows):
        assert np.array_equal(tokens, row[:, :-1]) and np.array_equal(targets, row[:, 1:])


def test_prefetch_keeps_order_and_raises_in_its_turn():
    def make(n):
        if n == 5:
            raise utils.UserError("shard gone")
        return n

    assert list(dataset.prefetch(make, range(5))) == list(range(5))
    seen = []
    with pytest.raises(utils.UserError, match="shard gone"):
        for n in dataset.prefetch(make, range(9)):
            seen.append(n)
    assert seen == list(range(5))


def refused(folder, **flags):
    with pytest.raises(utils.UserError) as e:
        dataset.Corpus(small_config(bucket_name=str(folder), **flags), "train")
    return str(e.value)


def test_bad_shards_are_named(tmp_path):
    assert "no shards" in refused(tmp_path)
    (tmp_path / "train").mkdir()
    path = tmp_path / "train" / "000000.npy"
    np.save(path, np.arange(200, dtype=np.uint16))
    assert "--T 512" in refused(tmp_path, T=512)
    assert "token id 199" in refused(tmp_path, vocab_size=199) and str(path) in refused(tmp_path, vocab_size=199)
    assert dataset.Corpus(small_config(bucket_name=str(tmp_path), vocab_size=200), "train").n_sequences == 6
    path.write_bytes(path.read_bytes()[:-10])
    assert "damaged" in refused(tmp_path) and str(path) in refused(tmp_path)
    path.write_bytes(b"no array")
    assert "is not a shard" in refused(tmp_path)
    np.save(path, np.zeros((3, 100), np.uint16))
    assert "one row" in refused(tmp_path)
    np.save(path, np.zeros(100, np.uint16))
    (tmp_path / "train" / "manifest.json").write_text('{"shards": [{"name": "000001.npy"}]}')
    assert "000001.npy is missing" in refused(tmp_path)


def test_the_tokenizer_must_fit(tmp_path):
    (tmp_path / "train").mkdir()
    np.save(tmp_path / "train" / "000000.npy", np.zeros(100, np.uint16))
    (tmp_path / "train" / "manifest.json").write_text('{"tokenizer": "gpt2", "vocab_size": 50257, "shards": []}')
    assert "--vocab_size 250" in refused(tmp_path) and "50257" in refused(tmp_path)
    assert "--tokenizer cl100k_base" in refused(tmp_path, vocab_size=50257, tokenizer="cl100k_base")


def test_remote_shards_give_the_same_sequences(shards, corpus, tmp_path):
    """Through fsspec's in-memory store, which stands for gs:// and s3://."""
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.put(str(shards / "train") + "/", "/bucket/train/", recursive=True)
    remote = dataset.Corpus(small_config(bucket_name="memory://bucket", process_path=str(tmp_path)), "train")
    everything = np.arange(corpus.n_sequences)
    assert np.array_equal(in_order(remote, everything), in_order(corpus, everything))
    assert sorted(p.name for p in tmp_path.rglob("*.npy")) == corpus.names
