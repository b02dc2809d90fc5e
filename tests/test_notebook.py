"""The notebook: stripped in git, and run top to bottom as on a session that is lost in its middle and a later one."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers import ROOT, XLA_FLAGS, copy_repository

nbformat = pytest.importorskip("nbformat", reason="bash setup_tpu.sh notebook")
nbclient = pytest.importorskip("nbclient", reason="bash setup_tpu.sh notebook")
pytest.importorskip("ipykernel", reason="bash setup_tpu.sh notebook")

PATH = ROOT / "notebooks" / "train_on_a_free_accelerator.ipynb"
STEPS = 40
# few and small steps of deepseek-tiny
FLAGS = f"""--preset deepseek-tiny --vocab_size 2048 --model_dimension 32 --blocks 1 --n_experts 8 --T 32
--global_batch_size 8 --training_steps {STEPS} --end_steps {STEPS} --warmup_steps 4 --save_steps 5 --eval_every 20
--eval_steps 1 --max_tokens 4""".split()


def notebook():
    return nbformat.read(PATH, as_version=4)


def test_outputs_are_stripped():
    cells = [cell for cell in notebook().cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


def test_the_place_is_known_with_and_without_packages_of_google(tmp_path):
    """-S leaves out what is installed: many machines have no package google at all."""
    (cell,) = [cell for cell in notebook().cells if "drive.mount" in cell.source]
    code = f"STORAGE = ''\n{cell.source}\nprint(STORAGE or 'its own')"

    def storage():
        words = [sys.executable, "-S", "-c", code]
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout

    assert "content/drive" not in storage()
    (tmp_path / "google").mkdir()
    assert "content/drive" not in storage()
    (tmp_path / "google/colab").mkdir()
    (tmp_path / "google/colab/drive.py").write_text("mount = print")
    assert storage() == "/content/drive\n/content/drive/MyDrive/moe-pretraining\n"


def session(origin, storage, machine, monkeypatch, devices=1):
    """A client that runs the notebook in the folder `machine`, where nothing is; only `storage` outlives it. devices:
    that jax finds there."""
    machine.mkdir()
    monkeypatch.setenv("VENV", sys.prefix)
    simulated = f"--xla_force_host_platform_device_count={devices}"
    monkeypatch.setenv("XLA_FLAGS", f"{XLA_FLAGS} {simulated}")
    book = notebook()
    tags = [cell.metadata.get("tags", []) for cell in book.cells]
    given = dict(REPOSITORY=f"file://{origin}", STORAGE=str(storage), SECONDS=1, FLAGS=FLAGS)
    lines = "\n".join(f"{name} = {value!r}" for name, value in given.items())
    book.cells.insert(tags.index(["parameters"]) + 1, nbformat.v4.new_code_cell(lines))
    path = {"metadata": {"path": str(machine)}}
    return nbclient.NotebookClient(book, timeout=1800, kernel_name="python3", resources=path)


def lose(client, run):
    """Kill the notebook's kernel and all that it started, once the run has a checkpoint."""
    while not any(path.name.isdigit() for path in run.glob("checkpoints/*")):
        time.sleep(0.1)
    os.killpg(client.km.provisioner.pid, signal.SIGKILL)


def test_a_lost_session_resumes_in_the_next(tmp_path, monkeypatch):
    """With the design of the first, though the next has other devices."""
    origin, storage = tmp_path / "origin", tmp_path / "drive"
    copy_repository(origin, "docs")
    commands = "git init -q && git add . && git -c user.name=x -c user.email=x commit -qm all"
    subprocess.run(commands, shell=True, cwd=origin, check=True)
    run, design = storage / "first-on-cpu", storage / "first-on-cpu.json"
    first = session(origin, storage, tmp_path / "first", monkeypatch)
    threading.Thread(target=lose, args=(first, run), daemon=True).start()
    with pytest.raises(nbclient.exceptions.DeadKernelError):
        first.execute()
    assert not (run / f"checkpoints/{STEPS}").exists()
    designed = json.loads(design.read_text())
    assert designed["training_steps"] == STEPS and designed["optimizer"] == "muon"
    designed["design"]["machine"] = "gpu:1xT4"
    design.write_text(json.dumps(designed))
    second = session(origin, storage, tmp_path / "second", monkeypatch, devices=2)
    second.execute()
    log = (tmp_path / "second" / "moe-pretraining" / "train.log").read_text()
    assert "which ended without releasing it" in log and "resuming first-on-cpu at step" in log
    assert "mesh (dp, pp, tp) = (2, 1, 1)" in log
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    outputs = [out for cell in second.nb.cells for out in cell.get("outputs", [])]
    said = "".join(out.get("text", "") for out in outputs)
    assert f"done at step {STEPS}" in said and "def " in said
    assert "the design of first-on-cpu, for 0.17 hours of gpu:1xT4; 2 x cpu trains it" in said
    assert any("image/png" in out.get("data", {}) for out in outputs)
    exported = tmp_path / "second" / "moe-pretraining" / "exported"
    assert {"config.json", "tokenizer.json"} <= set(os.listdir(exported))
