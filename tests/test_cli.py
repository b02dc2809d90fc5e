"""The command line: every flag reaches its field, every field is used, and every mistake gets one sentence."""

import dataclasses
import fnmatch
import functools
import itertools
import json
import math
import os
import pickle
import random
import re
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from families import ARCHITECTURES
from helpers import BYTE_RANKS, ROOT, flags_of, refusal
from small_models import SMALL, small_config

import architectures
import utils
from config import command_line, foreign, parser, presets, prompt, settle
from config.checks import check_processes
from config.flags import Flags, Found, without
from config.program import read_flags
from data import tokenize_shards, train_tokenizer
from data.sources import formats
from inference import sampling
from runtime import files, launchers, messages, platforms, processes
from shards import tokenization
from shards.corpus import Corpus
from tools import bench, checkpoints, common, compare, evaluate, hf, trace
from training.sizes import tokens_per_step, val_batch_shape

FLAGS = parser.fields_of(utils.Config)
FIELDS = {name: f for name, f in FLAGS.items() if name in utils.FIELDS}  # of a run


def another(name, value):
    """A value for the flag that differs from `value`."""
    kind, facts = FIELDS[name].type, parser.facts_of(FIELDS[name])
    if typing.get_origin(kind) is typing.Literal:
        return next(v for v in typing.get_args(kind) if v != value)
    named = dict(preset="tiny", architecture="gpt2", attention="xla", n_device_axis=(5, 6, 7))
    if name in named:
        return named[name]
    if kind is float:
        return value + (0.25 if value + 0.25 < facts.below else -0.25)
    return {bool: lambda: not value, int: lambda: value + 1, str: lambda: value + "x y'$"}[kind]()


@pytest.fixture
def byte_ranks(tmp_path):
    (tmp_path / "bytes.tiktoken").write_bytes(tokenization.dump_ranks(BYTE_RANKS))
    return str(tmp_path / "bytes.tiktoken")


