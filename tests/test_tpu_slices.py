"""How a process finds the other hosts of its TPU slice, with a metadata server like that of a TPU VM."""

import contextlib
import http.server
import os
import threading

import pytest
from jax._src import cloud_tpu_init, clusters
from jax._src.clusters import cloud_tpu_cluster

import utils
from runtime import launchers, processes

pytest.importorskip("requests")  # by which jax asks the metadata server

# The beginning of what Google answers for an attribute that does not exist.
NOT_FOUND = "<!DOCTYPE html><style>*{margin:0;padding:0}html,code{font:15px/22px arial,sans-serif}"
MULTISLICE = (
    "MEGASCALE_COORDINATOR_ADDRESS: '127.0.0.1'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'"
)


@contextlib.contextmanager
def metadata_server(attributes):
    """Serve {name: text} as attributes of the VM; yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = attributes.get(self.path.rsplit("/", 1)[1])
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or NOT_FOUND).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def vm(monkeypatch):
    """A TPU VM, host 1 of a slice of two: the attributes of its metadata server, which jax asks."""
    for name in [*launchers.OVER_METADATA, *launchers.NUMBERS, "KUBERNETES_SERVICE_HOST"]:
        monkeypatch.delenv(name, raising=False)
    for module in (cloud_tpu_init, cloud_tpu_cluster):
        monkeypatch.setattr(module, "running_in_cloud_tpu_vm", True)
    endpoints = "unknown:unknown:127.0.0.1,unknown:unknown:127.0.0.2"
    attributes = {"agent-worker-number": "1", "worker-network-endpoints": endpoints, "tpu-env": ""}
    with metadata_server(attributes) as address:
        monkeypatch.setenv("GCE_METADATA_IP", address)
        yield attributes


def found():
    """(address of process 0, number of processes, number of this one) as jax finds them."""
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, 10
    )[:3]


@pytest.fixture
def joined(monkeypatch):
    """A list that gets what jax finds, each time that `jax.distributed.initialize` would connect."""
    calls = []
    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda **_: calls.append(found()))
    monkeypatch.setattr(processes, "METADATA_PAUSE", 0)
    return calls


def connect(**flags):
    processes.connect(utils.Run(**flags))


def test_jax_listens_on_the_port_that_googles_firewall_opens(vm, joined, monkeypatch, capsys):
    assert found()[0] == "127.0.0.1:8482", "jax chooses another port by itself; is TPU_PORT needed?"
    connect()
    vm["tpu-env"] = MULTISLICE
    connect()
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "4711")  # what the user has set wins
    connect()
    assert joined == [
        ("127.0.0.1:8476", 2, 1),
        ("127.0.0.1:8476", 4, 3),  # process 1 of slice 1
        ("127.0.0.1:4711", 4, 3),
    ]
    assert "note" not in capsys.readouterr().out


def test_variables_of_an_earlier_slice_are_named(vm, joined, monkeypatch, capsys):
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "4")
    connect()
    assert joined == [("127.0.0.1:8476", 8, 1)]
    assert "note: MEGASCALE_NUM_SLICES=4 in the environment" in capsys.readouterr().out
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # which sets them itself
    connect()
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"])
def test_a_tpu_of_one_host_needs_no_others(vm, joined, monkeypatch, name):
    monkeypatch.setenv(name, "local")
    connect()
    assert joined == []
    del vm["agent-worker-number"]  # as in Kubernetes, where these variables are all that jax has
    monkeypatch.setenv(name, "127.0.0.1,127.0.0.2")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    connect()
    assert joined == [("127.0.0.1:8476", 2, 0)]


def test_metadata_that_is_not_there_yet_is_waited_for(vm, joined, monkeypatch, capsys):
    """A VM that was just created: no server at first, then a server without the number, then one with it."""
    address = os.environ["GCE_METADATA_IP"]
    late = {"worker-network-endpoints": vm.pop("worker-network-endpoints")}
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")
    steps = iter([lambda: monkeypatch.setenv("GCE_METADATA_IP", address), lambda: vm.update(late)])
    said = []

    def say(words):
        said.append(words)
        next(steps)()

    monkeypatch.setattr(processes, "say", say)
    connect()
    assert joined == [("127.0.0.1:8476", 2, 1)]
    assert len(said) == 2 and all("waiting for the metadata of this TPU VM" in it for it in said)
