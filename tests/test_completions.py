"""Completions in OpenAI's format: each answer is that of its request alone, and what is malformed is refused."""

import asyncio
import contextlib
import json
import re
import shutil
import socket
import threading
import tracemalloc
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax
import numpy as np
import pytest

pytest.importorskip("starlette", reason="bash setup_tpu.sh page")
from helpers import DRAWN, make_run, run_with_special_tokens
from page_helpers import SERVED, serving
from page_helpers import folder as folder
from page_helpers import served as served

from inference import decoding
from runtime.files import read_json, write_json
from tools import completions, page

JSON = {"Content-Type": "application/json"}


def post(address, body, headers=JSON):
    """(status, answer) of a body, bytes or what becomes JSON."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        request = urllib.request.Request(f"{address}/v1/completions", body, headers)
        answer = urllib.request.urlopen(request, timeout=60)
        return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def asked(i, **more):
    few = dict(max_tokens=3 + i % 17, temperature=0, logprobs=2)
    return dict(model="run", prompt="abcdefgh"[: i % 9] + "xyz"[: i % 4], n=1 + i % 2) | few | more


def test_concurrent_answers_are_those_of_each_request_alone(served, folder):  # noqa: F811
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    alone = [post(served, asked(i)) for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda i: post(served, asked(i)), range(32)))
    for (status, one), (_, other) in zip(alone, together):
        assert status == 200 and one["choices"] == other["choices"]
        assert one["usage"] == other["usage"]
        assert len({choice["text"] for choice in one["choices"]}) == 1
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert len({one["choices"][0]["text"] for _, one in alone}) > 8


def expected(tmp_path, tokens):
    """log p of all tokens after each of the `tokens`, [n, V], by the model that is served."""
    _, cfg, mesh, params = make_run(tmp_path, **SERVED)
    ids, lengths = decoding.pad([tokens], len(tokens))
    decode = jax.jit(decoding.make_decode(cfg, mesh))
    cache = decoding.empty_cache(cfg, 1, len(tokens))
    zero = np.zeros(1, np.int32)
    rows = [decode(params, ids, cache, zero, zero + last)[0] for last in range(len(tokens))]
    return np.asarray(jax.nn.log_softmax(np.concatenate(rows)))


def test_probabilities_are_those_of_the_model(served, tmp_path):  # noqa: F811
    likely = expected(tmp_path, [256, *b"ba"])[-1]
    for prompt in ("ba", [256, 98, 97]):
        _, answer = post(served, asked(0, prompt=prompt, logprobs=5))
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        likeliest = sorted(found["top_logprobs"][0].values())
        assert np.allclose(likeliest, np.sort(likely)[-5:], atol=1e-4)
        assert found["token_logprobs"][0] == likeliest[-1]
        assert "".join(found["tokens"]) == choice["text"] and found["text_offset"] == [0, 1, 2]


def told(served, **more):  # noqa: F811
    """(its choice, the log p of its tokens, its usage) of an answer with one choice."""
    status, answer = post(served, dict(model="run", temperature=0, logprobs=1) | more)
    assert status == 200, answer
    (choice,) = answer["choices"]
    return choice, choice["logprobs"]["token_logprobs"], answer["usage"]


def test_an_echo_tells_how_likely_the_prompt_is(served, tmp_path):  # noqa: F811
    """Nothing is before token ids, and the end-of-text token before the tokens of a text, which are all listed."""
    text = "a\u00e9\u8a9e b"
    ids = [*text.encode()]
    likely = expected(tmp_path, [256, *ids])
    right = [*likely[range(len(ids)), ids]]
    for prompt, none in (([256, *ids], [None]), (text, [])):
        for n in (0, 1, 3):
            choice, found, usage = told(served, prompt=prompt, max_tokens=n, echo=True)
            assert found[: len(none)] == none and len(found) == len(none + right) + n
            assert np.allclose(found[len(none) : len(none + right)], right, atol=1e-4)
            assert usage["completion_tokens"] == n and usage["prompt_tokens"] == 1 + len(ids)
            told_of = choice["logprobs"]
            assert told_of["top_logprobs"][: len(none)] == none
            pairs = [*zip(found, told_of["top_logprobs"])][len(none) :]
            for (own, others), row in zip(pairs, likely):
                assert own in others.values() and np.allclose(
                    max(others.values()), row.max(), atol=1e-4
                )
                assert len(others) == 1 + (own < max(others.values()))
            if not none:
                assert choice["text"].startswith(text) and (choice["text"] == text) == (n == 0)
                assert told_of["text_offset"][: len(ids)] == [0, 1, 1, 2, 2, 2, 3, 4]


def test_an_echo_has_every_token_of_the_prompt_and_one_that_was_drawn(folder, tmp_path):  # noqa: F811
    """Also where that ends the text at once: programs count them from either end."""
    run = shutil.copytree(folder / "run", tmp_path / "run")
    config = read_json(str(run), "config.json")
    write_json(f"{run}/config.json", config | dict(eos_token_id=[*range(257)]))
    about = dict(model="run", prompt=[*b"\xe8\xaa\x9ea\xe8"], max_tokens=1, echo=True, logprobs=1)
    asked_for = completions.read_parameters(json.dumps(about).encode())

    async def choices():
        answer = completions.Engine(2).answer(asked_for, str(run))
        await answer.next()
        return [piece async for piece in answer.pieces()]

    (piece,) = asyncio.run(choices())
    assert piece["text"] == "\u8a9ea\ufffd" and piece["finish_reason"] == "stop"
    assert all(len(values) == 6 for values in piece["logprobs"].values())


def test_special_tokens_that_are_drawn_have_probabilities_and_no_text(tmp_path):
    """Streamed or not. In a prompt that is echoed they are shown."""
    run_with_special_tokens(tmp_path)
    about = dict(model="run", temperature=0, logprobs=0, max_tokens=len(DRAWN))
    with serving(tmp_path) as address:
        (choice,) = post(address, about | dict(prompt="a"))[1]["choices"]
        body = json.dumps(about | dict(prompt="a", stream=True)).encode()
        request = urllib.request.Request(f"{address}/v1/completions", body, JSON)
        lines = urllib.request.urlopen(request, timeout=60).read().decode().split("\n\n")
        echoed = about | dict(prompt=[97, 257], max_tokens=2, echo=True)
        (echo,) = post(address, echoed)[1]["choices"]
    pieces = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert choice["text"] == "".join(piece["text"] for piece in pieces) == "béc"
    for key, values in [
        ("tokens", ["<pad>", "b", "\ufffd", "<mark>", "\ufffd", "c", "<|endoftext|>"]),
        ("text_offset", [0, 0, 1, 1, 1, 2, 3]),
    ]:
        assert choice["logprobs"][key] == values, key
        assert sum((piece["logprobs"][key] for piece in pieces), []) == values, key
    assert echo["text"] == "a<pad>b\ufffd"
    assert echo["logprobs"]["text_offset"] == [0, 1, 6, 7]


def test_few_tokens_are_the_first_of_many(served):  # noqa: F811
    """Nothing is advanced for one token or none; others may be drawn meanwhile."""
    _, answer = post(served, asked(16) | dict(n=1))
    (whole,) = answer["choices"]
    for n in (0, 1, 2):
        (few,) = post(served, asked(16) | dict(n=1, max_tokens=n))[1]["choices"]
        # A character that was cut within its bytes ends as a replacement character.
        assert whole["text"].startswith(few["text"].rstrip("\ufffd"))
        assert few["finish_reason"] == "length"
        for key, values in few["logprobs"].items():
            assert values == whole["logprobs"][key][:n], key


def test_a_nucleus_is_drawn_from_and_changes_no_other_row():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (64, 50)).astype(np.float32)
    how = completions.settings(64, temperature=1.5, top_p=0.6, seed=1)
    how["seed"] = np.arange(64, dtype=np.uint32)
    how["top_p"][::2] = 1
    how["top_p"][1] = 0
    drawn = set()
    alone = dict(how, top_p=np.ones(64, np.float32))
    scaled = logits / 1.5
    order = np.argsort(-scaled, -1)
    p = np.take_along_axis(np.asarray(jax.nn.softmax(scaled)), order, -1)
    sizes = (np.cumsum(p, -1) < 0.6).sum(-1) + 1
    for _ in range(40):
        (tokens, *_), how = completions.draw(logits, how, None)
        (others, *_), alone = completions.draw(logits, alone, None)
        assert np.array_equal(tokens[::2], others[::2])
        places = [int(np.flatnonzero(row == token)[0]) for row, token in zip(order, tokens)]
        assert all(place < size for place, size in zip(places[3::2], sizes[3::2]))
        assert places[1] == 0, "the likeliest stays"
        drawn |= {(row, place) for row, place in enumerate(places) if row % 2}
    assert len(drawn) > sizes[3::2].sum() * 0.9, "all of the nucleus is drawn"


def test_draws_depend_on_the_seed_alone(served):  # noqa: F811
    def text(**more):
        return post(served, asked(16, temperature=1, **more))[1]["choices"][0]["text"]

    first, again, other = text(seed=1), text(seed=1, n=8), text(seed=-2)
    assert first == again != other
    whole = text(seed=1, logprobs=None)
    stopped = post(served, asked(16, temperature=1, seed=1, stop=[whole[2:4]]))[1]["choices"][0]
    assert stopped["text"] == whole[:2] and stopped["finish_reason"] == "stop"


def test_a_choice_ends_at_every_eos_token_id(folder, tmp_path):  # noqa: F811
    run = shutil.copytree(folder / "run", tmp_path / "run")
    asked_for = completions.read_parameters(json.dumps(asked(16, logprobs=None)).encode())

    async def choices():
        answer = completions.Engine(2).answer(asked_for, str(run))
        await answer.next()
        return [piece async for piece in answer.pieces()]

    (whole,) = asyncio.run(choices())
    end = next(letter for letter in whole["text"] if letter.isascii())  # others are parts of bytes
    config = read_json(str(run), "config.json") | dict(eos_token_id=[256, ord(end)])
    write_json(f"{run}/config.json", config)
    (piece,) = asyncio.run(choices())
    assert piece["text"] == whole["text"].split(end)[0] != whole["text"]
    assert piece["finish_reason"] == "stop" and whole["finish_reason"] == "length"


# A parameter and values of it, as JSON without spaces
WRONG = """
model             null 1 "other" "../run" [] {}
prompt            null 1 [] {} [1,"a"] [[]] [["a"]] [true] [-1] [257] [1.5] [1099511627776] ["a",1]
max_tokens        -1 "3" 1.5 true [] 99 1000000000 1e3 10000000000000000000000000000000
temperature       -0.1 2.1 "0" [] true NaN Infinity -Infinity 1e999
n                 0 -1 129 "1" 1.5 true
seed              "1" 1.5 9223372036854775808 [] true
logprobs          -1 6 true "1" 1.5
stop              "" 1 [""] [1] ["a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a"] {}
stream            "yes" 1 0 []
stream_options    {} {"include_usage":true} true []
echo              1 "no"
best_of           2 0 "1"
top_p             -0.1 2 "1" true NaN
suffix            "x" 1
logit_bias        {"1":2} [] 1
presence_penalty  1 "0" []
frequency_penalty -1 {} "a"
user              1 []
messages          [] "a"
best              1
"""
BODIES = [b"", *b'{ [] null 1 "a" {}{}'.split(), b"\xff", b"[" * 10**5]
BODIES += [b"x" * (2**20 + 1), b"x" * 2**23]


def test_what_is_malformed_is_refused(served):  # noqa: F811
    bodies = [*BODIES]
    for name, *values in map(str.split, WRONG.strip().splitlines()):
        good = json.dumps(asked(0) | {name: "*"})
        bodies += [good.replace('"*"', value).encode() for value in values]
    assert len(bodies) >= 100
    for body in bodies:
        status, answer = post(served, body)
        error = answer["error"]
        assert 400 <= status < 500 and error["type"] == "invalid_request_error", (body, status)
        assert error["message"][-1] == "." and "\n" not in error["message"], error
    streamed = asked(0) | dict(stream=True)
    for options in (dict(include_usage=1), dict(more=True), [], True):
        status, answer = post(served, streamed | dict(stream_options=options))
        assert status == 400 and "stream_options cannot be used" in answer["error"]["message"]
    harmless = dict(top_p=1.0, echo=False, stop=None, best_of=2, n=2, suffix="", logit_bias={})
    assert post(served, asked(0) | harmless)[0] == 200


def test_only_json_of_no_other_site_is_answered(served):  # noqa: F811
    """What another site's page makes a browser send names that site, or is no JSON."""
    port = served.rpartition(":")[2]
    own = dict(Origin=f"http://127.0.0.1:{port}")
    utf8 = {"content-type": "Application/JSON; charset=utf-8"}
    for headers in (JSON, JSON | own, utf8):
        assert post(served, asked(1), headers)[0] == 200, headers
    for origin in ("http://other.example", "null", f"http://localhost:{port}", "http://127.0.0.1"):
        status, answer = post(served, asked(1), JSON | dict(Origin=origin))
        assert status == 403 and "Another site's page" in answer["error"]["message"]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""):
        status, answer = post(served, asked(1), {"Content-Type": kind})
        assert status == 415 and "application/json" in answer["error"]["message"]


