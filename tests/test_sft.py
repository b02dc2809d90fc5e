"""Fine-tuning an exported model on conversations by TRL, with the programs of docs/after-pretraining.md."""

import asyncio
import json
import re
import runpy
import subprocess
import sys
import urllib.request
from types import SimpleNamespace

import pytest
from families import FAMILIES
from helpers import ROOT, free_port, listens, refusal, wait_for
from hf_helpers import exported_run

from inference import weights
from tools import common, hf, sample

torch = pytest.importorskip("torch", reason="pip install torch transformers trl accelerate")
transformers = pytest.importorskip("transformers", reason="pip install transformers")
pytest.importorskip("trl", reason="pip install trl accelerate")

FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = (ROOT / "docs/after-pretraining.md").read_text()
CONVERSATIONS, FINETUNE, CHAT, SERVE = FENCE.findall(PAGE)
(TASK,) = re.findall(r"^```\n(task:.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ASKED = "What is the module json for?"
ANSWERS = {"a?": "yes", "b?": "no", ASKED: "json", "d?": "é!"}
MODELS = {
    "tiny": dict(layers_per_block=2, T=128),
    "qwen3-tiny": FAMILIES["qwen3"].small | dict(blocks=2, T=128),
}


def question(text):
    return [dict(role="user", content=text)]


def test_the_conversations_are_questions_and_answers_on_the_library(tmp_path, monkeypatch):
    (tmp_path / "conversations.py").write_text(CONVERSATIONS)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("conversations.py")
    answers = {}
    for line in (tmp_path / "conversations.jsonl").read_text().splitlines():
        user, assistant = json.loads(line)["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        answers[user["content"]] = assistant["content"]
    assert len(answers) > 100 and "JSON" in answers[ASKED]


@pytest.fixture(scope="module", params=MODELS)
def tuned(request, tmp_path_factory):
    """What the page's finetune.py has in the end: its names, beside the `folder` that it ran in."""
    folder = tmp_path_factory.mktemp(request.param)
    exported_run(folder, MODELS[request.param])
    rows = []
    for text, answer in ANSWERS.items():
        rows.append(dict(messages=[*question(text), dict(role="assistant", content=answer)]))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "conversations.jsonl").write_text(4 * lines)
    (folder / "finetune.py").write_text(FINETUNE)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.argv", ["finetune.py", "exported", "conversations.jsonl", "chat"])
        # several threads wait for each other where other tests run too
        torch.set_num_threads(1)
        torch.manual_seed(0)
        names = runpy.run_path("finetune.py")
        torch.set_num_threads(threads)
    return SimpleNamespace(folder=folder, **names)


def load(folder):
    make = transformers.AutoModelForCausalLM.from_pretrained
    return make(folder, trust_remote_code=True).eval()


def test_the_loss_falls_and_is_of_the_answers_alone(tuned):
    losses = [row["loss"] for row in tuned.trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.1 * losses[0]
    for row in tuned.trainer.train_dataset.select(range(len(ANSWERS))):
        text = row["messages"][0]["content"]
        learned = [token for token in row["labels"] if token != -100]
        assert tuned.tokenizer.decode(learned) == ANSWERS[text] + "<|im_end|>"


def test_the_router_learns_and_its_bias_stays(tuned):
    """Where there is no bias, a loss balances the load."""
    before = load(tuned.folder / "exported").state_dict()
    after = tuned.model.state_dict()
    biases = [name for name in before if "correction_bias" in name]
    assert all(before[name].any() and before[name].equal(after[name]) for name in biases)
    routers = [name for name in before if name.endswith("gate.weight")]
    assert routers and not any(before[name].equal(after[name]) for name in routers)
    balanced = ["aux_loss" in row for row in tuned.trainer.state.log_history[:-1]]
    assert balanced == [not biases] * len(balanced)


def test_what_is_saved_is_what_was_trained(tuned):
    saved = load(tuned.folder / "chat")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert saved(ids).logits.equal(tuned.model.eval()(ids).logits)
    assert saved.config.vocab_size == len(tuned.tokenizer) == 259
    assert saved.lm_head.weight is saved.model.embed_tokens.weight


def test_it_answers_and_stops(tuned, monkeypatch, capsys):
    """In the page's chat.py; in lm_eval, which asks every question that was learned."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed; setup_tpu.sh eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(tuned.folder)
    (tuned.folder / "chat.py").write_text(CHAT)
    monkeypatch.setattr("sys.argv", ["chat.py", ASKED])
    runpy.run_path("chat.py")
    assert capsys.readouterr().out == "json\n"
    (tuned.folder / "tasks").mkdir()
    (tuned.folder / "tasks/library.yaml").write_text(TASK)
    lm = HFLM("chat", dtype="float32", device="cpu", batch_size=2, trust_remote_code=True)
    manager = TaskManager(include_path="tasks", include_defaults=False)
    found = lm_eval.simple_evaluate(
        lm, tasks=["library"], task_manager=manager, apply_chat_template=True, bootstrap_iters=0
    )
    assert found["results"]["library"]["exact_match,none"] == 1


def test_the_server_answers_and_stops(tuned):
    for name in ("fastapi", "openai", "uvicorn"):
        pytest.importorskip(name, reason="pip install 'transformers[serving]'")
    (tuned.folder / "transformers_cli.py").write_text(SERVE)
    port = free_port()
    command = f"transformers_cli.py serve chat --trust-remote-code --port {port}"
    body = json.dumps(dict(model="chat", messages=question(ASKED), temperature=0)).encode()
    about = urllib.request.Request(
        f"http://localhost:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with open(tuned.folder / "serve.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, *command.split()], cwd=tuned.folder, stdout=log, stderr=log
        )
    try:
        wait_for(lambda: server.poll() is not None or listens("localhost", port), 300)
        assert server.poll() is None, (tuned.folder / "serve.log").read_text()
        with urllib.request.urlopen(about, timeout=300) as answer:
            (choice,) = json.load(answer)["choices"]
    finally:
        server.terminate()
        server.wait()
    assert choice["message"]["content"] == "json" and choice["finish_reason"] == "stop"


def test_it_comes_back_as_a_run_and_leaves_as_it_came(tuned, tmp_path, capsys):
    chat, run, again = tuned.folder / "chat", tmp_path / "run", tmp_path / "again"
    hf.import_folder(str(chat), str(run))
    hf.export(str(run), str(again))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert (load(again)(ids).logits - tuned.model.eval()(ids).logits).abs().max() < 1e-4
    ends = [json.loads((at / "generation_config.json").read_text()) for at in (chat, again)]
    for name in ("bos_token_id", "eos_token_id"):
        assert ends[0][name] == ends[1][name], name
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (again / name).read_text() == (chat / name).read_text(), name
    options = common.Sample(model=str(run), prompt=("a",), n_devices=1, compilation_cache="")
    sample.main(options)
    assert "chat template, which is not applied here" in capsys.readouterr().err


def test_the_page_answers_the_tokens_of_a_conversation(tuned, tmp_path):
    for name in ("pydantic", "starlette"):
        pytest.importorskip(name, reason="bash setup_tpu.sh page")
    from tools import completions

    hf.import_folder(str(tuned.folder / "chat"), str(tmp_path / "run"))
    ids = tuned.tokenizer.apply_chat_template(question(ASKED), add_generation_prompt=True)
    about = dict(model="run", prompt=ids["input_ids"], max_tokens=8, temperature=0)
    parameters = completions.read_parameters(json.dumps(about).encode())

    async def choices():
        answer = completions.Engine(1).answer(parameters, str(tmp_path / "run"))
        await answer.next()
        return [piece async for piece in answer.pieces()]

    (piece,) = asyncio.run(choices())
    assert piece["text"] == "json" and piece["finish_reason"] == "stop"


def test_shards_of_the_pretraining_are_refused(tuned, tmp_path):
    root = tuned.folder
    made = dict(tokenizer="bytes.tiktoken", tokenizer_sha256="x", end_of_text=256)
    shards = [(str(root), f"{root}/train", made)]
    chat = str(root / "chat")
    refusal(
        lambda: weights.check_tokenizer(f"--init_from {chat}", chat, shards), "another tokenizer"
    )