def test_the_home_folder_is_the_same_for_what_reads_and_what_writes(tmp_path, monkeypatch):
    """A shell leaves --output_dir=~/runs as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "flags.json").write_text('{"output_dir": "~/runs", "name": "a"}')
    for words in (["--output_dir=~/runs", "--name", "a"], ["--config", f"{tmp_path}/flags.json"]):
        assert command_line.parse(words).cfg.run.folder == f"{tmp_path}/runs/a"


# without --config, which needs a file
@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"config"}))
def test_every_flag_reaches_its_field_and_no_other(name, byte_ranks):
    default = utils.flatten(presets.preset("moe1b"))
    value = byte_ranks if name == "tokenizer" else another(name, default[name])
    cfg, given = command_line.parse(flags_of(**{name: value}))
    now = utils.flatten(cfg)
    assert given == {name} and now[name] == value
    of_preset = {*presets.PRESETS["tiny"], "name", "end_steps"}
    follow = dict(preset=of_preset, tokenizer={"vocab_size"}).get(name, set())
    changed = {n for n in default if now[n] != default[n]}
    assert {name} <= changed <= {name} | follow
    if name == "tokenizer":
        assert now["vocab_size"] == 257
        words = flags_of(tokenizer=value, vocab_size=100)
        refusal(lambda: command_line.parse(words), "--vocab_size 100", " has 257 tokens")


def test_every_field_is_used():
    """Each is read in a training run, of the group that has it."""
    folders = (
        "config",
        "architectures",
        "kernels",
        "logs",
        "training",
        "inference",
        "runtime",
        "shards",
        ".",
    )
    source = "".join(path.read_text() for at in folders for path in (ROOT / at).glob("*.py"))
    for group in utils.GROUPS:
        found = set(re.findall(rf"\b(?:{group}|{group[0]}|self)\.(\w+)", source))
        names = {f.name for f in dataclasses.fields(getattr(utils.Config(), group))}
        # what the program of an older run was: only files have it
        assert names - found <= {"preset", "config", "revision"}, group


def test_every_flag_of_a_run_says_whether_it_may_change_on_resume():
    for name, f in utils.FIELDS.items():
        assert parser.facts_of(f).on_resume in ("kept", "batch", "told", "free"), name


@pytest.mark.parametrize("old, clear", utils.ALIASES.items())
def test_jaxformers_name_of_a_flag_is_accepted(old, clear):
    value = another(clear, utils.flatten(presets.preset("tiny"))[clear])
    wanted = command_line.parse(["--preset", "tiny", f"--{clear}", str(value)])
    hyphens = old.replace("_", "-")
    for words in ([f"--{old}", str(value)], [f"--{old}={value}"], [f"--{hyphens}", str(value)]):
        assert command_line.parse(["--preset", "tiny", *words]) == wanted
    assert clear in wanted.given and old not in FLAGS


def test_jaxformers_command_of_its_final_run_is_accepted():
    words = "--eval_every=75 --n_device_axis 8 2 2 --name moe1B --train_batch_size 32 --use_cache --wandb"
    r = settle.settle(command_line.parse(words.split()), Found(32)).run
    assert (r.eval_every, r.save_steps, r.n_devices, r.wandb) == (75, 750, 32, True)
    assert r.pp_interleave == 4, "as many rounds as 8 blocks on 2 stages allow"


def test_help_has_a_first_page_and_all_flags_with_the_presets_values(capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.parse(["--preset", "tiny", "--help", "all"])
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert not stop.value.code and all(f"--{name}" in shown for name in FLAGS)
    assert "(default: 8192)" in shown and "(default: 100277)" not in shown
    with pytest.raises(SystemExit):
        command_line.parse(["--help"])
    shown = capsys.readouterr().out
    listed = re.findall(r"^  --(\w+)", shown, re.MULTILINE)
    assert {"preset", "config", "plan", "n_device_axis"} < set(listed) and 12 <= len(listed) <= 18
    commands = re.findall(r"^  (?:bash run.sh local|python main.py (.*))$", shown, re.MULTILINE)
    assert len(commands) == 5 and "--help all" in shown
    for words in commands:
        command_line.check(words.split(), elsewhere=True)


def test_the_presets_are_listed_with_their_sizes(capsys):
    """Those of docs/models.md, which has them in full."""
    for words in (
        ["--preset", "list"],
        ["--preset", "list", "--help"],
        ["--preset=list", "--T", "9"],
    ):
        with pytest.raises(SystemExit) as stop:
            command_line.parse(words)
        assert not stop.value.code
        _, *lines = capsys.readouterr().out.splitlines()
        listed = {name: rest for name, *rest in map(str.split, lines)}
        assert [*listed] == [*presets.PRESETS]
    assert len({*map(len, lines)}) == 1, "they are aligned"
    for name, cells in listed.items():
        m = presets.preset(name).model
        assert cells[3:5] == [str(m.model_dimension), str(m.T)]
    assert listed["moe-1.6b"] == ["1.60B", "663.54M", "23", "1536", "2048", "31.98B"]
    assert listed["deepseek-v3-671b"][:3] == ["671.03B", "37.55B", "61"]
    for words in (["--preset", "list"], ["--preset", "lists"]):  # no machine of a cluster prints it
        refusal(lambda: command_line.check(words, elsewhere=True), "no such preset", "moe-1.6b")


def test_a_file_of_flags_is_between_the_preset_and_what_is_given(tmp_path):
    """And the config.json of a run makes the same run again, on any machine: its mesh is not part of it."""
    path = tmp_path / "flags.json"
    path.write_text('{"preset": "tiny", "blocks": 6, "k": 1, "train_batch_size": 6, "tied": false}')
    cfg, given = command_line.parse(["--config", str(path), "--blocks", "4"])
    assert (cfg.model.blocks, cfg.model.experts_per_token, cfg.model.tied) == (4, 1, False)
    assert cfg.data.train_batch_size == 6 and cfg.model.model_dimension == 128
    assert {"blocks", "experts_per_token", "train_batch_size"} < given

    words = "--preset tiny --T 64 --n_devices 8 --n_device_axis 2 2 2 --max_lr 0.003 --wandb"
    first = settle.settle(command_line.parse(words.split()), Found(8))
    path.write_text(json.dumps(utils.flatten(first) | {"data_fingerprint": "x", "encoding": None}))
    mesh = "--n_device_axis 2 2 2".split()
    again = settle.settle(command_line.parse(["--config", str(path), *mesh]), Found(8))
    assert utils.replace(again, config="") == first
    for n in (1, 2, 4):
        moved = settle.settle(command_line.parse(["--config", str(path)]), Found(n))
        assert moved.run.n_device_axis == (n, 1, 1) and moved.data.global_batch_size == 16
        assert (moved.model, moved.optimizer) == (first.model, first.optimizer)
    planned = command_line.parse(["--config", str(path), "--plan", "v5e-1"])
    assert planned.cfg.run.n_device_axis == (0, 1, 1) and not planned.cfg.run.n_devices


BAD_FILES = {
    '{"bloks": 6}': "bloks is no flag; the nearest is blocks",
    '{"n_layer": 6}': "n_layer is --blocks here",
    '{"blocks": "two"}': "blocks is 'two', but must be a whole number",
    '{"tied": 1}': "tied is 1, but must be true or false",
    '{"max_lr": NaN}': "max_lr is nan, but must be a number",
    '{"remat": "ful"}': "remat is 'ful', but must be one of none, dots, experts, attention, full",
    '{"n_device_axis": [1, 2]}': "must be three whole numbers",
    '{"blocks": 0}': "blocks is 0, but must be at least 1",
    "[]": "not a JSON object",
}


HIDDEN = "https://user:hidden@127.0.0.1:9/a@b?X-Amz-Signature=hidden&page=3&sig=hidden#x"


def test_no_password_of_an_address_is_printed_or_stored(tmp_path, monkeypatch, capsys):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(files, "WAITS", (0,))
    source = SimpleNamespace(source=HIDDEN, text_column="text", skip_damaged=False)
    works = [lambda: files.read_file(HIDDEN), lambda: formats.open_source(source)]
    works += [lambda: Corpus(small_config(data=HIDDEN), HIDDEN, "train")]
    works += [lambda: evaluate.open_shards(common.Evaluate(model="x"), small_config(), HIDDEN)]
    for work in works:
        said = refusal(work, "127.0.0.1:9/a@b?", "page=3")
        assert "hidden" not in said
    for tell in (messages.say, messages.warn, messages.say_error, messages.say_aside):
        tell(f"see {HIDDEN}, or {HIDDEN}")
    assert "hidden" not in messages.first_line(ValueError(HIDDEN))
    out, err = capsys.readouterr()
    assert (out + err).count("***@127.0.0.1:9/a@b") >= 8 and "hidden" not in out + err
    cfg = utils.replace(utils.Config(), data=HIDDEN, mix=f"{HIDDEN}:1", init_from=HIDDEN)
    assert "hidden" not in json.dumps(utils.flatten(cfg))
    args = SimpleNamespace(source=HIDDEN, val_fraction=0)
    args.drop_duplicates = False
    made = tokenize_shards.settings_of_text(args, SimpleNamespace(identity={}))
    assert "hidden" not in json.dumps(made) and "page=3" in made["source"]
    stored = tmp_path / "config.json"
    stored.write_text(json.dumps({"data": messages.masked(HIDDEN)}))
    words = ["--config", str(stored)]
    refusal(lambda: command_line.parse(words), "data is https://***@", "give --data")
    monkeypatch.setattr(sys, "argv", ["main.py", "--data", HIDDEN])
    assert command_line.parse([*words, "--data", HIDDEN]).cfg.data.data == HIDDEN
    assert "hidden" not in " ".join(sys.argv), "which wandb keeps"


def test_what_is_no_password_stays():
    for text in (
        "gs://b/a@b:1/x?",
        "hf://org/name@rev",
        "hf://gpt2@main",
        "mail me@x.org, a=b?",
        "host:1",
    ):
        assert messages.masked(text) == text


def test_a_mistake_in_a_file_of_flags_gets_a_sentence(tmp_path):
    refusal(lambda: command_line.parse(["--config", "none.json"]), "none.json: no such file")
    path = tmp_path / "flags.json"
    for content, said in BAD_FILES.items():
        path.write_text(content)
        refusal(lambda: command_line.parse(["--config", str(path)]), f"{path}: ", said)


BAD = {  # words beside the small model's on eight devices, and what the sentence must name
    "--n_device_axis 3 2 2": ["--n_device_axis 3 2 2", "12", "8"],
    "--blocks 3 --n_device_axis 2 2 2": ["--blocks 3", "multiple of pp (2)"],
    "--T 30 --n_device_axis 2 1 4": ["--T 30", "multiple of tp (4)"],
    "--microbatches 3 --n_device_axis 4 2 1": ["--microbatches 3", "pp"],
    "--n_experts 12 --n_device_axis 8 1 1": ["--n_experts 12", "8"],
    "--train_batch_size 6": [
        "--microbatches 4: ",
        " 6 sequences",
        " 1, 2, 3, 6 would do",
    ],
    "--global_batch_size 12": ["--global_batch_size 12: must be a multiple of dp x pp = 8 "],
    "--accumulation_steps 2 --global_batch_size 8": [
        "--train_batch_size 8: 8 x 2 x ",
        " must be the 8 sequences",
    ],
    "--model_dimension 30": ["--model_dimension 30", "n_head"],
    "--rope_dim 7": ["--rope_dim 7"],
    "--attention splash --T 128": ["--attention splash", "tpu", "auto"],
    "--attention flash --T 128": ["--attention flash", "gpu", "auto"],
    "--attention flash --T 128 --head_dim 512": ["--attention flash", "320", "1032", "auto"],
    "--pp_interleave 3 --n_device_axis 2 2 2": ["--blocks 4", "pp x pp_interleave", "6"],
    "--experts_per_token 9": ["--experts_per_token 9", "--n_experts 8"],
    "--muon_momentum 1": ["--muon_momentum 1", "below 1"],
    "--warmup_steps 100": ["--warmup_steps 100", "--end_steps 100"],
    "--decay_steps 10": ["--decay_steps 10", "--schedule linear", "wsd"],
    "--schedule wsd --decay_steps 99": ["--decay_steps 99", "at most 98", "--end_steps 100"],
    "--n_groups 8": ["--n_groups 8", "two experts"],
    "--experts tiles --capacity_factor 2": ["--experts tiles", "--capacity_factor 2"],
    "--n_groups 4 --k_groups 1 --experts_per_token 3": ["--k_groups 1", "--experts_per_token 3"],
    "--n_devices 16": ["--n_devices 16", "8"],
    "--preset tinny": ["--preset tinny", "the nearest is tiny"],
    "--modle_dimension 64": ["--modle_dimension", "the nearest is --model_dimension"],
    "--wandb yes": ["--wandb yes: takes no value; give --wandb or --no_wandb alone"],
    "config/train.py": ["belongs to no flag; a file of flags is --config FILE.json"],
    "--remat ful": [
        "--remat ful: must be one of none, dots, experts, attention, full; the nearest is full"
    ],
    "--attention blockwize": ["--attention blockwize", "one of auto", "blockwise"],
    "--architecture gpt2 --n_experts 4": ["--architecture gpt2", "no such choice", "leave"],
    "--blocks two": ["--blocks two: must be a whole number"],
    "--max_lr high": ["--max_lr high: must be a number"],
    "train": ["'train': belongs to no flag: each value comes after its flag"],
    "blocks=4": ["'blocks=4': begins with no hyphens; give --blocks 4"],
    "batch_size=4": ["--batch_size: is --train_batch_size here"],
    "--training.seq-len 8": ["--training.seq-len: is --T here"],
    "--document-mask=0": ["takes no value; give --document_mask or"],
    "--n_device_axis a 2 2": ["--n_device_axis a: must be three whole numbers"],
    "--seed": ["--seed: must be followed by a whole number"],
    f"--profile 1:{'9' * 5000}": ["--profile 1:999", "FIRST:LAST"],
    "--profile 8:9 --training_steps 8": ["--profile 8:9", "--training_steps 8"],
    "--profile 1:51": ["--profile 1:51", "at most 50 steps"],
    "--tokenizer no.tiktoken": ["--tokenizer no.tiktoken", "no such file"],
}
BAD_PROCESSES = {
    "--num_processes 2": ["--num_processes 2: ", " --coordinator HOST:PORT"],
    "--process_id 1": ["--process_id 1: ", " --coordinator"],
    "--coordinator h:1": ["--coordinator h:1: ", " --num_processes and --process_id"],
    "--coordinator h:1 --num_processes 2": ["--process_id"],
    "--coordinator h --num_processes 2 --process_id 0": ["--coordinator h: ", "HOST:PORT"],
    "--coordinator h:1 --num_processes 2 --process_id 2": ["--process_id 2: ", "--num_processes 2"],
    "--coordinator h:1 --num_processes 2 --process_id 0 --n_devices 3": ["--n_devices 3: "],
}


@pytest.mark.parametrize("words, said", (BAD | BAD_PROCESSES).items())
def test_a_mistake_gets_a_sentence(words, said, tmp_path):
    small = flags_of(**SMALL, train_batch_size=8, val_batch_size=8, n_devices=8)
    small += ["--output_dir", str(tmp_path)]
    argv = ["--preset", "tiny", *small, *words.split()]
    if words in BAD:
        refusal(lambda: settle.settle(command_line.parse(argv), Found(8)), *said)
    if words != "--n_devices 16":  # only devices tell
        refusal(lambda: command_line.check(argv, elsewhere=False), *said)


# flags of other programs, and those here
ALIKE = dict(block_size="T", n_layer="blocks", steps="training_steps", lr="max_lr")
ALIKE |= dict(bf16="model_dtype", max_grad_norm="grad_clip_norm", dataset="data")
ALIKE |= dict(out_dir="output_dir", gpus="n_devices")


def test_flags_of_other_programs_are_answered_with_those_here():
    """Each in some program, by flags that it has, and none that a program here has is answered."""
    lines = Path(foreign.FOREIGN).read_text().splitlines()
    programs = [*map(parser.fields_of, PROGRAMS)]
    for names, words in zip(lines[::2], lines[1::2], strict=True):
        for name in names.split():
            said = {foreign.said_of(name, known) for known in programs if name not in known}
            assert words.strip() in said, (name, words)
    for name, here in ALIKE.items():
        for word in (f"--{name}", f"--{name.replace('_', '-')}=1"):
            refusal(lambda: command_line.parse([word]), f": is --{here} here")


# What people look for, and what the answer must name
LOOKED_FOR = {
    "depth": ["--design MACHINE with --hours", "--blocks x --layers_per_block"],
    "lora qlora": ["pretrains", "tools/hf.py", "peft"],
    "sft finetune dpo rl": ["pretrains", "tools/hf.py", "trl", "--init_from"],
    "train_tokens max_tokens_total": ["--tokens", "--training_steps x --global_batch_size x --T"],
    "max_hours time_limit": ["--hours", "--training_steps", "timeout -s INT 3h"],
    "find_lr lr_finder": ["docs/rates.md", "--max_lr"],
    "dry_run": ["--plan MACHINE"],
    "test_run smoke debug": ["--preset tiny --training_steps 20", "--plan MACHINE"],
    "chat": ["tools/sample.py"],
    "max_length": ["--T", "--max_tokens"],
}
# What is no flag and like none: naming one would mislead
LIKE_NONE = "sft2 ema z_loss hf_token int8 plot trace neptune lion save load best test quiet"


def test_what_people_look_for_gets_the_right_answer():
    for names, parts in LOOKED_FOR.items():
        for name in names.split():
            said = refusal(lambda: command_line.parse([f"--{name}", "1"]), f"--{name}: ", *parts)
            assert "nearest" not in said
    for name in LIKE_NONE.split():
        said = refusal(lambda: command_line.parse([f"--{name}", "1"]))
        assert said == f"--{name}: there is no such flag; see --help."
    for wrong, right in dict(blokcs="blocks", maxlr="max_lr", tokeniser="tokenizer").items():
        refusal(lambda: command_line.parse([f"--{wrong}", "1"]), f"the nearest is --{right};")


def test_a_plan_takes_the_kernels_of_its_machine():
    kernels = {"gpu:8xH200": ("flash", "splash"), "v4:2x2x2": ("splash", "flash")}
    for machine, (kernel, other) in kernels.items():
        cfg = utils.replace(presets.preset("moe1b"), val_batch_size=32, plan=machine)
        for name in ("auto", "blockwise", kernel):
            settle.validate(utils.replace(cfg, attention=name), 8)
        cfg = utils.replace(cfg, attention=other)
        refusal(lambda: settle.validate(cfg, 8), f"--attention {other}: ", " auto")


PROGRAMS = {  # what parses, of each
    utils.Config: "",
    bench.Options: "",
    tokenize_shards.Options: "--source a --output b --tokenizer gpt2",
    train_tokenizer.Options: "--source a --output b.tiktoken",
}
OF_RUNS = [common.Sample, common.Evaluate, trace.Options, checkpoints.Options, compare.Options]
PROGRAMS |= dict.fromkeys(OF_RUNS, "run")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_number_beyond_its_bounds_is_refused_at_once(program):
    """Before anything is computed with it; the largest that is allowed is not."""

    def read(words):
        if program is utils.Config:
            return command_line.parse(words)
        return read_flags(program, words, "program")

    for f in parser.fields_of(program).values():
        expected = parser.values_of(f)
        facts = parser.facts_of(f)
        kind = expected.kind
        if kind not in (int, float):
            continue
        most = parser.MOST[kind] if facts.most is None else facts.most
        beyond = [-(10**40), most + 1, 2**63, 10**40]
        if kind is float:
            beyond = [2 * most, float("nan"), float("inf"), float("-inf")]
        for value in beyond:
            words = [
                *PROGRAMS[program].split(),
                f"--{f.name}",
                str(value),
                *["1"] * ((expected.count or 1) - 1),
            ]
            with pytest.raises(messages.UserError, match=rf"--{f.name} .*: must be (a|at|below)\b"):
                read(words)
        if facts.below == math.inf:
            assert not parser.unmet(f, most)


# in one order: workers must collect the same tests
READ_A_FOLDER = [
    kind
    for kind in dict.fromkeys([*PROGRAMS, hf.Options])
    if kind not in (utils.Config, bench.Options)
]


@pytest.mark.parametrize("program", READ_A_FOLDER)
def test_no_folder_is_an_empty_text(program):
    """Which would be the current directory, or the root of all."""
    needed = [f for f in parser.fields_of(program).values() if parser.facts_of(f).nonempty]
    assert needed
    for f in needed:
        before = ["export"] if program is hf.Options else []
        words = [*before, ""] if parser.facts_of(f).is_argument else [f"--{f.name}", ""]
        said = refusal(lambda: read_flags(program, words, "program"), "that is not empty")
        assert said.startswith(f"{parser.shown(f)} '': ") or program is hf.Options


TEXTS = "x é漢 ../x a/b -x -- $(x) %s . ~ * a,b : 1:2 x:0.7,y true None [1".split()
TEXTS += ["", " ", "x\ny", "x" * 5000]
NUMBERS = "0 1 -1 2 3 7 8 +5 1e3 1.5 0x10 1_000 １２ 1e308 1e400 nan -inf 1e-320 1,5".split()
NUMBERS += ["2147483648", str(2**63), str(10**30)]
# what Python says of a value, which tells a user nothing
JARGON = "invalid literal|could not convert|NoneType|has no attribute|not supported between"


def test_drawn_command_lines_are_understood_or_get_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng, understood = random.Random(0), 0
    for _ in range(600):
        words = ["--preset", rng.choice([*presets.PRESETS])]
        for name in rng.choices([*FLAGS], k=rng.choice([1, 1, 2, 4])):
            values = rng.choice([TEXTS, NUMBERS, NUMBERS])
            words += [f"--{name}", *rng.choices(values, k=rng.choice([0, 1, 1, 1, 3]))]
        elsewhere = rng.random() < 0.5
        try:
            messages.one_sentence(lambda w=words, e=elsewhere: command_line.check(w, e))
            understood += 1
        except SystemExit as e:
            said = capsys.readouterr().err
            assert e.code == 2 and said.startswith("error: ") and said.count("\n") == 1, words
            assert not re.search(JARGON, said), (words, said)
    assert 30 < understood < 500


def test_a_check_without_devices_refuses_nothing_that_some_devices_would_take(byte_ranks):
    """With as many devices as the mesh says, with any number of them, with a tokenizer that is elsewhere."""
    small = dict(SMALL, train_batch_size=8, val_batch_size=8, tokenizer=byte_ranks)
    for mesh in [(2, 2, 2), (0, 1, 1), (0, 2, 4)]:
        words = flags_of(**small, n_device_axis=mesh)
        command_line.check(["--preset", "tiny", *words], elsewhere=True)
        words = flags_of(n_device_axis=mesh, preset="gpt2-124m", tokenizer="none.json")
        command_line.check(words, elsewhere=True)
    few = flags_of(**small | dict(n_experts=6, n_device_axis=(0, 1, 4)))  # 3 x 1 x 4 would do
    for more in ("--init_from anything", "--plan v4:2x2x1", "--num_processes 3"):
        command_line.check(["--preset", "tiny", *few, *more.split()], elsewhere=True)


def test_a_check_knows_the_run_that_is_there(tmp_path):
    """A flag that the run cannot resume with is refused; what may change, and what the preset says, is not. Where
    another run could begin from its weights, that is said."""
    cfg = utils.replace(presets.preset("tiny"), T=64, train_batch_size=4)
    stored = json.dumps(utils.flatten(cfg) | {"data_fingerprint": "x"})
    files.write_file(str(tmp_path / "tiny/config.json"), stored)
    words = ["--preset", "tiny", "--output_dir", str(tmp_path)]
    for more in ("", "--T 64 --n_device_axis 0 1 1", "--max_tokens 9", "--T 32 --name b"):
        command_line.check([*words, *more.split()], elsewhere=False)
    begin = f", with --init_from {tmp_path}/tiny to begin from its weights"
    for more, has, other in (
        ("--T 32", "--T 64", begin),
        ("--max_lr 0.02", "--max_lr 0.016", begin),
        ("--mix web:1", "no --mix", begin),
        ("--blocks 4", "--blocks 2", ""),
        ("--no_tied", "--tied", ""),
        ("--architecture gpt2", "--architecture deepseek", ""),
    ):
        again = [*words, *more.split()]
        said = refusal(lambda: command_line.check(again, elsewhere=False))
        them = f"{more}: run tiny exists and has {has}"
        assert said == f"{them}; give the same, or another --name{other}."
        command_line.check(again, elsewhere=True)
    files.write_file(
        str(tmp_path / "tiny/config.json"), stored.replace('"mix": ""', '"mix": "a:1"')
    )
    again = [*words, "--mix", ""]
    said = "no --mix: run tiny exists and has --mix a:1; give the same"
    refusal(lambda: command_line.check(again, elsewhere=False), said)


def test_a_program_whose_reader_leaves_ends_quietly():
    """As head does when it has its lines."""
    words = [sys.executable, ROOT / "main.py", "--help", "all"]
    done = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done.stdout.close()
    assert (done.stderr.read(), done.wait(300)) == (b"", 141)


def test_output_that_cannot_be_written_is_one_line():
    """Other errors of the system are none of its."""
    with open("/dev/full", "w") as full:
        words = [sys.executable, ROOT / "main.py", "--help"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: standard output cannot be")
    assert done.stderr.count("\n") == 1, done.stderr
    with open("/dev/full", "w") as full, pytest.raises(OSError):
        messages.one_sentence(lambda: os.write(full.fileno(), b"x"))


def test_an_interrupt_that_a_library_would_swallow_is_one_line(tmp_path):
    """While it is imported, say; nothing unfinished is left."""
    swallows = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
except BaseException:
    raise ImportError from None
"""
    (tmp_path / "swallows.py").write_text(swallows)
    code = f"""
sys.path.insert(0, {str(tmp_path)!r})
from runtime import files
def program():
    with files.appearing({str(tmp_path / "folder")!r}) as part, files.replacing(f"{{part}}/file"):
        import swallows
interrupts.run(program)
"""
    done = streams(code, "")
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert {*os.listdir(tmp_path)} - {"__pycache__"} == {"swallows.py"}