def send(served, head, piece=b""):  # noqa: F811
    """What the page answers to a request whose head is whole and whose body goes on for ever, if it has a `piece`."""
    host, port = served.removeprefix("http://").split(":")
    with socket.create_connection((host, port), 60) as connection:
        words = "POST /v1/completions HTTP/1.1", f"Host: {host}", *head, "", ""
        connection.sendall("\r\n".join(words).encode())
        with contextlib.suppress(OSError):  # it no longer listens
            while piece:
                connection.sendall(piece)
        return connection.recv(2**16).decode()


def test_a_body_is_no_larger_in_memory_than_it_may_be(served, monkeypatch):  # noqa: F811
    """One that has a length is refused unread, one that has none as soon as it is too long."""
    monkeypatch.setattr(page, "DRAINED", 2**21)
    assert " 413 " in send(served, [f"Content-Length: {2**40}"])
    tracemalloc.start()
    chunk = b"%x\r\n%s\r\n" % (2**16, b"x" * 2**16)
    with contextlib.suppress(OSError):  # its answer may be lost with what it has not read
        assert " 413 " in send(served, ["Transfer-Encoding: chunked"], chunk)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**23
    assert post(served, asked(1))[0] == 200


class Panic(BaseException):
    """As those of Rust that pyo3 raises."""


