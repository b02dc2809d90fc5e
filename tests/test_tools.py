"""The programs that use a trained model: what they print is what a plain loop over the model says."""

import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter, deque

import jax
import numpy as np
import pytest
from families import SMALL_GPT2
from helpers import (
    BYTE_RANKS,
    DRAWN,
    ROOT,
    describe,
    make_run,
    refusal,
    run_with_special_tokens,
    without_pulse,
)

import main
import train as training_program
import utils
from config import presets
from config.flags import Flags
from inference import decoding, weights
from runtime import messages
from shards import tokenization
from shards.corpus import Corpus
from tools import common, evaluate, hf, sample
from training.evaluation import make_evaluate

MESH = dict(n_device_axis=(2, 2, 2), n_devices=8)
PROMPTS = ("a", "", "several words, é", "12")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def logits_of(run):
    """`logits_of(ids [B, n])` -> [B, n, V]: all of the logits, one position at a time and without a cache."""
    _, cfg, mesh, params = run
    decode, cache = decoding.make_decode(cfg, mesh), decoding.empty_cache(cfg, 16, 40)
    rows = np.zeros(16, np.int32)

    @jax.jit
    def every(ids):
        def at(i):
            return decode(params, ids, cache, rows, rows + i)[0]

        return jax.lax.map(at, np.arange(40))

    def logits_of(ids):
        logits = every(np.pad(ids, ((0, 16 - len(ids)), (0, 40 - ids.shape[1]))).astype(np.int32))
        return np.asarray(logits, np.float64).swapaxes(0, 1)[: len(ids), : ids.shape[1], :257]

    return logits_of


def losses_of(logits_of, rows):
    """-log p [n] of all tokens but the first of each of up to 16 lists of token ids [n + 1]."""
    logits = logits_of(decoding.pad(rows, max(map(len, rows)))[0])
    norm = np.log(np.exp(logits).sum(-1))
    each = enumerate(row[1:] for row in rows)
    return [norm[i, : len(row)] - logits[i, range(len(row)), row] for i, row in each]


ONE = dict(compilation_cache="", n_devices=1)


def continued(run, prompts=PROMPTS, **options):
    greedy = dict(temperature=0.0, max_tokens=10)
    return sample.main(common.Sample(model=str(run[0]), prompt=prompts, **ONE | greedy | options))


def measured(run, **options):
    return evaluate.main(common.Evaluate(model=str(run[0]), **ONE | options))


def test_a_prompt_longer_than_the_model_is_refused_before_memory_is_asked_for(run, monkeypatch):
    monkeypatch.setattr(decoding, "make_stream", None)
    for text in ("a" * 10**6, " " * 1_000_500, "a" * 33):
        refusal(lambda: continued(run, (text,)), "tokens or more, beyond the 32 that", "--T ")
        refusal(lambda: continued(run, (text,), T=31), "beyond the 31 of --T; give a shorter one")


