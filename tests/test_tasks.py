"""Tasks of lm_eval: the scores of its own backend for Hugging Face models, on every mesh; a run that asks."""

import functools
import json
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tokenizers
from families import SMALL_GPT2
from helpers import (
    ROOT,
    assert_bitwise,
    checkpoint_of,
    flags_of,
    free_port,
    metrics_of,
    random_transformer,
    refusal,
    run_with_special_tokens,
    start_main,
)
from safetensors.numpy import load_file
from small_models import given, small_config
from tokenizers import processors

from hf.registry import format_of
from shards import tokenization
from tools import common, evaluate, hf

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed; setup_tpu.sh eval")
from lm_eval.tasks import TaskManager

from inference import tasks

T = 48
# Every token goes to all experts: of two with the same score but for rounding, programs would choose different ones.
ALL_CHOSEN = dict(n_experts=2, experts_per_token=2)
MODELS = {"gpt2": dict(SMALL_GPT2, blocks=2), "own": dict(ALL_CHOSEN, blocks=2, head_dim=12)}
CHOICE = "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: gold\n"
KINDS = {
    "choices": CHOICE + "target_delimiter: ''\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "shots": CHOICE + "num_fewshot: 2\nfewshot_split: test\n",
    "likely": "output_type: loglikelihood\ndoc_to_target: '{{target}}'\ntarget_delimiter: ''\n"
    "metric_list: [{metric: perplexity}, {metric: acc}]\n",
    "pages": "output_type: loglikelihood_rolling\ndoc_to_target: '{{page}}'\n"
    "metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]\n",
    "written": "output_type: generate_until\ndoc_to_target: '{{target}}'\n"
    "generation_kwargs: {until: ['\\n', 'se'], max_gen_toks: 13}\nmetric_list: [{metric: exact_match}]\n",
}