def test_no_request_ends_the_engine(served, folder, monkeypatch, capsys):  # noqa: F811
    """Nor a whole batch; where its thread has ended, another one answers."""
    spaces = dict(prompt=" " * 1_000_500)  # of which tiktoken panics
    status, answer = post(served, asked(1) | spaces)
    assert status == 400 and "more than the 32 tokens" in answer["error"]["message"]
    for name in ("token_ids", "draw"):
        with monkeypatch.context() as patch:
            patch.setattr(completions.Batch, name, mock.Mock(side_effect=Panic("at once")))
            status, answer = post(served, asked(1))
            assert status == 500 and "Panic: at once" in answer["error"]["message"]
        assert "warning: completions: Panic: at once" in capsys.readouterr().err
        assert post(served, asked(1))[0] == 200
    engine = completions.Engine(2)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "start_answers", mock.Mock(side_effect=Panic))
        patch.setattr(engine, "fail", mock.Mock(side_effect=Panic))
        patch.setattr(threading, "excepthook", lambda _: None)
        engine.start()  # the first thread waits for ever
        engine.thread.join()

    async def answered():
        return await engine.answer(completions.Parameters(**asked(1)), str(folder / "run")).next()

    assert asyncio.run(answered()) is None
    assert "it is started again" in capsys.readouterr().err