def test_flags_are_read_before_jax_is_imported():
    """A Python without the packages, as that of a new terminal, says which environment to activate."""
    words = [sys.executable, "-S", "main.py"]  # -S leaves out what is installed
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    (error,) = done.stderr.splitlines()
    assert done.returncode == 2 and "has no package jax: first source .venv/bin/activate" in error
    check = "import sys; from config import command_line; command_line.parse([])"
    check += "; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)


def test_the_users_xla_flags_win(monkeypatch):
    for platform, variable, flag, value in (
        ("cpu", "XLA_FLAGS", "--xla_force_host_platform_device_count", "8"),
        ("tpu", "LIBTPU_INIT_ARGS", "--xla_tpu_enable_async_all_to_all", "true"),
    ):
        monkeypatch.setenv("JAX_PLATFORMS", platform)
        for given, now in (f"{flag}=3", f"{flag}=3"), ("", f"{flag}={value}"):
            monkeypatch.setenv(variable, given)
            platforms.set_xla_flags(8)
            assert [f for f in os.environ[variable].split() if flag in f] == [now]


def test_the_users_xla_flags_win_by_their_whole_names(monkeypatch, tmp_path):
    """Not by the beginning of another's; also where libtpu reads --noNAME, and where XLA reads a file."""
    for variable, platform, flag in (
        ("LIBTPU_INIT_ARGS", "tpu", "--xla_tpu_enable_async_collective_fusion=true"),
        ("XLA_FLAGS", "cpu", "--xla_force_host_platform_device_count=8"),
    ):
        monkeypatch.setenv("JAX_PLATFORMS", platform)
        name = flag.split("=")[0]
        (tmp_path / "flags").write_text(f"{name}_more=1\n--other\n")
        for given in (f"{name}_more=1", f"--x{name[1:]}=1", str(tmp_path / "flags")):
            monkeypatch.setenv(variable, given)
            platforms.set_xla_flags(8)
            assert flag in os.environ[variable].split() and os.environ[variable][0] == "-"
        for given in (name, f"{name}=0", name.replace("--", "--no")):
            (tmp_path / "flags").write_text(f"--other=2\n{given}\n")
            for value in (given, f"--other  {given}", str(tmp_path / "flags")):
                monkeypatch.setenv(variable, value)
                platforms.set_xla_flags(8)
                assert given in os.environ[variable].split()
                assert flag not in os.environ[variable].split()