@pytest.fixture(scope="module")
def tasks_folder(tmp_path_factory):
    """Task files with data of their own: texts of all lengths, from one token to far more than T."""
    folder = tmp_path_factory.mktemp("tasks")
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
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\n"
    texts = dict(pages="doc_to_text: ''\n", written="doc_to_text: 'x = {{context}}'\n")
    for name, lines in KINDS.items():
        question = texts.get(name, "doc_to_text: '{{context}}'\n")
        content = f"task: local_{name}\n{data}test_split: test\n{question}{lines}"
        (folder / f"{name}.yaml").write_text(content)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def models(request, tmp_path_factory, text_shards):
    """(run directory of an imported random model, the folder that it is exported to)."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")

    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = tokenization.load_tokenizer(str(text_shards / "tokenizer.tiktoken"))
    tokenizer = hf.byte_level(tokenizer)
    names = dict(bos_token=tokenization.END_OF_TEXT, eos_token=tokenization.END_OF_TEXT)
    if request.param == "own":  # whose tokenizer begins every text with a token
        names["bos_token"] = "<begin>"
        tokenizer.add_special_tokens([tokenizers.AddedToken("<begin>", special=True)])
        begin = ("<begin>", tokenizer.token_to_id("<begin>"))
        post = processors.TemplateProcessing(single="<begin> $A", special_tokens=[begin])
        tokenizer.post_processor = post
    cfg = small_config(T=T, vocab_size=tokenizer.get_vocab_size(), **MODELS[request.param])
    form = format_of(cfg.model.architecture)
    ids = {f"{name}_id": tokenizer.token_to_id(token) for name, token in names.items()}
    theirs = random_transformer(form.config(cfg.model) | ids, folder)
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


def asked(folder, tasks_folder, mesh=(1, 1, 1), **options):
    names = ("local_choices,local_shots", "local_likely,local_pages,local_written")
    flags = dict(model=str(folder), tasks=names, include_path=(str(tasks_folder),), batch_size=2)
    flags |= dict(n_device_axis=mesh, n_devices=int(np.prod(mesh)))
    flags |= dict(model_dtype="float32", compilation_cache="")
    return evaluate.main(common.Evaluate(**flags | options))


@pytest.fixture(scope="module")
def scores_there(models, tasks_folder):
    pytest.importorskip("accelerate", reason="accelerate, which that backend needs, is missing")
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(str(models[1]), dtype="float32", device="cpu", batch_size=4, trust_remote_code=True)
    manager = TaskManager(include_path=str(tasks_folder), include_defaults=False)
    names = manager.all_tasks
    return lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, bootstrap_iters=0)


def answers(found, name):
    """(numbers, texts) that a model answered to a task."""
    leaves = jax.tree.leaves([row["resps"] for row in found["samples"][name]])
    texts = [leaf for leaf in leaves if isinstance(leaf, str)]
    return [float(leaf) for leaf in leaves if not isinstance(leaf, str)], texts


def agree(ours, theirs):
    return np.allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def test_scores_are_those_of_the_backend_for_hugging_face_models(
    models, tasks_folder, scores_there, xla_cache, monkeypatch
):
    """Of an exported GPT-2 on one device, and of an imported model of our own on a mesh."""
    run, exported = models
    folder, mesh = (exported, (1, 1, 1)) if "gpt2" in str(run) else (run, (2, 2, 2))
    with_answers = functools.partial(lm_eval.evaluate, log_samples=True)
    monkeypatch.setattr(tasks, "evaluate", lambda *a, log_samples, **k: with_answers(*a, **k))
    found = asked(folder, tasks_folder, mesh, compilation_cache=str(xla_cache))["tasks"]
    for name, metrics in scores_there["results"].items():
        for key, value in metrics.items():
            if key.endswith(",none") and "stderr" not in key:
                assert abs(found["results"][name][key] - value) <= 1e-4 * max(1, value), (name, key)
        (ours, our_texts), (theirs, texts) = answers(found, name), answers(scores_there, name)
        assert our_texts == texts
        assert agree(ours, theirs), name


def test_the_page_gives_the_backend_for_openais_format_the_same_scores(
    models, tasks_folder, tmp_path, monkeypatch
):
    """From a server, whose limit of T tokens has to hold a drawn token and, of a rolling window, the one before it."""
    for name in ("tenacity", "aiohttp", "starlette", "uvicorn", "plotly"):
        pytest.importorskip(name, reason="lm_eval[api] and bash setup_tpu.sh page")
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from page_helpers import serving

    run, exported = models
    own = "own" in str(run)
    run = shutil.copytree(run, tmp_path / "run")
    config = json.loads((run / "config.json").read_text()) | dict(model_dtype="float32")
    (run / "config.json").write_text(json.dumps(config))
    about = dict(tokenizer=str(exported), tokenizer_backend="huggingface", trust_remote_code=True)
    about |= dict(max_length=T, batch_size=3, add_bos_token=own)
    manager = TaskManager(include_path=str(tasks_folder), include_defaults=False)
    with serving(tmp_path) as address:
        lm = LocalCompletionsAPI(model="run", base_url=f"{address}/v1/completions", **about)
        names = manager.all_tasks
        theirs = lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, bootstrap_iters=0)
    with_answers = functools.partial(lm_eval.evaluate, log_samples=True)
    monkeypatch.setattr(tasks, "evaluate", lambda *a, log_samples, **k: with_answers(*a, **k))
    ours = asked(run, tasks_folder, T=T - 2)["tasks"]
    written = asked(run, tasks_folder, T=T - 1, tasks=("local_written",))["tasks"]
    for name in names:
        found = written if name == "local_written" else ours
        (numbers, texts), (numbers_there, texts_there) = answers(found, name), answers(theirs, name)
        assert texts == texts_there, name
        assert agree(numbers, numbers_there), name
        for key, value in theirs["results"][name].items():
            if key.endswith(",none") and "stderr" not in key:
                # A perplexity is an exponential: what a log-likelihood may differ by above, it differs by relatively.
                assert np.isclose(found["results"][name][key], value, rtol=1e-3), (name, key)


@pytest.mark.parametrize("models", ["gpt2"], indirect=True)
def test_an_answer_ends_at_every_eos_token_id(models, tasks_folder, tmp_path, monkeypatch):
    """Where every token ends it, nothing is left."""
    with_answers = functools.partial(lm_eval.evaluate, log_samples=True)
    monkeypatch.setattr(tasks, "evaluate", lambda *a, log_samples, **k: with_answers(*a, **k))
    folder = shutil.copytree(models[1], tmp_path / "folder")

    def texts(ends):
        (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=ends)))
        found = asked(folder, tasks_folder, tasks=("local_written",), limit=2)["tasks"]
        return answers(found, "local_written")[1]

    assert all(texts(0)) and texts([0, *range(512)]) == ["", ""]


def test_special_tokens_that_are_drawn_are_no_part_of_an_answer(tmp_path):
    run = run_with_special_tokens(tmp_path)
    options = common.Evaluate(model=str(run), n_devices=1, compilation_cache="")
    cfg, mesh, params, encoding = common.open_model(options, text=True)
    model = tasks.TaskModel(cfg, mesh, encoding, 1, T)
    model.params = params
    for until, text in ((["c"], "bé"), ([], "béc")):
        request = SimpleNamespace(args=("a", dict(until=until, max_gen_toks=9)))
        assert model.generate_until([request]) == [text]


def test_a_task_draws_with_the_defaults_of_transformers(named_tokenizers):
    for wanted, temperature, top_k in [
        (dict(), 0.0, 50),
        (dict(do_sample=False, temperature=0.7), 0.0, 50),
        (dict(do_sample=True, temperature=None, top_k=None, top_p=1.0), 1.0, 50),
        (dict(temperature=0.3, top_k=5), 0.3, 5),
    ]:
        options, _ = tasks.sampling_settings(wanted, tokenization.load_tokenizer("gpt2"))
        assert (options.temperature, options.top_k) == (temperature, top_k)


def flags_of_run(tasks_folder, shards, **flags):
    own = given("--vocab_size 512 --T 32 --eval_every 1 --save_steps 2 --eval_tasks_limit 3")
    own |= dict(eval_tasks=f"local_choices,{tasks_folder},local_written", data=shards)
    return SMALL_GPT2 | own | flags  # which compiles in a third of the time


def test_a_run_that_asks_is_the_same_run(train, tmp_path, tasks_folder, text_shards):
    flags = flags_of_run(tasks_folder, text_shards, training_steps=3, pp_interleave=2)
    flags["mesh"] = (1, 2, 1)
    assert train(**flags, name="asking") == 0
    assert train(**{n: v for n, v in flags.items() if "tasks" not in n}, name="other") == 0
    runs = tmp_path / "runs"
    assert_bitwise(checkpoint_of(runs / "other", 3), checkpoint_of(runs / "asking", 3))
    names = {"local_choices/acc", "local_choices/acc_norm", "local_written/exact_match"}
    names = {f"tasks/{name}" for name in names}
    found = {}
    for row, other in zip(metrics_of(runs / "asking"), metrics_of(runs / "other"), strict=True):
        assert row | other == row and row.keys() - other.keys() in (set(), names)
        found[row["step"]] = {name: row[name] for name in names & row.keys()}
    assert [step for step, scores in found.items() if scores] == [2, 3]
    same = dict(tasks=("local_choices,local_written",), limit=flags["eval_tasks_limit"])
    assert found[3] == tasks.metrics_of(asked(runs / "asking", tasks_folder, **same)["tasks"])


def test_two_processes_are_asked_together(tasks_folder, text_shards, run_flags, tmp_path):
    flags = flags_of_run(tasks_folder, text_shards, training_steps=1, max_tokens=4, blocks=1)
    flags |= dict(num_processes=2, coordinator=f"127.0.0.1:{free_port()}")
    flags["eval_tasks"] = f"local_choices,{tasks_folder}"
    words = ["--preset", "tiny", *flags_of(**run_flags((2, 1, 1), **flags))]
    started = [start_main([*words, f"--process_id={i}"]) for i in range(2)]
    said = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    ours, theirs = (re.search(r"tasks at step 1\b.*", text)[0] for text in said)
    assert ours == theirs and "local_choices/acc" in ours, said
    assert "tasks/local_choices/acc" in metrics_of(tmp_path / "runs/run")[-1]


def test_mistakes_get_a_sentence(tasks_folder, tmp_path, named_tokenizers, monkeypatch):
    def few(include_path, **_):  # lm_eval's own tasks take it seconds to read
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(tasks, "TaskManager", few)
    lines = "task: gone\ndataset_path: json\ndataset_kwargs: {data_files: {test: gone.jsonl}}\n"
    (tmp_path / "gone.yaml").write_text(f"{lines}test_split: test\ndoc_to_text: a\n")
    lm = SimpleNamespace(encoding=tokenization.load_tokenizer("gpt2"), T=12)
    for name, folder, *parts in [
        (",", tasks_folder, "--tasks", "names no task"),
        ("local_choice", tasks_folder, "--tasks local_choice", "nearest is local_choices"),
        ("local_choices", "nowhere", "--include_path nowhere", "no such folder"),
        ("gone", tmp_path, "--tasks gone", "gone.jsonl"),
        ("local_written", tasks_folder, "local_written asks for 13", "--T 12"),
    ]:
        refusal(lambda: tasks.load_tasks([name], [str(folder)], lm), *parts)


@pytest.mark.parametrize("models", ["gpt2"], indirect=True)
def test_llama_cpp_has_a_place_for_each_tensor(models):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    names = list(load_file(models[1] / "model.safetensors"))
    places = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 2)
    found = {places.get_name(name, (".weight", ".bias")) for name in names}
    assert None not in found and len(found) == len(names)
