"""tools/check_machine.py: its page has each check's verdict, and it names what is broken."""

import json

import jax.numpy as jnp
import pytest
from helpers import refusal
from jax import lax

import collectives
from kernels import loss
from tools import check_machine, machine_checks

MODEL = "model gpt2-tiny on 2x2x2"


def checked(out, *only, **options):
    """(exit status, {check: verdict} of report.json, report.md)."""
    status = check_machine.main(check_machine.Options(str(out), only, **options))
    found = json.loads((out / "report.json").read_text())
    verdicts = {row["check"]: row["verdict"] for row in found["checks"]}
    page = (out / "report.md").read_text()
    assert all(f"| {name} " in page for name in verdicts) and found["verdict"] in page
    return status, verdicts, page


def test_what_is_sound_passes_and_what_is_not_here_is_skipped(tmp_path):
    status, verdicts, page = checked(tmp_path, "kernel", "collective to_e", "resume", "step")
    assert status == 0 and page.startswith("# Machine check: 7 checks passed, 3 skipped\n")
    assert verdicts["kernel attention flash"] == "skipped"
    for part in ("8 x cpu", "it is for gpu", "| experts "):
        assert part in page


def test_broken_parts_are_named_and_the_others_still_checked(tmp_path, monkeypatch):
    sound = loss.logits_of
    monkeypatch.setattr(loss, "logits_of", lambda *arguments: -sound(*arguments))
    monkeypatch.setattr(collectives, "next_stage", lambda x: lax.ppermute(x, "pp", [(0, 0)]))
    monkeypatch.setattr(collectives, "share_out", lambda x, stage: x.no_such)
    status, verdicts, page = checked(tmp_path, "kernel loss", "collective n", "collective s", MODEL)
    broken = "kernel loss", "collective next_stage over pp", "collective share_out over pp", MODEL
    assert status == 1 and page.startswith(f"# Machine check: FAILED: {', '.join(broken)}; ")
    assert [name for name, verdict in verdicts.items() if verdict == "FAILED"] == [*broken]
    assert verdicts["collective sum_over over dp+pp+tp"] == "passed" and "AttributeError" in page
    assert "Wrong: gives other numbers than numpy on mesh (1, 8, 1)" in page


def test_a_gradient_of_another_scale_is_found():
    x = jnp.ones(3)
    with pytest.raises(machine_checks.Wrong, match="'gradients'.* 7.0e.00"):
        machine_checks.compare(dict(gradients=x), dict(gradients=8 * x), 1e-4)
    with pytest.raises(machine_checks.Wrong, match="nan"):
        machine_checks.compare([x], [x * jnp.nan], 1e-4)


def test_an_interruption_leaves_a_page(tmp_path, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(machine_checks, "check_grouped", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checked(tmp_path, "kernel")
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("# Machine check: not finished; 2 checks passed, 2 skipped")
    assert "| kernel grouped " in page and "did not end" in page


def test_mistakes_get_a_sentence(tmp_path):
    refusal(lambda: checked(tmp_path / "new", "nonsense"), "--only nonsense")
