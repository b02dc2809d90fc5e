"""The page of a run, served."""

import contextlib
import threading

import pytest
from helpers import free_port, listens, make_run, wait_for

from tools import page
from tools.completions import Engine

uvicorn = pytest.importorskip("uvicorn", reason="bash setup_tpu.sh page")
SERVED = dict(n_devices=1, training_steps=100)  # of the run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of runs with one, `run`, which has a checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder, **SERVED)
    return folder


@contextlib.contextmanager
def serving(folder):
    """The address of the page of a folder."""
    port = free_port()
    app = page.make_app(page.Runs([str(folder)]), Engine(32))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    threading.Thread(target=server.run, daemon=True).start()
    wait_for(lambda: listens("127.0.0.1", port))
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True


@pytest.fixture(scope="module")
def served(folder):
    with serving(folder) as address:
        yield address