def test_devices_that_lack_memory_are_a_sentence():
    def lacks(words):
        with common.memory_explained("give less"):
            raise jax.errors.JaxRuntimeError(words)

    said = "the devices lack memory (RESOURCE_EXHAUSTED: Out of memory"
    refusal(
        lambda: lacks("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), said, "give less"
    )
    with pytest.raises(jax.errors.JaxRuntimeError):
        lacks("INTERNAL: x")


def test_typed_lines_continue_as_prompts_do(run, capsys, monkeypatch):
    lines = [prompt for prompt in PROMPTS if prompt]
    rows = [continued(run, prompts=(line,))[0].text for line in lines]
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n".join(lines)))
    assert continued(run, prompts=()) is None
    out, err = capsys.readouterr()
    assert out == "".join(f"{p}{text}\n" for p, text in zip(lines, rows))
    assert "Ctrl-D" in err


def test_typed_bytes_that_are_no_text_are_refused_and_the_next_line_is_read(
    run, capsys, monkeypatch
):
    typed = io.TextIOWrapper(io.BytesIO(b"a\xff\nb\n"), "utf-8")
    monkeypatch.setattr("sys.stdin", typed)
    messages.open_streams()
    assert continued(run, prompts=()) is None
    out, err = capsys.readouterr()
    assert out.startswith("b") and out.count("\n") == 1
    assert "error: the prompt 'a\\udcff' holds bytes that are no text" in err
    refusal(lambda: continued(run, prompts=("a", "\udcff")), "the prompt '\\udcff' holds bytes")


def test_a_batch_of_prompts_continues_as_a_plain_loop_says_on_every_mesh(run, logits_of, capsys):
    rows = continued(run)
    out, err = capsys.readouterr()
    shown = [f"--- {i}\n{p}{row.text}\n" for i, (p, row) in enumerate(zip(PROMPTS, rows))]
    assert out == "".join(shown)
    assert "prefill: 24 tokens" in err
    assert f"decode: {sum(len(row.tokens) for row in rows)} tokens" in err
    for prompt, row in zip(PROMPTS, rows):
        ids, n = [256, *prompt.encode()], 1 + len(prompt.encode())
        while len(ids) < n + 10:
            token = int(logits_of(np.array([ids]))[0, -1].argmax())
            if token == 256:
                break
            ids.append(token)
        assert row.tokens == ids[n:] and row.done
    assert [row.tokens for row in continued(run, **MESH)] == [row.tokens for row in rows]
    assert continued(run, PROMPTS[2:3], top_k=1, temperature=1.0)[0].tokens == rows[2].tokens


def test_a_special_token_in_a_prompt_is_text_and_a_drawn_one_ends_the_row(run):
    encoding = tokenization.folder_tokenizer(str(run[0]))
    prompt = [256, *encoding.encode_ordinary(tokenization.END_OF_TEXT)]
    row = sample.Row(encoding, prompt, common.Sample(model="", max_tokens=4))
    row.add([97, 98, 256, 99])
    assert row.unseen == tokenization.END_OF_TEXT + "ab" and row.text == "ab" and row.done


def test_special_tokens_that_are_drawn_are_not_shown(tmp_path, capsys):
    run = run_with_special_tokens(tmp_path)
    (row,) = continued([run], ("a",))
    assert row.tokens == DRAWN[:-1] and row.text == "béc" and row.stopped
    assert capsys.readouterr().out == "abéc\n"
    assert continued([run], ("a",), stop=("é",))[0].text == "b"


TEXT = "naïf 🙂 STO STOP 語\ufffd"
STOPS = {(): TEXT, ("STOP", "é!"): "naïf 🙂 STO ", ("OP", "ST"): "naïf 🙂 ", ("n",): ""}


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("stop, wanted", STOPS.items())
def test_streaming_tears_no_character_and_shows_nothing_of_a_stop_string(
    run, chunk, stop, wanted, capsys
):
    tokens, shown = list(TEXT.encode()), ""
    options = common.Sample(model="", stop=stop, max_tokens=len(tokens))
    row = sample.Row(tokenization.folder_tokenizer(str(run[0])), [256, 62], options, 1, "# ")
    for i in range(0, len(tokens), chunk):
        row.add(tokens[i : i + chunk])
        sample.print_unseen(deque([row]))
        shown += capsys.readouterr().out.removesuffix("\n")
        assert ("# >" + wanted).startswith(shown)
    assert row.done and shown == "# >" + wanted and row.text == wanted


def test_shards_measure_as_main_validates_and_as_a_plain_loop_says(run, shards, logits_of):
    _, cfg, mesh, params = run
    cfg = utils.replace(cfg, data=str(shards))
    corpus = Corpus(cfg, cfg.data.data, "val")
    (got,) = measured(run, data=(str(shards),), limit=16, batch_size=3)["data"]
    wanted = make_evaluate(cfg, mesh, corpus)(params)["loss/val_cross_entropy_loss"]
    assert abs(got["loss"] - wanted) < 1e-5
    assert got["tokens"] == 16 * 32 and got["bits_per_byte"] is None
    rows = corpus.sequences(range(16), seed=0).tolist()
    each = np.array([row.mean() for row in losses_of(logits_of, rows)])
    assert abs(got["loss"] - each.mean()) < 1e-5
    assert abs(got["loss_error"] - each.std(ddof=1) / 4) < 1e-5
    (other,) = measured(run, data=(str(shards / "val"),), limit=16, **MESH)["data"]
    for key in ("loss", "loss_error", "perplexity"):
        assert abs(other[key] / got[key] - 1) < 1e-5


@pytest.mark.parametrize("stride", [0, 8])
def test_text_measures_as_a_plain_loop_says(run, logits_of, tmp_path, stride):
    texts = ["short", "é" * 30, "x" * 32, "the end " * 12]
    records = [json.dumps({"body": text}) for text in ["", *texts]]
    (tmp_path / "a.jsonl").write_text("\n".join(records))
    path = str(tmp_path / "a.jsonl")
    (got,) = measured(run, data=(path,), text_column="body", stride=stride)["data"]
    sums, sizes = [], [len(text.encode()) for text in texts]
    for text in texts:
        ids, rows, firsts, done = [256, *text.encode()], [], [], 0
        while done < len(ids) - 1:  # windows of 32 targets, each `stride` beyond the one before
            start = max(0, done + stride - 32) if stride and done else done
            rows.append(ids[start : start + 33])
            firsts.append(done - start)
            done = start + len(rows[-1]) - 1
        losses = zip(losses_of(logits_of, rows), firsts)
        sums.append(sum(row[first:].sum() for row, first in losses))
    loss, n = sum(sums) / sum(sizes), len(texts)
    assert (got["tokens"], got["clusters"]) == (sum(sizes), n) and abs(got["loss"] - loss) < 1e-5
    residuals = sum((s - loss * size) ** 2 for s, size in zip(sums, sizes))
    error = math.sqrt(n / (n - 1) * residuals) / sum(sizes)
    assert abs(got["loss_error"] - error) < 1e-5
    assert abs(got["bits_per_byte"] - got["loss"] * got["tokens"] / math.log(2) / sum(sizes)) < 1e-9
    (tmp_path / "b.txt").write_text(texts[1])
    (got,) = measured(run, data=(str(tmp_path / "b.txt"),), limit=1)["data"]
    assert got["tokens"] == 32 and got["sequences"] == 1 and got["loss_error"] is None


def test_text_that_a_tokenizer_loses_has_no_bits_per_byte(
    run, shards, tmp_path, monkeypatch, capsys
):
    (tmp_path / "a.txt").write_text("some text")
    for lost, wanted in ((1, True), (2, False)):
        counts = dict(sampled_characters=100, lost_characters=lost)
        monkeypatch.setattr(evaluate, "count_lost", lambda *_: Counter(counts))
        (got,) = measured(run, data=(str(tmp_path / "a.txt"),))["data"]
        said = f"warning: --data {tmp_path}/a.txt: the tokenizer loses 2.0% of its text"
        assert (got["bits_per_byte"] is not None) == wanted == (said not in capsys.readouterr().err)
    folder = tmp_path / "shards"
    shutil.copytree(shards, folder)
    describe(folder, tokenizer="tokenizer.tiktoken", tokenizer_sha256="", vocab_size=257, **counts)
    (got,) = measured(run, data=(str(folder),), limit=4)["data"]
    assert got["bits_per_byte"] is None and "loses 2.0% of its text" in capsys.readouterr().err


def write_model(folder, ranks, ending):
    """Write a model's folder with the tokenizer of ranks as one kind of file, whose path is returned."""
    folder.mkdir(exist_ok=True)
    path = folder / "tokenizer.tiktoken"
    path.write_bytes(tokenization.dump_ranks(ranks))
    if ending == ".json":
        made = hf.byte_level(tokenization.load_tokenizer(str(path)))
        made.add_special_tokens(["<pad>"])  # no text becomes it
        path.unlink()
        path = folder / "tokenizer.json"
        made.save(str(path))
    (folder / "config.json").write_text(json.dumps(dict(encoding=path.name)))
    return path


def shards_of(folder, ranks, ending, name=None):
    """What `listing.manifests` would say of shards that the tokenizer of ranks made."""
    path = write_model(folder, ranks, ending)
    sha256 = tokenization.content_sha256(tokenization.load_tokenizer(str(path)))
    manifest = dict(tokenizer=name or path.name, tokenizer_sha256=sha256)
    return [(str(folder), f"{folder}/train", manifest)]


def check(model, shards):
    """What `check_tokenizer` warns of; raises its UserError."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        weights.check_tokenizer("--init_from x", str(model), shards)
    return said.getvalue()


@pytest.mark.parametrize("of_shards", [".tiktoken", ".json"])
@pytest.mark.parametrize("of_weights", [".tiktoken", ".json"])
def test_a_tokenizer_is_known_by_its_tokens_whatever_file_holds_it(tmp_path, of_weights, of_shards):
    path = write_model(tmp_path / "model", BYTE_RANKS, of_weights)
    assert not check(path.parent, shards_of(tmp_path / "same", BYTE_RANKS, of_shards))
    other = shards_of(tmp_path / "other", BYTE_RANKS | {b"a": 98, b"b": 97}, of_shards)
    said = f"--init_from x: the shards in {tmp_path}/other/train ", "another tokenizer", str(path)
    refusal(lambda: check(path.parent, other), *said, f"other/tokenizer{of_shards}")
    # only the hash is left, of one kind of file
    (tmp_path / f"other/tokenizer{of_shards}").unlink()
    if of_weights == of_shards == ".tiktoken":
        refusal(lambda: check(path.parent, other), "another tokenizer")
    else:
        assert "nothing tells whether the tokenizer" in check(path.parent, other)


def test_a_tokenizer_is_known_by_its_merges_and_by_its_name(tmp_path, named_tokenizers):
    ranks = BYTE_RANKS | {b"ab": 256, b"bc": 257}
    path = write_model(tmp_path / "model", ranks, ".json")
    shards = shards_of(tmp_path / "same", ranks, ".tiktoken")
    assert not check(path.parent, shards)
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = [["b", "c"], ["a", "b"]]
    path.write_text(json.dumps(tokenizer))
    refusal(lambda: check(path.parent, shards), "another tokenizer")
    (path.parent / "config.json").write_text(json.dumps(dict(encoding="gpt2")))
    gpt2 = tokenization.load_tokenizer("gpt2")._mergeable_ranks
    assert not check(path.parent, shards_of(tmp_path / "file", gpt2, ".tiktoken"))
    refusal(lambda: check(path.parent, shards), "than the weights (gpt2)")


def test_a_tokenizer_is_known_by_its_pattern_and_its_end_of_text(tmp_path, named_tokenizers):
    """Shards that an earlier version made with a published file of ranks, which it cut as GPT-2 does: their manifest
    has the hash of that file, and no end of text but by the number of ranks."""
    cl100k = tokenization.load_tokenizer("cl100k_base")._mergeable_ranks
    shards = shards_of(tmp_path / "file", cl100k, ".tiktoken")
    manifest = shards[0][2]
    of_name = write_model(tmp_path / "model", BYTE_RANKS, ".tiktoken").parent
    (of_name / "config.json").write_text(json.dumps(dict(encoding="cl100k_base")))
    of_json = write_model(tmp_path / "json", cl100k, ".json").parent
    for model in (of_name, of_json):
        assert not check(model, shards)
        manifest["vocab_size"] = 100_257
        refusal(lambda: check(model, shards), "another tokenizer")
        manifest["end_of_text"] = 100_257
        assert not check(model, shards)
        del manifest["end_of_text"], manifest["vocab_size"]
    path = of_json / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = tokenization.PATTERN
    path.write_text(json.dumps(tokenizer))
    refusal(lambda: check(of_json, shards), "another tokenizer")


def test_weights_are_refused_shards_of_another_tokenizer(run, shards, tmp_path, capsys):
    """To be measured by, and to train on."""
    other = tmp_path / "other"
    shutil.copytree(shards, other)
    describe(other, tokenizer="gpt2", tokenizer_sha256="0" * 64, vocab_size=250)
    said = f"--data {other}: the shards ", "another tokenizer"
    refusal(lambda: measured(run, data=(str(other),)), *said)
    assert measured(run, data=(str(shards),), limit=3)["data"][0]["tokens"] == 3 * 32
    err = capsys.readouterr().err
    assert f"warning: --data {shards}: nothing tells" in err
    assert f"warning: {shards}/val has no manifest.json, so its shards are not verified" in err
    at = dict(init_from=str(run[0]), data=str(other), output_dir=str(tmp_path / "runs"))
    cfg = utils.replace(presets.preset("tiny"), n_device_axis=(1, 1, 1), **ONE, **at)
    flags, said = Flags(cfg, frozenset([*at, "n_devices"])), "another tokenizer"
    refusal(
        lambda: training_program.start(flags, main.workbench()),
        f"--init_from {run[0]}: the shards ",
        said,
    )


def test_mistakes_get_a_sentence(run, shards, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text"\n')
    (tmp_path / "far").mkdir()
    np.save(tmp_path / "far" / "far.npy", np.full(100, 300, np.uint16))
    for options, *parts in [
        (dict(), "--data", "--tasks"),
        (dict(data=("nowhere",)), "--data nowhere", "no such"),
        (dict(data=(str(tmp_path / "empty.txt"),)), "empty.txt", "no text"),
        (dict(data=(str(tmp_path / "broken.jsonl"),)), "--data", "line 2"),
        (dict(data=(str(tmp_path / "far"),)), "far.npy", "300"),
        (dict(data=(str(tmp_path / "far" / "far.npy"),)), "--data", "far.npy"),
        (dict(data=(str(shards),), stride=33), "--stride 33"),
        (dict(data=(str(shards),), n_device_axis=(3, 1, 1), n_devices=3), "--n_experts 8"),
    ]:
        refusal(lambda: measured(run, **options), *parts)
    refusal(lambda: sample.main(common.Sample(model="nowhere")), "nowhere: neither a run")
    refusal(lambda: continued(run, stop=("",)), "--stop")


def test_gpt2_goes_no_further_than_its_positions_and_rotary_models_with_a_warning(
    run, shards, tmp_path, capsys
):
    gpt2 = make_run(tmp_path, **SMALL_GPT2)
    said = "--max_tokens 20: ", " 18 tokens", " the 32 that"
    refusal(lambda: continued(gpt2, max_tokens=20), *said)
    refusal(lambda: continued(gpt2, PROMPTS[:1], max_tokens=20, T=16), " the 16 of --T")
    refusal(lambda: measured(gpt2, data=(str(shards),), T=33), "--T 33: ", "was made for 32 tokens")
    assert continued(gpt2, PROMPTS, max_tokens=None)[2].done, "the default refuses nothing"
    capsys.readouterr()
    assert continued(run, PROMPTS[2:3], max_tokens=20)[0].done
    assert "warning: --max_tokens 20" in capsys.readouterr().err
    assert measured(run, data=(str(shards),), limit=4, T=41, **MESH)["data"][0]["tokens"] == 4 * 41
    assert f"warning: --T 41: {run[0]} was made for 32 tokens\n" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_measures_shards_alone(run, shards, tmp_path):
    os.symlink(run[0] / "checkpoints", tmp_path / "checkpoints")
    config = (run[0] / "config.json").read_text().replace("tokenizer.tiktoken", "")
    (tmp_path / "config.json").write_text(config)
    assert measured([tmp_path], data=(str(shards),), limit=4)["data"][0]["sequences"] == 4
    refusal(lambda: measured([tmp_path], data=(str(ROOT / "README.md"),)), "tokenizer")
    refusal(lambda: continued([tmp_path]), "tokenizer")


@pytest.mark.parametrize(
    "words, said",
    [
        ("tools/sample.py RUN --prompt a --max_tokens 3 --temperature 0", "decode: 3 tokens"),
        ("-m tools.evaluate RUN --data nowhere", "error: --data nowhere"),
        ("tools/hf.py export nowhere x", "error: nowhere: neither"),
        ("main.py --preset tiny --n_device_axis 3 2 2", "error: --n_device_axis 3 2 2"),
        ("tools/bench.py --n_device_axis 3 1 1 --n_devices 2", "error: --n_device_axis 3 1 1"),
        ("-m data.tokenize_shards --sourc x", "error: --sourc"),
    ],
)
def test_the_programs_as_scripts_and_as_modules(run, words, said):
    words = [str(run[0]) if word == "RUN" else word for word in words.split()]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert done.returncode == (2 if said.startswith("error") else 0)


NEED_DEVICES = ["main.py", "tools/sample.py RUN", "tools/evaluate.py RUN --data README.md"]
NEED_DEVICES += ["tools/bench.py", "tools/check_machine.py"]
NEEDS_NONE = "tools/checkpoints.py RUN"


@pytest.mark.parametrize("words", [*NEED_DEVICES, NEEDS_NONE])
def test_a_platform_that_no_machine_has_gets_a_sentence_where_devices_are_needed(run, words):
    needs_none = words == NEEDS_NONE
    words = [str(run[0]) if word == "RUN" else word for word in words.split()]
    env = os.environ | {"JAX_PLATFORMS": "quantum,cpu"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True
    )
    if needs_none:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        said = "error: JAX_PLATFORMS=quantum,cpu: jax finds no 'quantum' on this machine"
        assert done.returncode == 2 and done.stderr.startswith(said), done.stderr
        assert done.stderr.count("\n") == 1 and not without_pulse(done.stdout)
