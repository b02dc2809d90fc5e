"""The programs that use a trained model: what they print is what a plain loop over the model says."""

import base64
import json
import math
import os
import shutil
import subprocess
import sys
from collections import deque

import jax
import numpy as np
import pytest
import tokenizers
from conftest import ROOT, SMALL_GPT2, describe, small_config

import dataset
import main
import presets
import utils
from data import tokenization
from dataset import Corpus
from inference import decoding, weights
from inference.scores import mean
from runtime import messages
from tools import common, evaluate, hf, sample
from training import checkpointing, settings, steps
from training.optimizer import make_optimizer

MESH = dict(n_device_axis=(2, 2, 2), n_devices=8)
PROMPTS = ("a", "", "several words, é", "12")


def make_run(folder, **flags):
    """(a run directory with a model of bytes, as if training had ended there; its Config, mesh and parameters)."""
    ranks = folder / "bytes.tiktoken"
    ranks.write_bytes(b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256)))
    flags = (
        dict(blocks=2, layers_per_block=2, model_dtype="float32", val_batch_size=8, eval_steps=2)
        | flags
    )
    cfg = small_config(vocab_size=257, sequences=8, **flags)
    mesh = steps.make_mesh(cfg)
    optimizer, _ = make_optimizer(cfg, mesh)
    state = steps.init_state(cfg, steps.abstract_state(cfg, mesh, optimizer), optimizer)
    state = state._replace(
        params=jax.tree.map(lambda x: 3 * x, state.params)
    )  # far from uniform logits
    checkpoints = checkpointing.Checkpoints(str(folder / "run" / "checkpoints"))
    checkpoints.save(1, state, 0, {})
    checkpoints.close()
    config = utils.flatten(cfg) | {
        "encoding": tokenization.keep_tokenizer(str(folder / "run"), str(ranks))
    }
    (folder / "run" / "config.json").write_text(json.dumps(config))
    return folder / "run", cfg, mesh, state.params


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def logits_of(run):
    """`logits_of(ids [B, n])` -> [B, n, V]: all of the logits, one position at a time and without a cache."""
    _, cfg, mesh, params = run
    decode, cache, rows = (
        decoding.make_decode(cfg, mesh),
        decoding.empty_cache(cfg, 16, 40),
        np.zeros(16, np.int32),
    )
    every = jax.jit(
        lambda ids: jax.lax.map(
            lambda i: decode(params, ids, cache, rows, rows + i)[0], np.arange(40)
        )
    )

    def logits_of(ids):
        logits = every(np.pad(ids, ((0, 16 - len(ids)), (0, 40 - ids.shape[1]))).astype(np.int32))
        return np.asarray(logits, np.float64).swapaxes(0, 1)[: len(ids), : ids.shape[1], :257]

    return logits_of


@pytest.fixture(scope="module")
def losses_of(logits_of):
    """`losses_of(rows)`: -log p [n] of all tokens but the first of each of up to 16 lists of token ids [n + 1]."""

    def losses_of(rows):
        longest = max(map(len, rows))
        logits = logits_of(np.array([[*row, *[0] * (longest - len(row))] for row in rows]))
        norm = np.log(np.exp(logits).sum(-1))
        return [
            norm[i, : len(row) - 1] - logits[i, range(len(row) - 1), row[1:]]
            for i, row in enumerate(rows)
        ]

    return losses_of


def continued(run, prompts=PROMPTS, **options):
    options = {
        "temperature": 0.0,
        "max_tokens": 10,
        "compilation_cache": "",
        "n_devices": 1,
        **options,
    }
    return sample.main(common.Sample(model=str(run[0]), prompt=prompts, **options))


def measured(run, **options):
    return evaluate.main(
        common.Evaluate(model=str(run[0]), **{"compilation_cache": "", "n_devices": 1, **options})
    )


# --- sample.py --------------------------------------------------------------------------------------------------


def test_every_prompt_of_a_batch_goes_on_as_a_plain_loop_says_on_every_mesh(run, logits_of, capsys):
    rows = continued(run)
    out, err = capsys.readouterr()
    assert out == "".join(
        f"--- {i}\n{p}{row.text}\n" for i, (p, row) in enumerate(zip(PROMPTS, rows))
    )
    assert (
        "prefill: 24 tokens" in err
        and f"decode: {sum(len(row.tokens) for row in rows)} tokens" in err
    )
    for prompt, row in zip(PROMPTS, rows):
        ids = [256, *prompt.encode()]
        while (
            len(ids) < 11 + len(prompt.encode())
            and (token := logits_of(np.array([ids]))[0, -1].argmax()) != 256
        ):
            ids.append(int(token))
        assert row.tokens == ids[1 + len(prompt.encode()) :] and row.done
    assert [row.tokens for row in continued(run, **MESH)] == [row.tokens for row in rows]
    assert continued(run, PROMPTS[2:3])[0].tokens == rows[2].tokens
    assert [row.tokens for row in continued(run, top_k=1, temperature=1.0)] == [
        row.tokens for row in rows
    ]


