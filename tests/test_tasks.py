"""Tasks of lm_eval: the scores of its own backend for Hugging Face models, on every mesh; CORE; a run that asks."""

import functools
import json

import numpy as np
import pytest
import tokenizers
from conftest import ROOT, SMALL_GPT2, small_config, train_small_tokenizer
from tokenizers import processors

from data import tokenization
from tools import common, evaluate, hf

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed; setup_tpu.sh eval")
from lm_eval.tasks import TaskManager

from tools import tasks

T = 48
DEEPSEEK = dict(
    tied=False,
    layers_per_block=1,
    moe_rope=True,
    embedding_norm=False,
    latent_conv=0,
    blocks=2,
    first_layers=1,
    q_latent_dim=18,
    n_groups=4,
    k_groups=2,
    experts_per_token=3,
    routed_scaling=2.5,
)
MODELS = {"gpt2": dict(SMALL_GPT2, blocks=2), "deepseek": DEEPSEEK}
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