DEVICES = [  # JAX_PLATFORMS, what the machine has, whether jax for it is installed, what is said
    ("cuda", "cpu", True, "JAX_PLATFORMS=cuda: jax finds no 'cuda' on this machine; leave it unset, or give cpu"),
    ("tpu,cpu", "gpu", True, "JAX_PLATFORMS=tpu,cpu: jax finds no 'tpu' on this machine; leave it unset"),
    ("cpu,nonsense", "cpu", True, "jax finds no 'nonsense' on this machine"),
    ("tpu,", "gpu", True, "jax finds no 'tpu' and no '' on this machine; leave it unset, or give cpu or cuda."),
    ("gpu", "gpu", True, "jax finds no 'gpu' on this machine; leave it unset, or give cpu or cuda."),
    ("cuda", "gpu", False, "JAX_PLATFORMS=cuda: this Python has no jax for a GPU; bash setup_tpu.sh adds it."),
    ("tpu", "tpu", True, "jax cannot use the TPU of this machine (in use by process 7)."),
    ("", "tpu", True, "jax cannot use the TPU of this machine (in use by process 7)."),
]  # fmt: skip


@pytest.mark.parametrize("chosen, has, installed, said", DEVICES)
def test_devices_that_jax_does_not_find_get_a_sentence(chosen, has, installed, said, monkeypatch):
    """With the status of a wrong flag, but for those that another try may find."""

    def fail():
        raise RuntimeError("in use by process 7\n  a trace")

    monkeypatch.setattr("jax.devices", fail)
    monkeypatch.setattr(platforms, "hardware", lambda: has)
    monkeypatch.setattr(platforms, "has_plugin", lambda kind: installed)
    monkeypatch.setenv("JAX_PLATFORMS", chosen)
    refusal(platforms.find_devices, said)
    with pytest.raises(SystemExit) as e:
        messages.one_sentence(platforms.find_devices)
    assert e.value.code == (75 if "in use" in said else 2)


STEP = dict(zip(launchers.SLURM, ("7", "2", "0", "0", "127.0.0.1")))  # a task of Slurm's
ENVIRONMENTS = [  # variables, the number of processes or what is said
    (dict(), 1),
    (dict(SLURM_NTASKS=""), 1),
    (dict(SLURM_NTASKS="2"), 1),  # as in a shell of salloc's: no task, so jax looks for no others
    (dict(SLURM_NTASKS="two"), "SLURM_NTASKS=two: must be a whole number"),
    (STEP, 2),
    (STEP | dict(SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="4"), 4),
    # the shell of salloc's where it is a step, as Slurm 22.05 sets it with use_interactive_step
    (STEP | dict(SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="1", SLURM_STEP_ID="4294967290"), 1),
    (STEP | dict(SLURM_NTASKS=""), "SLURM_NTASKS=: must be a whole number"),
    (STEP | dict(SLURM_PROCID=""), "SLURM_PROCID=: must be a whole number"),
    (STEP | dict(SLURM_LOCALID="1.5"), "SLURM_LOCALID=1.5: must be a whole number"),
    (STEP | dict(SLURM_NTASKS="-1"), "SLURM_NTASKS=-1: must be a whole number"),
    (dict(TPU_WORKER_ID="x"), "TPU_WORKER_ID=x: must be a whole number"),
]


@pytest.mark.parametrize("variables, expected", ENVIRONMENTS, ids=str)
def test_what_starts_processes_is_understood_or_gets_a_sentence(variables, expected, monkeypatch):
    for name in launchers.NUMBERS + launchers.SLURM:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    flags = command_line.parse([])
    if isinstance(expected, int):
        assert check_processes(flags) == expected
    else:
        refusal(lambda: check_processes(flags), expected)
    assert check_processes(flags.with_defaults(num_processes=1)) == 1