def test_a_special_token_in_a_prompt_is_text_and_a_drawn_one_ends_the_row(run):
    encoding = tokenization.folder_tokenizer(str(run[0]))
    row = sample.Row(
        encoding,
        [256, *encoding.encode_ordinary(tokenization.END_OF_TEXT)],
        common.Sample(model="", max_tokens=4),
    )
    row.add([97, 98, 256, 99])
    assert row.unseen == tokenization.END_OF_TEXT + "ab" and row.text == "ab" and row.done


@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 100])
@pytest.mark.parametrize(
    "stop, wanted",
    [
        ((), "naïf 🙂 STO STOP 語\ufffd"),
        (("STOP", "é!"), "naïf 🙂 STO "),
        (("OP", "ST"), "naïf 🙂 "),
        (("n",), ""),
    ],
)
def test_streaming_tears_no_character_and_shows_nothing_of_a_stop_string(
    run, chunk, stop, wanted, capsys
):
    tokens, shown = list("naïf 🙂 STO STOP 語\ufffd".encode()), ""
    options = common.Sample(model="", stop=stop, max_tokens=len(tokens))
    row = sample.Row(tokenization.folder_tokenizer(str(run[0])), [256, 62], options, 1, "# ")
    for i in range(0, len(tokens), chunk):
        row.add(tokens[i : i + chunk])
        sample.show(deque([row]))
        shown += capsys.readouterr().out.removesuffix("\n")
        assert ("# >" + wanted).startswith(shown)
        if row.done:
            break
    assert row.done and shown == "# >" + wanted and row.text == wanted


# --- evaluate.py ------------------------------------------------------------------------------------------------


def test_shards_measure_as_main_validates_and_as_a_plain_loop_says(run, shards, losses_of):
    _, cfg, mesh, params = run
    cfg = utils.replace(cfg, data=str(shards))
    corpus = Corpus(cfg, cfg.data.data, "val")
    (got,) = measured(run, data=(str(shards),), limit=16, batch_size=3)["data"]
    wanted = steps.make_evaluate(cfg, mesh, corpus)(params)["loss/val_cross_entropy_loss"]
    assert (
        abs(got["loss"] - wanted) < 1e-5
        and got["tokens"] == 16 * 32
        and got["bits_per_byte"] is None
    )
    each = np.array([row.mean() for row in losses_of(corpus.sequences(range(16), seed=0).tolist())])
    assert abs(got["loss"] - each.mean()) < 1e-5
    assert abs(got["loss_error"] - each.std(ddof=1) / 4) < 1e-5
    for path, mesh in [(shards / "val", MESH), (shards / "val" / "000000.npy", {})]:
        (other,) = measured(run, data=(str(path),), limit=16, **mesh)["data"]
        assert all(
            abs(other[key] / got[key] - 1) < 1e-5 for key in ("loss", "loss_error", "perplexity")
        )


def test_a_shard_is_measured_alone(run, shards, tmp_path):
    """Whatever lies beside it: the same as in a folder of its own."""
    folder = tmp_path / "several"
    shutil.copytree(shards / "train", folder)
    (folder / "000000.npy").write_bytes(b"damaged")
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "000001.npy", alone)
    one, all_of_one = measured(run, data=(str(folder / "000001.npy"), str(alone)))["data"]
    assert one["tokens"] == 7000 // 32 * 32 and one | dict(data="") == all_of_one | dict(data="")
    with pytest.raises(messages.UserError, match="--data .*000009.npy: there is no such file"):
        measured(run, data=(str(folder / "000009.npy"),))


