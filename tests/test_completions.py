"""Completions in OpenAI's format: each answer is that of its request alone, and what is malformed is refused."""

import asyncio
import contextlib
import json
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
from test_page import SERVED, folder, served  # noqa: F401  fixtures
from test_tools import make_run

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


def test_probabilities_are_those_of_the_model(served, tmp_path):  # noqa: F811
    _, cfg, mesh, params = make_run(tmp_path, **SERVED)
    ids, lengths = decoding.pad([[256, *b"ab"]], 3)
    decode = jax.jit(decoding.make_decode(cfg, mesh))
    cache = decoding.empty_cache(cfg, 1, 3)
    logits, _ = decode(params, ids, cache, np.zeros(1, np.int32), lengths - 1)
    (expected,) = np.asarray(jax.nn.log_softmax(logits))
    for prompt in ("ab", [256, 97, 98]):
        _, answer = post(served, asked(0, prompt=prompt, logprobs=5))
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        likeliest = sorted(found["top_logprobs"][0].values())
        assert np.allclose(likeliest, np.sort(expected)[-5:], atol=1e-4)
        assert found["token_logprobs"][0] == likeliest[-1]
        assert "".join(found["tokens"]) == choice["text"] and found["text_offset"] == [0, 1, 2]


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
max_tokens        0 -1 "3" 1.5 true [] 99 1000000000 1e3 10000000000000000000000000000000
temperature       -0.1 2.1 "0" [] true NaN Infinity -Infinity 1e999
n                 0 -1 129 "1" 1.5 true
seed              "1" 1.5 9223372036854775808 [] true
logprobs          -1 6 true "1" 1.5
stop              "" 1 [""] [1] ["a","b","c","d","e"] {}
stream            "yes" 1 0 []
echo              true 1 "no"
best_of           2 0 "1"
top_p             0.5 0 2 "1" NaN
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
    assert post(served, asked(0) | dict(top_p=1.0, echo=False, stop=None, best_of=1))[0] == 200


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
        patch.setattr(engine, "begin", mock.Mock(side_effect=Panic))
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
    with pytest.raises(openai.NotFoundError, match="there is no such run"):
        client.completions.create(**asked(0) | dict(model="other"))
