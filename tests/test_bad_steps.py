"""Bad steps: counted, and after several in a row a rollback. tests/test_faults.py has whole runs."""

import math

from training.bad_steps import BadSteps, Rollback

NAN, INF = math.nan, math.inf
PER_STEP = 8  # sequences


def observe(bad_steps, losses, first=1):
    """Let finished steps with these losses, from step `first` on, be observed."""
    for step, loss in enumerate(losses, first):
        bad_steps.observe(step, PER_STEP * step, loss, 1.0)


def test_single_bad_steps_are_counted_and_cause_no_rollback(capsys):
    bad_steps = BadSteps(limit=3)
    observe(bad_steps, [4.0, NAN, INF, 4.0, -INF, 4.0])
    assert (bad_steps.total, bad_steps.consecutive, bad_steps.due) == (3, 0, None)
    said = capsys.readouterr().out.splitlines()
    assert [line.split("warning: ")[1].split(" and")[0] for line in said] == [
        "step 2 is skipped, its loss is nan",
        "step 3 is skipped, its loss is inf",
        "step 5 is skipped, its loss is -inf",
    ]
    assert [line[-12:-1] for line in said] == ["(1 in a row", "(2 in a row", "(1 in a row"]
    never = BadSteps(limit=0)
    observe(never, [NAN] * 50)
    assert never.due is None and never.total == 50


def test_a_gradient_that_is_not_finite_is_as_bad_as_a_loss():
    bad_steps = BadSteps(limit=2)
    bad_steps.observe(1, 8, 4.0, NAN)
    bad_steps.observe(2, 16, 4.0, INF)
    assert bad_steps.due == Rollback(before=1, sequences=16, bad_steps=2)


def test_the_rollback_leads_before_the_first_bad_step_and_past_the_data_of_the_last():
    bad_steps = BadSteps(limit=3)
    observe(bad_steps, [4.0, NAN, 4.0, NAN, NAN])
    assert bad_steps.in_progress and bad_steps.due is None
    observe(bad_steps, [NAN], first=6)
    assert bad_steps.due == Rollback(before=4, sequences=6 * PER_STEP, bad_steps=4)
    observe(bad_steps, [NAN], first=7)  # its metrics were under way; its data is read again
    assert bad_steps.due == Rollback(before=4, sequences=6 * PER_STEP, bad_steps=4)