@pytest.mark.parametrize("stride", [0, 8])
def test_text_measures_as_a_plain_loop_says(run, losses_of, tmp_path, stride):
    texts = ["short", "é" * 30, "x" * 32, "the end " * 12]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"body": text}) + "\n" for text in ["", *texts])
    )
    (got,) = measured(run, data=(str(tmp_path / "a.jsonl"),), text_column="body", stride=stride)[
        "data"
    ]
    sums, sizes = [], [len(text.encode()) for text in texts]
    for text in texts:
        ids, rows, firsts, done = [256, *text.encode()], [], [], 0
        while (
            done < len(ids) - 1
        ):  # windows of 32 targets, each of which goes on `stride` beyond the one before
            start = max(0, done + stride - 32) if stride and done else done
            rows, firsts = [*rows, ids[start : start + 33]], [*firsts, done - start]
            done = start + len(rows[-1]) - 1
        sums.append(sum(losses[first:].sum() for losses, first in zip(losses_of(rows), firsts)))
    loss, clusters = sum(sums) / sum(sizes), len(texts)
    assert (
        got["tokens"] == sum(sizes)
        and got["clusters"] == clusters
        and abs(got["loss"] - loss) < 1e-5
    )
    residuals = sum((s - loss * n) ** 2 for s, n in zip(sums, sizes))
    assert (
        abs(got["loss_error"] - math.sqrt(clusters / (clusters - 1) * residuals) / sum(sizes))
        < 1e-5
    )
    assert abs(got["bits_per_byte"] - got["loss"] * got["tokens"] / math.log(2) / sum(sizes)) < 1e-9
    (tmp_path / "b.txt").write_text(texts[1])
    (got,) = measured(run, data=(str(tmp_path / "b.txt"),), limit=1)["data"]
    assert got["tokens"] == 32 and got["sequences"] == 1 and got["loss_error"] is None


def test_a_text_of_any_length_is_read(run):
    text = "a" + 1_200_000 * " " + "b"  # on which tiktoken's own encode_ordinary ends the program
    encoding = tokenization.folder_tokenizer(str(run[0]))
    assert evaluate.encode(text, encoding).tolist() == [256, *text.encode()]


def test_mean_of_clusters_of_one_size_is_the_plain_one():
    x = np.random.default_rng(0).normal(3, 1, 50)
    value, error = mean(7 * x, np.full(50, 7))
    assert np.isclose(value, x.mean()) and np.isclose(error, x.std(ddof=1) / math.sqrt(50))


# --- Shards of another tokenizer --------------------------------------------------------------------------------


def ranks_of_bytes(swap=()):
    """The ranks of all bytes, two of them swapped."""
    order = list(range(256))
    for a in swap:
        order[a], order[a + 1] = order[a + 1], order[a]
    return {bytes([b]): rank for rank, b in enumerate(order)}


