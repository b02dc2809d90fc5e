"""Models of the Hugging Face hub, from a local cache in the hub's own layout."""

import functools
import os
import shutil
from types import SimpleNamespace

import pytest
from families import ARCHITECTURES
from helpers import refusal
from hf_helpers import exported_run, params_of, same
from huggingface_hub import constants

from hf import hub, pretrained
from inference import weights
from runtime.files import write_json
from tools import common, hf, sample

COMMIT = "1" * 40


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return exported_run(tmp_path_factory.mktemp("hub"), ARCHITECTURES["deepseek"])


@pytest.fixture
def cached(exported, tmp_path, monkeypatch):
    """`cached(repository)`: the model as the hub's cache holds it, without a network; returns its folder there."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "folder_of", functools.cache(hub.folder_of.__wrapped__))
    monkeypatch.chdir(tmp_path)

    def cached(repository):
        place = tmp_path / "cache" / f"models--{repository.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs/main").write_text(COMMIT)
        return shutil.copytree(exported[2], place / "snapshots" / COMMIT)

    return cached


def test_a_model_of_the_hub_is_the_folder_in_its_cache(exported, cached, tmp_path):
    cached("org/name")
    cfg, run, folder = exported
    ours = params_of(run, cfg)
    for name in ("hf://org/name", "hf://org/name@main", f"hf://org/name@{COMMIT}"):
        assert same(params_of(name, cfg), ours)
    hf.main(hf.Options(command="import", source="hf://org/name", target=str(tmp_path / "imported")))
    assert same(params_of(tmp_path / "imported", cfg), ours)
    flags = dict(prompt=("text",), temperature=0.0, max_tokens=8, n_devices=1)
    texts = [
        sample.main(common.Sample(model=m, **flags))[0].text for m in ("hf://org/name", str(folder))
    ]
    assert texts[0] == texts[1]


def test_a_gpt2_needs_no_prefix_unless_a_folder_is_called_so(cached):
    place = cached("gpt2")
    assert hub.folder_of("gpt2") == str(place) == hub.download("gpt2")
    os.mkdir("gpt2-xl")
    assert hub.is_on_hub("gpt2-medium") and not hub.is_on_hub("gpt2-xl")
    refusal(lambda: weights.open_weights("gpt2-large"), "gpt2-large: is not in the hub's cache")


def test_weights_are_fetched_when_they_are_loaded(exported, cached):
    """A plan needs config.json alone; without weights and network one sentence says so."""
    os.remove(cached("org/name") / "model.safetensors")
    flags, load = weights.open_weights("hf://org/name")
    assert flags["model_dimension"] == exported[0].model.model_dimension
    refusal(lambda: load(None), "hf://org/name: is not in")


def test_the_whole_file_is_fetched_where_there_are_others_too(cached, monkeypatch):
    """As transformers chooses; only the hub knows of it before it is there. generation_config.json, which has the ends
    of text, is fetched with what describes the model."""
    folder, asked = cached("org/name"), []
    os.remove(folder / pretrained.WHOLE)
    write_json(f"{folder}/{pretrained.INDEX}", dict(weight_map={"a": "1.safetensors"}))

    def ask(name, method, revision=None, files_metadata=False, allow_patterns=None):
        asked.append(allow_patterns)
        if not files_metadata:
            return str(folder)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f, size=1) for f in there])

    monkeypatch.setattr(hub, "ask", ask)
    assert hub.folder_of("hf://org/name") == str(folder)
    assert {"config.json", "generation_config.json"} < {*asked.pop()}
    for there in (["1.safetensors"], ["1.safetensors", pretrained.WHOLE]):
        hub.download("hf://org/name")
        assert asked.pop() == there[-1:]


HINTS = {
    "hf://org/other": "is not in the hub's cache",
    "hf://a/b/c": "no such model",
    "hf://": "hf://ORGANISATION/NAME",
    "org/name": "is hf://org/name",
    "resume": "rerun the same command",
    "scratch": "begins with random weights",
}


@pytest.mark.parametrize("name", HINTS)
def test_a_name_that_is_none_gets_a_sentence(name, cached):
    refusal(lambda: weights.open_weights(name), name, HINTS[name])