PER_NODE = dict(SLURM_STEP_TASKS_PER_NODE="8(x2),2", SLURM_NODEID="2", SLURM_GPUS_ON_NODE="4")
GPUS = [  # variables of a task, the GPUs on which it trains or what is said
    (dict(SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_NODEID="1"), "all"),
    (dict(SLURM_STEP_TASKS_PER_NODE="2"), ""),  # without GPUs
    (PER_NODE | dict(CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_LOCALID="0"), "0,1"),
    (PER_NODE | dict(CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_LOCALID="1"), "2,3"),
    (PER_NODE | dict(CUDA_VISIBLE_DEVICES="2,3", SLURM_LOCALID="1"), "all"),  # --gpus-per-task=2
    (
        PER_NODE | dict(CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_NODEID="1"),
        "SLURM_GPUS_ON_NODE=4: must be a multiple of the 8 tasks that Slurm started on this node",
    ),
]


@pytest.mark.parametrize("variables, expected", GPUS, ids=str)
def test_a_task_of_slurms_takes_its_share_of_the_gpus_of_its_node(variables, expected, monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_TASKS_PER_NODE", *launchers.NUMBERS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if expected.startswith("SLURM"):
        refusal(launchers.gpus_of_task, expected)
    else:
        assert launchers.gpus_of_task() == expected


def test_the_tasks_of_srun_are_named_where_devices_do_not_divide_among_them(monkeypatch):
    for name, value in (STEP | dict(SLURM_NTASKS="4")).items():
        monkeypatch.setenv(name, value)
    flags = command_line.parse(["--n_devices", "6"])
    said = "--n_devices 6: must be a multiple of the 4 processes that srun started"
    refusal(lambda: check_processes(flags), said)


def test_a_process_that_jax_cannot_place_among_others_does_not_train_alone(monkeypatch):
    for said, alone in (
        ("coordinator_address should be defined.", True),  # jax knows of no others
        ("Number of processes must be defined.", False),
        ("invalid literal for int() with base 10: 'a'", False),
    ):

        def fail(**_):
            raise ValueError(said)

        monkeypatch.setattr("jax.distributed.initialize", fail)
        run = presets.preset("tiny").run
        if alone:
            processes.connect(run)
        else:
            refusal(lambda: processes.connect(run), f"cannot join the others ({said})", "alone")


def streams(code, redirected, **environment):
    """How a program ended that begins as all here do, then does this."""
    begin = "import os, sys; from runtime import interrupts; interrupts.install(); "
    words = ["bash", "-c", f'exec "$@" {redirected}', "bash", sys.executable, "-c", begin + code]
    return subprocess.run(
        words, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_closed_streams_are_opened_and_no_file_gets_their_numbers(tmp_path):
    """Or what a library prints would be in that file."""
    code = f"""
import subprocess
with open({str(tmp_path / "shard")!r}, "w") as f:
    for number in (1, 2):
        os.write(number, b"noise")
    print("text", sys.stdin.read(), sys.stderr.isatty(), flush=True)
    subprocess.run(["sh", "-c", "echo more; echo more >&2"], check=True)
    f.write("data")
"""
    for redirected in ("<&- >&- 2>&-", ">&-", "2>&-", "<&-"):
        done = streams(code, redirected)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "shard").read_text() == "data"
        assert ("text" in done.stdout) == (">&-" not in redirected.replace("2>&-", ""))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252:strict"])
def test_what_stdout_cannot_encode_is_escaped(encoding):
    done = streams(r'print("a \u6f22")', "", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout) == (0, "a \\u6f22\n"), done.stderr


def test_a_program_names_the_nearest_flag_and_takes_the_flags_of_main_py_too():
    read = functools.partial(parser.read_words, others=utils.Config)
    for kind, words, nearest in (
        (bench.Options, "--blokcs=3", "--blocks"),
        (hf.Options, "export a b --dtype flaot32", "float32"),
    ):
        said = f"; the nearest is {nearest}; see --help."
        refusal(lambda: read(kind, words.split(), "program"), said)
    words = "--steps 3 --blocks 4 --no-wandb --n_device_axis 1 2 3 --tied --prompt --- --alpha=0.5"
    own, rest = read(bench.Options, words.split(), "bench.py")
    wanted = "--blocks 4 --no-wandb --n_device_axis 1 2 3 --tied --prompt --- --alpha=0.5"
    assert own == {"steps": 3} and rest == wanted.split()


FOLLOW = {  # words, and the defaults that change with them
    "--n_experts 1": dict(experts_per_token=1),
    "--training_steps 10": dict(end_steps=10, warmup_steps=1),
    "--training_steps 460 --schedule wsd": {},
    "--schedule wsd --decay_steps 395": dict(warmup_steps=0),
    "--head_dim 32 --model_dimension 127": {},
    "": {},
}


@pytest.mark.parametrize("words, changed", FOLLOW.items())
def test_a_default_never_refuses_what_was_given(words, changed):
    parsed = command_line.parse(["--preset", "tiny", *words.split()])
    cfg, given = settle.settle_model(parsed, Found(0))
    wanted = utils.flatten(presets.preset("tiny")) | changed
    assert without(given, utils.flatten(cfg)) == without(given, wanted)
    settle.validate(cfg, int(np.prod(cfg.run.n_device_axis)) or 1)
    assert settle.settle_model(Flags(cfg, given), Found(0)).cfg == cfg


def divided(words, n=1, **how):
    """{flag: value} of the batch that a command line on n devices has."""
    cfg = settle.settle(command_line.parse(words.split()), Found(n, **how))
    batch = dict(dp=cfg.run.n_device_axis[0], A=cfg.run.accumulation_steps)
    d = cfg.data
    batch |= dict(
        G=d.global_batch_size, B=d.train_batch_size, val=d.val_batch_size, M=d.microbatches
    )
    assert batch["G"] == batch["B"] * batch["dp"] * batch["A"]
    return batch


DIVIDED = {  # words, devices, and how the batch is divided
    ("--preset tiny --microbatch_size 2", 1): dict(G=16, B=16, M=8, val=0),
    ("--preset tiny --microbatch_size 2 --n_device_axis 2 2 2", 8): dict(G=16, B=8, M=4, val=0),
    ("--preset tiny --microbatch_size 2 --train_batch_size 6", 2): dict(G=12, B=6, M=3),
    ("--preset tiny --train_batch_size 6 --accumulation_steps 3", 2): dict(G=36, B=6, A=3),
    ("--preset tiny --accumulation_steps 4", 2): dict(G=16, B=2, A=4),
    ("--preset tiny --microbatches 2", 1): dict(G=16, M=2),
    ("--preset tiny --microbatch_size 3", 1): dict(G=16, M=8),
    ("--preset tiny --microbatch_size 2 --val_batch_size 6", 1): dict(G=16, val=6, M=8),
    ("--preset tiny --global_batch_size 48 --train_batch_size 8", 2): dict(G=48, A=3),
    ("--preset jaxformer-small", 1): dict(G=32, B=8, A=4, M=1),
    ("--preset jaxformer-small", 16): dict(G=32, B=1, A=2, M=1),
    ("--preset moe1b --n_device_axis 8 2 2", 32): dict(G=256, B=32, M=4),  # JAXformer's
    ("--n_device_axis 32 1 1", 32): dict(G=256, B=8, M=1),
}


@pytest.mark.parametrize("words, n", DIVIDED)
def test_the_global_batch_is_divided_among_replicas_steps_and_microbatches(words, n):
    assert divided(words, n).items() >= DIVIDED[words, n].items()


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_a_preset_trains_on_as_many_tokens_a_step_on_every_mesh(preset):
    """And validates on as many: of up to 64 devices those whose dp and pp divide the batch, and tp the model."""
    batches = set()
    meshes = 0
    words = command_line.parse(["--preset", preset])
    sizes = [2**n for n in range(7)] + [3, 5, 12, 60]
    for dp, pp, tp in itertools.product(sizes, repeat=3):
        n = dp * pp * tp
        total, blocks = words.cfg.data.global_batch_size, words.cfg.model.blocks
        experts = max(1, words.cfg.model.n_experts)
        m = words.cfg.model
        uneven = total % (dp * pp) or blocks % pp or (experts % (dp * tp) and dp * tp % experts)
        if n > 64 or uneven or any(size % tp for size in (m.n_head, m.kv_heads, m.T)):
            continue
        cfg = settle.settle(words.with_given(n_device_axis=(dp, pp, tp)), Found(n))
        evaluated = cfg.run.eval_steps * math.prod(val_batch_shape(cfg))
        batches.add((tokens_per_step(cfg), evaluated))
        meshes += 1
    assert len(batches) == 1 and meshes > 20


def test_a_batch_that_a_device_has_no_room_for_is_accumulated():
    """As few steps as fit; what was given stays; where nothing fits, as few as need hardly more than the most."""

    def share(cfg):
        return cfg.data.train_batch_size / 4

    assert divided("--preset tiny", memory_share=share) == dict(G=16, dp=1, A=4, B=4, val=0, M=1)
    assert divided("--preset tiny --n_device_axis 4 1 1", 4, memory_share=share)["A"] == 1
    assert divided("--preset tiny --accumulation_steps 2", memory_share=share)["A"] == 2
    assert divided("--preset tiny --train_batch_size 16", memory_share=share)["A"] == 1
    assert divided("--preset tiny --microbatches 8", memory_share=share) == dict(
        G=16, dp=1, A=2, B=8, val=0, M=8
    )
    weights = 20
    assert divided("--preset tiny", memory_share=lambda cfg: weights + share(cfg))["A"] == 4


def test_a_single_gpu_has_one_microbatch_as_large_as_fits():
    """Not where a flag says otherwise, on several devices, or on others than GPUs."""
    gpu = dict(device_kind="NVIDIA H200", memory_share=lambda cfg: cfg.data.train_batch_size / 64)
    words = "--preset moe-1.6b"
    assert divided(words, **gpu).items() >= dict(G=128, A=2, B=64, M=1).items()
    assert divided(f"{words} --microbatch_size 8", **gpu).items() >= dict(A=2, M=8).items()
    assert divided(f"{words} --microbatches 2", **gpu).items() >= dict(A=2, M=2).items()
    assert divided(words, 2, **gpu)["M"] == 16
    assert divided(words, device_kind="NVIDIA H200")["M"] == 32


def test_a_single_gpu_computes_nothing_twice_where_it_has_room_for_a_full_microbatch():
    """A resumed run keeps what it had on that kind of GPU, and is divided anew on another."""

    def settled(words, sequences, kind="NVIDIA H200", **stored):
        """(--remat, sequences of a microbatch) of a device that has room for so many, kept whole."""

        def share(cfg):
            d, room = cfg.data, dict(none=1, dots=2).get(cfg.model.remat, 4)
            return d.train_batch_size / d.microbatches / sequences / room

        found = Found(1, device_kind=kind, memory_share=share, stored=stored)
        cfg = settle.settle(command_line.parse(words.split()), found)
        stored = json.loads(json.dumps(utils.flatten(cfg)))
        stored |= dict(data_fingerprint="x", device_kind=kind)
        return (cfg.model.remat, cfg.data.train_batch_size // cfg.data.microbatches), stored

    words = "--preset gpt2-124m"
    large, of_large = settled(words, 120)
    small, _ = settled(words, 12)
    assert large == ("none", 120) and small == ("attention", 48)
    assert settled(words, 40)[0] == ("dots", 80)
    assert settled(f"{words} --remat full", 120)[0] == ("full", 480)
    assert settled(words, 12, **of_large)[0] == large
    assert settled(words, 12, "Tesla T4", **of_large)[0] == small
    assert settled(f"{words} --remat full", 12, **of_large)[0] == ("full", 120)
    assert settled(f"{words} --train_batch_size 96", 50)[0] == ("none", 48)
    assert settled(f"{words} --train_batch_size 96", 12)[0] == ("attention", 48)
    assert settled(f"{words} --accumulation_steps 2", 12)[0] == ("attention", 48)
    assert settled(f"{words} --train_batch_size 96 --microbatch_size 8", 50)[0] == ("attention", 8)
    few, _ = settled(f"{words} --global_batch_size 8", 8)
    assert few == ("none", 8)


def test_tpus_need_no_loop_where_all_of_a_replica_fits():
    """One microbatch, of which everything is kept where that fits too; not in stages, nor where flags say otherwise."""

    def settled(words, room, n=8):
        """(--remat, accumulation steps, microbatches) of devices with room for so many sequences, kept whole."""

        def share(cfg):
            kept = 1 if cfg.model.remat == "none" else 4
            return cfg.data.train_batch_size / cfg.data.microbatches / room / kept

        found = Found(n, device_kind="TPU v4", memory_share=share)
        cfg = settle.settle(command_line.parse(f"--preset moe1b {words}".split()), found)
        return cfg.model.remat, cfg.run.accumulation_steps, cfg.data.microbatches

    assert settled("", 32) == ("none", 1, 1)  # 256 sequences on 8 replicas
    assert settled("", 8) == ("none", 4, 1)  # steps of 8,192 tokens
    assert settled("--accumulation_steps 1", 8) == ("attention", 1, 4)
    assert settled("", 4) == ("attention", 1, 4)
    assert settled("--n_device_axis 4 2 1", 32) == ("attention", 1, 8)
    assert settled("--microbatch_size 4", 32) == ("attention", 1, 8)
    assert (
        settled("--microbatches 1", 32) == settled("--accumulation_steps 1", 32) == ("none", 1, 1)
    )
    assert settled("--accumulation_steps 2", 16) == ("none", 2, 1)
    assert settled("--train_batch_size 16", 8) == ("attention", 1, 2)
    assert settled("--remat full", 32) == ("full", 1, 4)
    assert settled("--blocks 9", 32) == ("attention", 1, 4)  # 54 layers


def test_a_run_repeated_elsewhere_chooses_what_it_keeps_anew(tmp_path):
    """A file that no run wrote says what to keep, and so does a flag."""
    path = tmp_path / "config.json"
    words = f"--config {path}"

    def remat(words, sequences, kind="NVIDIA H200"):
        """--remat of a device that has room for so many sequences, kept whole."""
        found = Found(1, device_kind=kind, memory_share=lambda cfg: room_taken(cfg) / sequences)
        return settle.settle(command_line.parse(words.split()), found).model.remat

    def room_taken(cfg):
        micro = cfg.data.train_batch_size / cfg.data.microbatches
        return micro / dict(none=1, dots=2).get(cfg.model.remat, 4)

    of_a_run = dict(preset="gpt2-124m", remat="none", data_fingerprint="x")
    path.write_text(json.dumps(of_a_run))
    assert remat(words, 120) == "none"
    assert remat(words, 12) == remat(words, 12, "Tesla T4") == "attention"
    assert remat(words, 1, "TPU v4") == "attention"
    assert remat(f"{words} --remat none", 12) == "none"
    path.write_text(json.dumps(of_a_run | dict(remat="full")))
    assert remat(words, 120) == "none"
    del of_a_run["data_fingerprint"]
    path.write_text(json.dumps(of_a_run))
    assert remat(words, 12) == remat(words, 120, "TPU v4") == "none"


def test_a_mesh_that_cannot_share_the_batch_gets_a_sentence():
    words = "--preset moe-1.6b --n_device_axis 6 1 1"
    mesh = "which dp x pp = 6 of the mesh (dp, pp, tp) = (6, 1, 1) must divide"
    said = (
        f"--preset moe-1.6b has 128 sequences a step, {mesh}",
        "; give --n_devices 4 --n_device_axis 4 1 1.",
    )
    refusal(lambda: divided(words, 6), *said)
    words += " --global_batch_size 9"
    said = (
        "--global_batch_size 9: must be a multiple of dp x pp = 6 ",
        "; give --n_device_axis 3 1 2.",
    )
    refusal(lambda: divided(words, 6), *said)


def test_a_file_of_flags_keeps_its_global_batch_on_another_mesh(tmp_path):
    path = tmp_path / "config.json"
    words = "--preset tiny --n_device_axis 2 1 1 --train_batch_size 12 --microbatches 4"
    cfg = settle.settle(command_line.parse(words.split()), Found(2))
    path.write_text(json.dumps(utils.flatten(cfg) | {"data_fingerprint": "x"}))
    words = f"--config {path}"
    assert divided(words, 2) == divided("--preset tiny --global_batch_size 24", 2)
    assert divided(f"{words} --n_device_axis 4 1 1", 4)["G"] == 24
    assert divided(f"{words} --accumulation_steps 3", 2) == dict(G=24, dp=2, A=3, B=4, val=0, M=1)
    assert divided(f"{words} --train_batch_size 3 --accumulation_steps 2", 2)["G"] == 12
    assert divided(f"{words} --global_batch_size 8", 2)["B"] == 4


# Sensible values of flags where `another` gives none: what alone makes sense in presets of every size.
ALONE = dict(n_head=[2], model_dimension=[96, 1536], blocks=[1, 12], rope_dim=[16], name=["b"])
ALONE |= dict(n_experts=[1, 4, 12], n_groups=[2], preset=list(presets.PRESETS), max_tokens=[1])
ALONE |= dict(train_batch_size=[1, 6, 24], val_batch_size=[1, 6, 24], microbatches=[1, 16])
ALONE |= dict(global_batch_size=[1, 6], microbatch_size=[1, 3], accumulation_steps=[2, 16])
ALONE |= dict(warmup_steps=[0], end_steps=[1, 20, 200_000], profile=["20:22"], n_devices=[1, 4])
ALONE |= dict(n_device_axis=[(4, 1, 1), (1, 1, 2)], pp_interleave=[1], num_processes=[1])
ALONE |= dict(attention=["auto", "xla", "blockwise"], val_tokens=[4096])
# useless alone
TOGETHER = {"process_id", "coordinator", "k_groups", "init_from", "tokenizer", "decay_steps"}
BYTES = SimpleNamespace(eot_token=256, encode_ordinary=lambda text: list(text.encode()))


@pytest.mark.parametrize("preset", ["moe1b", "tiny", "deepseek-tiny", "gpt2-tiny"])
def test_every_flag_alone_works_with_all_defaults(preset, tmp_path, monkeypatch):
    """A sensible value of one flag, on any preset, is refused by nothing that was not given."""
    monkeypatch.chdir(tmp_path)  # no run directory to resume
    default = presets.preset(preset)
    without = architectures.flags_without_choice(default.model.architecture)
    for name in sorted(FIELDS.keys() - TOGETHER - without.keys()):
        for value in ALONE.get(name, [another(name, utils.flatten(default)[name])]):
            cfg = presets.preset(value) if name == "preset" else default
            cfg = utils.replace(cfg, **{name: value})
            if name == "n_experts":  # which has no group of them all
                cfg = utils.replace(cfg, n_groups=1, k_groups=1)
            n_devices = int(np.prod(value)) if name == "n_device_axis" else cfg.run.n_devices or 1
            found = Found(n_devices, is_data_open=True, encoding=BYTES)
            final = settle.settle(Flags(cfg, {name}), found)
            assert settle.settle(Flags(final, {name}), found) == final
            ids = sampling.prompt_ids(final, BYTES)
            assert len(ids) + final.sample.max_tokens <= final.model.T


def test_samples_fit_in_short_sequences_unless_their_length_was_given():
    def fitted(T, *given, **flags):
        cfg = utils.replace(presets.preset("tiny"), T=T, **flags)
        flags = Flags(cfg, {*given})
        fitting = prompt.max_tokens(flags, Found(1, encoding=BYTES))
        cfg = flags.with_defaults(**fitting).cfg
        ids = sampling.prompt_ids(cfg, BYTES)
        return cfg.sample.max_tokens, None if ids is None else ids.tolist()

    whole = [256, *b"class"]
    assert fitted(128) == (64, whole) and fitted(64) == (58, whole) and fitted(7) == (1, whole)
    assert fitted(3) == (1, whole[:2]) and fitted(2) == (1, whole[:1]) and fitted(1) == (64, None)
    assert fitted(8, "max_tokens", max_tokens=6) == (6, whole[:2])
    for given in ("max_tokens", "prompt"):
        refusal(lambda: fitted(5, given), f"--{given}", "--T 5")


@pytest.mark.parametrize("words", ["--preset tiny", "--architecture qwen3", "--preset gpt2-tiny"])
def test_a_rule_settles_the_flags_that_it_names(words):
    """Of a new run, of one that is resumed, and of one that begins with weights."""
    stored = settle.settle(command_line.parse(["--preset", "tiny"]), Found(2))
    weights = vars(stored.model) | dict(n_head=8)
    stored = json.loads(json.dumps(utils.flatten(stored) | dict(data_fingerprint="x")))
    if "--architecture" in words:  # other weights are refused
        weights = {}
    for more in ({}, dict(stored=stored), dict(weights=weights)):
        found = Found(2, shards=little(1800, 200), is_data_open=True, encoding=BYTES, **more)
        flags = command_line.parse(words.split())
        for rule in settle.RULES:
            named = rule.flags.split()
            sections = [vars(getattr(flags.cfg, name)) for name in named if name in utils.GROUPS]
            named = set(named).union(*sections)
            values = rule.values(flags, found)
            assert values.keys() <= named, rule
            flags = settle.apply([rule], flags, found)


def test_an_error_is_worded_with_the_names_that_its_user_knows():
    def error():
        return messages.UserError("must divide {n_head}", flag="n_kv_head", value=5, n_head=8)

    assert str(error()) == "--n_kv_head 5: must divide --n_head 8."
    theirs = error().renamed("a.json", n_kv_head="num_kv_heads", n_head="num_heads")
    assert str(theirs) == "a.json: num_kv_heads 5: must divide num_heads 8."
    assert str(pickle.loads(pickle.dumps(theirs))) == str(theirs), "workers send them"
    assert str(messages.UserError("is {odd}", flag="source", value="a{b}")) == (
        "--source a{b}: is {odd}."
    )
    hidden = messages.UserError("fails", flag="data", value="https://user:word@host/x")
    assert "word" not in str(hidden)


MACHINES = [  # files in /dev, packages, vendor, the accelerator that is found, the platform that is used
    ("", "libtpu jax_cuda12_plugin", "0x10de", "cpu", "cpu"),
    ("/dev/nvidia0", "jax_cuda12_plugin", "0x10de", "gpu", "gpu"),
    ("/dev/nvidia3", "", "0x10de", "gpu", "cpu"),  # jax for it is not installed
    ("/dev/accel0", "libtpu", "0x1ae0", "tpu", "tpu"),
    ("/dev/vfio/0", "libtpu", "0x1ae0", "tpu", "tpu"),
    ("/dev/vfio/0", "libtpu", "0x10de", "cpu", "cpu"),  # of a program
]


@pytest.mark.parametrize("file, packages, vendor, found, used", MACHINES)
def test_accelerators_are_found_before_and_after_jax_is_installed(
    file, packages, vendor, found, used, tmp_path, monkeypatch
):
    def matching(pattern):
        return [tmp_path / "vendor"] if "pci" in pattern else fnmatch.filter([file], pattern)

    (tmp_path / "vendor").write_text(vendor + "\n")
    monkeypatch.setattr(platforms.glob, "glob", matching)
    monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda n: n in packages or None)
    monkeypatch.setattr(platforms, "nvidia_smi_lists_gpus", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert (platforms.accelerator(), platforms.platform()) == (found, used)
    platforms.set_xla_flags(0)
    assert os.environ["JAX_PLATFORMS"] == ("cpu" if found == "cpu" else "")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert (platforms.accelerator(), platforms.platform()) == ("gpu", "gpu")
    platforms.set_xla_flags(0)
    assert os.environ["JAX_PLATFORMS"] == "cuda", "what the user chose"


def test_a_run_directory_holds_what_is_promised(train, tmp_path, byte_ranks):
    flags = dict(vocab_size=260, tokenizer=byte_ranks, prompt="def", max_tokens=9, wandb=True)
    flags |= dict(inference_batch=2, save_steps=4, T=16, blocks=1, microbatches=1)
    assert train(training_steps=6, **flags) == 0
    run = tmp_path / "runs" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert {"tokens_per_second", "data/wait", "bad_steps", "lr", "grad_norm"} < set(row)
        assert row["load/dropped"] == 0
        assert sum(row[f"load/expert_{i}"] for i in range(8)) == pytest.approx(1, abs=1e-5)
    assert len(rows) == 6 and "loss/val_loss" in rows[4]
    assert sorted(os.listdir(run / "checkpoints")) == ["4", "6"]
    samples = (run / "samples.txt").read_text()
    assert re.findall(r"=== step (\d+)", samples) == ["4", "6"]
    assert len(re.findall(r"--- \d\ndef", samples)) == 4
    stored = json.loads((run / "config.json").read_text())
    assert stored["T"] == 16 and set(FIELDS) < set(stored)
    assert train(training_steps=7, **flags) == 0
    ids = {p.name.split("-")[-1] for p in run.glob("wandb/offline-run-*")}
    assert ids == {(run / "wandb_id").read_text()}, "a restart resumes the same wandb run"


def test_widths_are_multiples_of_tp_only_where_it_splits_them():
    """Dense feed-forwards, and all shared experts together, with megatron."""
    of_several = dict(layers_per_block=3, ffn_dim=66)
    megatron = dict(sequence_parallel="megatron")
    words = "must be a multiple of tp with --sequence_parallel megatron"
    for flags, said in [
        (of_several, f"--ffn_dim 66: {words} (4)."),
        (dict(expert_dim=35), f"--expert_dim 35: {words} (4)."),
        (dict(expert_dim=35, n_shared=2), f"35: {words.replace('tp', 'tp / 2')} (2)."),
        (dict(layers_per_block=1, ffn_dim=66, expert_dim=0), f"--ffn_dim 66: {words} (4)."),
        (ARCHITECTURES["gpt2"] | dict(ffn_dim=66), f"--ffn_dim 66: {words} (4)."),
        (dict(layers_per_block=1, ffn_dim=66), ""),
        (dict(expert_dim=35, n_shared=4), ""),
        (dict(expert_dim=35, n_shared=0), ""),
        (ARCHITECTURES["qwen3"] | dict(ffn_dim=66), ""),
    ]:
        small_config((1, 1, 4), **flags)
        if said:
            refusal(lambda: small_config((1, 1, 4), **flags | megatron), said)
        else:
            small_config((1, 1, 4), **flags | megatron)


def test_heads_of_qwen3_that_do_not_fit_are_refused():
    for flags, said in [
        (dict(n_kv_head=3), "--n_kv_head 3: must divide --n_head 8."),
        (dict(n_kv_head=2), "--n_kv_head 2: must be a multiple of tp (4)."),
        (dict(head_dim=7), "--head_dim 7: must be a multiple of 2"),
    ]:
        refusal(lambda: small_config((1, 1, 4), **ARCHITECTURES["qwen3"] | flags), said)


def little(train, val):
    """Shards of so many tokens, as `listing.manifests` lists them."""
    made = {}
    for split, n in (("train", train), ("val", val)):
        made[split] = dict(vocab_size=300, tokens=n, shards=[dict(name="000000.npy", tokens=n)])
    return [("x", f"x/{split}", manifest) for split, manifest in made.items()]


LITTLE = {  # tokens to train on, to validate on, flags, and (T, sequences of a step, of a validation batch)
    (10**6, 10**5, ""): (128, 16, 16),
    (5000, 600, ""): (128, 4, 4),
    (1800, 200, ""): (32, 4, 4),
    (300, 40, ""): (16, 2, 2),
    (60, 20, ""): (16, 1, 1),
    (1800, 200, "--T 64"): (64, 2, 2),
    (1800, 200, "--global_batch_size 16"): (32, 16, 4),
    (10**6, 1000, ""): (128, 16, 4),
    (25_000, 2500, ""): (128, 4, 4),  # 48 steps in an epoch
    (10**6, 10**5, "--preset moe1b --vocab_size 300"): (1024, 16, 16),
}


@pytest.mark.parametrize("train, val, flags", LITTLE)
def test_little_text_makes_a_training_small_and_what_was_given_stays(train, val, flags, capsys):
    T, total, validated = LITTLE[train, val, flags]
    parsed = command_line.parse(f"--preset tiny {flags}".split())
    cfg = settle.settle(parsed, Found(1, shards=little(train, val)))
    got = cfg.model.T, cfg.data.global_batch_size, math.prod(val_batch_shape(cfg))
    assert got == (T, total, validated)
    changed = got != (parsed.cfg.model.T, parsed.cfg.data.global_batch_size, total)
    said = capsys.readouterr().out
    assert ("little text" in said) == changed and "--" not in said


REPEATED = {  # tokens to train on, flags, and (dropout, decay) of a run of `tiny`, which trains on 819,200
    (10**6, ""): (0, 0.4),
    (409_600, ""): (0, 0.4),  # again once, 2.4 parameters for each token
    (300_000, ""): (
        0.04,
        0.4,
    ),  # 1.73 times again, 3.3 for each: 0.02 x 0.2 / 16e-3 is less than 0.4
    (204_800, ""): (0.2, 1.25),
    (10_240, ""): (0.2, 2.5),  # of the rate for 4 sequences a step and not 16, 8e-3
    (204_800, "--dropout_rate 0.3 --weight_decay 0.1"): (0.3, 0.1),
    (204_800, "--max_lr 8e-3"): (0.2, 2.5),
    (204_800, "--training_steps 100"): (0, 0.4),
    (204_800, "--preset gpt2-tiny"): (0.2, 0),  # AdamW keeps its decay
}


@pytest.mark.parametrize("tokens, flags", REPEATED)
def test_what_is_read_many_times_is_not_learned_by_heart(tokens, flags, capsys):
    words = ["--preset", "tiny", *flags.split()]
    own = rates_of(words, Found(1))
    assert TOLD not in capsys.readouterr().out
    now = rates_of(words, found_little(tokens))
    assert now == pytest.approx(REPEATED[tokens, flags], rel=0.01)
    assert (TOLD in capsys.readouterr().out) == (now != own)


def test_other_trainings_keep_their_dropout_and_decay():
    words = ["--preset", "tiny"]
    own = rates_of(words, Found(1))
    assert rates_of(words, found_little(10_000)) != own
    # of an unknown number of tokens, of a mixture, or of weights that know more than this text
    nameless = [(root, folder, {}) for root, folder, _ in little(10_000, 10**5)]
    assert rates_of(words, found_little(10_000, shards=nameless)) == own
    assert rates_of(words, found_little(10_000, shards=2 * little(10_000, 10**5))) == own
    weights = dict(architecture="deepseek", vocab_size=300)
    assert rates_of([*words, "--init_from", "x"], found_little(10_000, weights=weights)) == own
    # a run that is resumed has those with which it began, however long it is now
    began = found_little(500_000)
    stored = utils.flatten(settle.settle(command_line.parse(words), began))
    stored = json.loads(json.dumps(stored | {"data_fingerprint": "x"}))
    longer = [*words, "--training_steps", "4000"]
    assert rates_of(longer, began) != rates_of(words, began)
    resumed = dataclasses.replace(began, stored=stored)
    assert rates_of(longer, resumed) == rates_of(words, began)


def test_training_ends_where_it_would_only_learn_the_text_by_heart(capsys):
    """After four epochs of it, with its schedule; also where the run is resumed."""

    def settled(words, tokens=25_000, **more):
        cfg = settle.settle(command_line.parse(words), found_little(tokens, **more))
        assert cfg.run.eval_every < cfg.run.training_steps
        return cfg

    words = ["--preset", "tiny"]
    cfg = settled(words)
    steps = cfg.run.training_steps
    assert steps == cfg.optimizer.end_steps == round(4 * 25_000 / tokens_per_step(cfg)) < 400
    assert cfg.run.eval_every == cfg.run.save_steps == steps // 10
    assert f"training takes {steps} steps and not 400" in capsys.readouterr().out
    stored = json.loads(json.dumps(utils.flatten(cfg) | {"data_fingerprint": "x"}))
    assert settled(words, stored=stored) == cfg
    # what was given stays
    given = settled([*words, "--training_steps", "300"])
    assert (given.run.training_steps, given.run.eval_every) == (300, 40)
    assert settled([*words, "--eval_every", "7"]).run.eval_every == 7
    # enough text, or too small a model
    assert settled(words, 250_000).run.training_steps == 400
    small = settled(words, active_params=lambda cfg: 5000)
    assert small.run.training_steps == 400 and small.model.dropout_rate == 0


TOLD = "learned by heart"


def found_little(tokens, **more):
    """What is found beside shards of so many tokens and a model of a million parameters."""
    of_text = dict(shards=little(tokens, 10**5), active_params=lambda cfg: 1_000_000) | more
    return Found(1, **of_text)


def rates_of(words, found):
    """(dropout, decay) of a command line."""
    cfg = settle.settle(command_line.parse(words), found)
    return cfg.model.dropout_rate, cfg.optimizer.weight_decay


def test_little_text_makes_the_same_training_on_every_mesh():
    """As long as a batch has a sequence for each device; and a run keeps its own sizes."""
    found = set()
    for mesh in itertools.product((1, 2), repeat=3):
        n = math.prod(mesh)
        words = ["--preset", "tiny", "--n_device_axis", *map(str, mesh), "--n_devices", str(n)]
        cfg = settle.settle(command_line.parse(words), Found(n, shards=little(1800, 200)))
        found.add((cfg.model.T, tokens_per_step(cfg), math.prod(val_batch_shape(cfg))))
    assert found == {(32, 128, 4)}
    stored = json.loads(json.dumps(utils.flatten(cfg) | {"data_fingerprint": "x", "T": 64}))
    again = settle.settle(
        command_line.parse(words), Found(8, stored=stored, shards=little(1800, 200))
    )
    assert again.model.T == 64 and again.data.global_batch_size == 4