def write_tokenizer(folder, ranks, ending):
    """Write the tokenizer of ranks into a folder as one of the kinds; returns its path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"tokenizer{ending}"
    in_ranks = folder / "tokenizer.tiktoken"
    in_ranks.write_bytes(tokenization.dump_ranks(ranks))
    if ending == ".json":
        made = hf.byte_level(tokenization.load_tokenizer(str(in_ranks)))
        made.add_special_tokens(["<pad>"])  # no text becomes it
        made.save(str(path))
        in_ranks.unlink()
    return path


def write_shards(folder, ranks, ending, name=None):
    """One shard in folder/train and folder/val, with the manifest that tokenize_shards.py would write."""
    encoding = tokenization.load_tokenizer(str(write_tokenizer(folder, ranks, ending)))
    made_with = dict(tokenizer=name or f"tokenizer{ending}", vocab_size=encoding.n_vocab)
    made_with["tokenizer_sha256"] = tokenization.content_sha256(encoding)
    for split in ("train", "val"):
        (folder / split).mkdir()
        np.save(folder / split / "000000.npy", np.arange(2000, dtype=np.uint16) % 257)
    return describe(folder, **made_with)


def check(weights_folder, shards):
    """What `check_tokenizer` warns of; raises its UserError."""
    cfg, said = utils.replace(utils.Config(), data=str(shards)), []
    made = dataset.manifests(cfg, "train", "val")
    weights.check_tokenizer("--init_from x", str(weights_folder), made, warn=said.append)
    return "\n".join(said)


KINDS = [".tiktoken", ".json"]


@pytest.mark.parametrize("of_shards", KINDS)
@pytest.mark.parametrize("of_weights", KINDS)
def test_a_tokenizer_is_known_by_its_tokens_whatever_file_holds_it(tmp_path, of_weights, of_shards):
    model = tmp_path / "model"
    name = write_tokenizer(model, ranks_of_bytes(), of_weights).name
    (model / "config.json").write_text(json.dumps(dict(encoding=name)))
    same = write_shards(tmp_path / "same", ranks_of_bytes(), of_shards)
    other = write_shards(tmp_path / "other", ranks_of_bytes(swap=[97]), of_shards)
    assert not check(model, same)
    with pytest.raises(
        messages.UserError, match="--init_from x: the shards in .*other/train .*another"
    ) as e:
        check(model, other)
    assert str(model / name) in str(e.value) and str(other / f"tokenizer{of_shards}") in str(
        e.value
    )
    (other / f"tokenizer{of_shards}").unlink()  # only the hash is left, of one kind of file
    if of_weights == of_shards == ".tiktoken":
        with pytest.raises(messages.UserError, match="another tokenizer"):
            check(model, other)
    else:
        assert "nothing tells whether the tokenizer" in check(model, other)
    (model / name).unlink()
    said = check(model, same)
    assert "nothing tells" in said and f"{same}/train, {same}/val" in said and "\n" not in said


def test_tokenizers_that_differ_in_merges_alone_are_others(tmp_path):
    ranks = ranks_of_bytes() | {b"ab": 256, b"bc": 257}
    model = tmp_path / "model"
    path = write_tokenizer(model, ranks, ".json")
    (model / "config.json").write_text(json.dumps(dict(encoding=path.name)))
    assert not check(model, write_shards(tmp_path / "same", ranks, ".tiktoken"))
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = [["b", "c"], ["a", "b"]]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(messages.UserError, match="another tokenizer"):
        check(model, tmp_path / "same")


def test_a_tokenizer_is_the_same_by_name_and_as_a_file(tmp_path, named_tokenizers):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(dict(encoding="gpt2")))
    gpt2 = tokenization.load_tokenizer("gpt2")._mergeable_ranks
    assert not check(model, write_shards(tmp_path / "same", gpt2, ".tiktoken"))
    assert not check(model, write_shards(tmp_path / "named", gpt2, ".tiktoken", "gpt2"))
    with pytest.raises(
        messages.UserError, match=r"another tokenizer \(.*\) than the weights \(gpt2\)"
    ):
        check(model, write_shards(tmp_path / "other", ranks_of_bytes(), ".json"))


def test_weights_are_refused_shards_of_another_tokenizer(tmp_path, capsys):
    """A run's and those of a Hugging Face folder, to train on and to be measured by."""
    gpt2, *_ = make_run(tmp_path, **SMALL_GPT2)
    hf.export(str(gpt2), str(tmp_path / "exported"))
    same = write_shards(tmp_path / "same", ranks_of_bytes(), ".tiktoken")
    other = write_shards(tmp_path / "other", ranks_of_bytes(swap=[97]), ".tiktoken")
    plain = tmp_path / "plain"
    shutil.copytree(same / "val", plain, ignore=lambda *_: ["manifest.json"])
    capsys.readouterr()
    for folder in (gpt2, tmp_path / "exported"):
        with pytest.raises(
            messages.UserError, match="--data .*other: the shards .*another tokenizer"
        ):
            measured([folder], data=(str(other),))
        (first, second) = measured([folder], data=(str(same), str(plain)), limit=3)["data"]
        assert first["loss"] == second["loss"]
        err = capsys.readouterr().err
        assert err.count("\n") == 2 and f"warning: --data {plain}: nothing tells" in err
        assert f"warning: {plain} has no manifest.json, so its shards are not verified" in err
        cfg = utils.replace(
            presets.preset("tiny"),
            init_from=str(folder),
            data=str(other),
            output_dir=str(tmp_path / "runs"),
            n_device_axis=(1, 1, 1),
            n_devices=1,
            compilation_cache="",
        )
        with pytest.raises(
            messages.UserError, match="--init_from .*: the shards .*another tokenizer"
        ):
            given = {"init_from", "data", "output_dir", "n_devices"}
            main.main(settings.Flags(cfg, frozenset(given)))


# --- Mistakes ---------------------------------------------------------------------------------------------------


def test_half_a_character_alone_is_replaced(tmp_path):
    halves = "a \ud83d b \ude42"
    assert tokenization.whole_characters(halves) == "a \ufffd b \ufffd"
    assert tokenization.whole_characters("é🙂\n") == "é🙂\n"
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({"a": 0, "\ufffd": 1, tokenization.END_OF_TEXT: 2}, [])
    )
    made.save(str(tmp_path / "tokenizer.json"))
    assert tokenization.load_tokenizer(str(tmp_path / "tokenizer.json")).encode_ordinary(
        halves
    ) == [0, 1, 1]