def test_a_long_prompt_is_refused_before_it_is_tokenized(served, monkeypatch):  # noqa: F811
    encode = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(completions, "encode_text", encode)
    for prompt in ("a" * 33, "a b" * 10**5, [1] * 33, ["a", "b" * 2**19]):
        assert post(served, asked(1) | dict(prompt=prompt))[0] in (400, 500), "of the mock"
    assert [call.args[0] for call in encode.call_args_list] == ["a"]


def test_the_client_of_openai_reads_it(served):  # noqa: F811
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["run"]
    whole = client.completions.create(**asked(16))
    pieces = list(client.completions.create(**asked(16), stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert pieces[-1].choices[0].finish_reason == "length" and len(pieces) > 1
    with pytest.raises(openai.BadRequestError, match="n cannot be used"):
        client.completions.create(**asked(0) | dict(n=0))
    with pytest.raises(openai.NotFoundError, match="there is no such model; there are run"):
        client.completions.create(**asked(0) | dict(model="other"))


def test_the_client_of_openai_finds_models_and_its_way(served):  # noqa: F811
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0)
    assert client.models.retrieve("run") == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="no such model; there are run") as refused:
        client.models.retrieve("an/other")
    assert refused.value.code == "model_not_found" and refused.value.param == "model"
    few = asked(0) | dict(prompt=["ab", "c"], n=2, best_of=2, echo=True, stop=["x"], max_tokens=2)
    choices = client.completions.create(**few, top_p=0.9).choices
    assert [choice.text[:2] for choice in choices[:2]] == ["ab", "ab"] and len(choices) == 4
    pieces = [
        *client.completions.create(**few, stream=True, stream_options=dict(include_usage=True))
    ]
    *pieces, last = pieces
    assert all(piece.usage is None and piece.choices for piece in pieces) and not last.choices
    assert last.usage == client.completions.create(**few).usage
    messages = [dict(role="user", content="Hello")]
    with pytest.raises(openai.BadRequestError, match="no chat template") as refused:
        client.chat.completions.create(model="run", messages=messages)
    (example,) = re.findall(r"\{.*\}", refused.value.body["message"])
    assert post(served, json.loads(example) | dict(max_tokens=4))[0] == 200
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings is not answered here"):
        client.embeddings.create(model="run", input="a")
    astray = openai.OpenAI(base_url=served, api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="a client's base_url ends in /v1"):
        astray.completions.create(**few)