def test_mistakes_get_a_sentence(run, shards, tmp_path, byte_manifest):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text"\n')
    np.save(tmp_path / "far.npy", np.full(100, 300, np.uint16))
    for options, *parts in [
        (dict(), "--data", "--tasks"),
        (dict(data=("nowhere",)), "--data nowhere", "no such"),
        (dict(data=(str(tmp_path / "empty.txt"),)), "empty.txt", "no text"),
        (dict(data=(str(tmp_path / "broken.jsonl"),)), "--data", "line 2"),
        (dict(data=(str(tmp_path / "far.npy"),)), "far.npy", "300"),
        (dict(data=(str(byte_manifest),)), "another tokenizer"),
        (dict(data=(str(shards),), stride=33), "--stride 33"),
        (dict(data=(str(shards),), n_device_axis=(3, 1, 1), n_devices=3), "--n_experts 8"),
    ]:
        with pytest.raises(messages.UserError) as e:
            measured(run, **options)
        assert all(part in str(e.value) for part in parts) and "\n" not in str(e.value), e.value
    with pytest.raises(messages.UserError, match="nowhere: neither a run"):
        sample.main(common.Sample(model="nowhere"))
    with pytest.raises(messages.UserError, match="--stop"):
        continued(run, stop=("",))


@pytest.fixture
def byte_manifest(shards, tmp_path):
    """Shards whose manifest tells of another tokenizer than the bytes."""
    folder = tmp_path / "other" / "val"
    folder.mkdir(parents=True)
    (folder / "000000.npy").write_bytes((shards / "val" / "000000.npy").read_bytes())
    describe(folder.parent, tokenizer="gpt2", tokenizer_sha256="0" * 64, vocab_size=250)
    return folder


def test_gpt2_goes_no_further_than_its_positions_and_rotary_models_with_a_warning(
    run, shards, tmp_path, capsys
):
    gpt2 = make_run(tmp_path, **SMALL_GPT2)
    with pytest.raises(
        messages.UserError, match="--max_tokens 20: a prompt's 18 tokens .* 32 positions"
    ):
        continued(gpt2, max_tokens=20)
    with pytest.raises(messages.UserError, match="--max_tokens 20: .* more than the 16 of --T"):
        continued(gpt2, PROMPTS[:1], max_tokens=20, T=16)
    for program in (
        lambda: continued(gpt2, T=33),
        lambda: measured(gpt2, data=(str(shards),), T=33),
    ):
        with pytest.raises(messages.UserError, match="--T 33: .* has learned 32 positions"):
            program()
    assert continued(gpt2, PROMPTS, max_tokens=14)[2].done
    assert continued(gpt2, PROMPTS, max_tokens=None)[2].done, "the default refuses nothing"
    for T in (16, 13):
        assert (
            measured(gpt2, data=(str(shards),), limit=4, T=T, **MESH)["data"][0]["tokens"] == 4 * T
        )
    capsys.readouterr()
    assert continued(run, PROMPTS[2:3], max_tokens=20)[0].done
    assert "warning: --max_tokens 20" in capsys.readouterr().err
    assert continued(run, PROMPTS[2:3], max_tokens=20, T=40)[0].done
    assert capsys.readouterr().err.startswith(
        f"warning: --T 40: {run[0]} was made for 32 tokens\nprefill"
    )


def test_a_model_without_a_tokenizer_measures_shards_alone(run, shards, tmp_path):
    os.symlink(run[0] / "checkpoints", tmp_path / "checkpoints")
    (tmp_path / "config.json").write_text(
        (run[0] / "config.json").read_text().replace("tokenizer.tiktoken", "")
    )
    (got,) = measured([tmp_path], data=(str(shards),), limit=4)["data"]
    assert got["sequences"] == 4
    for program in (
        lambda: measured([tmp_path], data=(str(ROOT / "README.md"),)),
        lambda: continued([tmp_path]),
    ):
        with pytest.raises(messages.UserError, match="tokenizer"):
            program()


@pytest.mark.parametrize(
    "words, said",
    [
        (
            [
                "sample.py",
                "RUN",
                "--prompt",
                "a",
                "--max_tokens",
                "3",
                "--temperature",
                "0",
                "--stop",
                "\n",
            ],
            "decode: 3 tokens",
        ),
        (["evaluate.py", "RUN", "--data", "nowhere"], "error: --data nowhere"),
    ],
)
def test_the_programs_from_the_command_line(run, words, said):
    words = [str(run[0]) if word == "RUN" else word for word in words]
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / words[0], *words[1:]], capture_output=True, text=True
    )
    assert (
        said in done.stderr
        and done.returncode == 2 * done.stderr.startswith("error")
        and "Trace" not in done.stderr
    )
    assert done.stderr.count("\n") == 1


STARTED = [
    f"{folder}.{path.stem}"
    for folder in ("tools", "data")
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize("module", STARTED)
def test_every_program_can_be_started_as_a_module(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "usage" in done.stdout.lower() and not done.stderr
