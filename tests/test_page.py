"""The local page: its numbers are those of metrics.jsonl, it writes nothing, and what it says of a run is so."""

import json
import os
import random
import re
import shutil
import subprocess
import threading
import urllib.request

import numpy as np
import pytest
from helpers import FALLING as WORSE_TRAINING
from helpers import FOUND, ROOT, WORSE, refusal, rows_of, wait_for
from page_helpers import folder as folder
from page_helpers import served as served
from page_helpers import serving

from logs import rows
from logs.overfitting import TRAINING
from runtime.files import to_json
from runtime.outbox import Outbox
from tools import page


def row(step, loss=3.0, **more):
    row = dict(step=step, time=1000.0 + step, tokens_per_second=100.0)
    return row | {"loss/train_loss": loss} | more


def lines(*rows):
    return "".join(to_json(row) + "\n" for row in rows)


def write(run, rows, name="metrics.jsonl"):
    """Rows, or any content, into a `page.Run`, which then reads it; its state and words."""
    with open(os.path.join(run.folder, name), "w") as f:
        f.write(rows if isinstance(rows, str) else lines(*rows))
    run.refresh()
    return run.summary["state"], run.summary["words"]


@pytest.fixture
def run(folder, tmp_path):
    """A `page.Run` whose metrics are the test's."""
    (tmp_path / "config.json").write_bytes((folder / "run" / "config.json").read_bytes())
    return page.Run(str(tmp_path), "run")


def get(address):
    return json.load(urllib.request.urlopen(address))


def test_the_numbers_are_those_of_metrics_jsonl_and_nothing_is_written(folder, served):
    path = folder / "run" / "metrics.jsonl"
    path.write_text(lines(*(row(n, 1 / n, lr=n / 7) for n in range(1, 9))))
    (folder / "run" / "samples.txt").write_text("=== step 5\n--- 0\n<b>é\n")
    (folder / "run" / "plan.json").write_text('{"seconds": {"step": 0.5}}')
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    wait_for(lambda: get(f"{served}/api/runs")[0]["n"] == 8)
    (about,) = get(f"{served}/api/runs")
    assert about["planned"] == 0.5 and about["measured"] == about["tokens"] / 100
    assert about["name"] == "run" and set(about["keys"]) == set(rows[0])
    keys = "&".join(f"key={key}" for key in rows[0])
    found = get(f"{served}/api/rows?run=run&{keys}")
    assert found["columns"] == {key: [row[key] for row in rows] for key in rows[0]}
    more = get(f"{served}/api/rows?run=run&key=lr&after=6&version={found['version']}")
    assert more["columns"]["lr"] == [1.0, 8 / 7] and more["after"] == 6
    assert get(f"{served}/api/samples?run=run") == {"5": "--- 0\n<b>é\n"}
    assert urllib.request.urlopen(f"{served}/plotly.js").status == 200
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*")}


def test_a_browser_shows_it(folder, served):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("needs chromium")
    words = "--headless --no-sandbox --disable-gpu --virtual-time-budget=9000 --dump-dom"
    (folder / "run" / "metrics.jsonl").write_text(lines(*(row(n, lr=0.5) for n in range(1, 9))))
    command = [chromium, *words.split(), served]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert "Finished" not in shown and "at step 8 of 100, training loss 3.000" in shown
    assert "as of " in shown and shown.count('class="main-svg"') > 4  # the plots are drawn


def test_rows_are_read_as_they_come_also_torn_ones_and_after_a_rollback(run):
    whole = lines(row(1), row(2))
    for content, last in ((whole[:-9], 1), (whole, 2), ("{}\n" + whole, 2)):
        write(run, content)
        assert [row["step"] for row in run.rows] == [*range(1, last + 1)]
    version = run.version
    write(run, "{}\n" + whole + lines(row(3)))
    assert len(run.rows) == 3 and run.version == version
    write(run, [row(1), row(2, 9.0, time=2001.5), row(3, time=2002.5), row(4)])
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4] and run.version != version


def test_a_bucket_is_read_as_it_grows(bucket, folder):
    address, fs, _ = bucket
    fs.put_file(str(folder / "run" / "config.json"), f"{address}/deep/run/config.json")
    runs = page.Runs([address])
    runs.pause = 0
    assert [run.rows for run in runs.refresh().values()] == [[]]
    for n in (1, 3):
        written = lines(*map(row, range(1, n + 1)))
        fs.pipe_file(f"{address}/deep/run/metrics.jsonl", written.encode())
        (run,) = runs.refresh().values()
        assert run.name == "deep/run" and [row["step"] for row in run.rows] == [*range(1, n + 1)]
        assert run.summary["state"] != "bad"


def test_the_parts_of_a_run_in_a_bucket_are_read_as_they_come(run):
    """Each once; what was read before stays unless the run returned to an earlier step."""
    write(run, [row(1), row(2)])
    log = rows.BucketRows(run.folder, Outbox())
    log.rewind(2)
    version = run.version
    for step in range(3, 20):
        log.add(row(step))
        log.flush(now=True)
        run.refresh()
        assert run.rows == rows.read_rows(run.folder) and len(run.rows) == step
    assert run.version == version and len(run.parts) < 8
    log.rewind(5)
    log.add(row(6, 4.5))
    log.flush(now=True)
    run.refresh()
    assert [one["step"] for one in run.rows] == [*range(1, 7)] and run.version != version
    write(run, [row(1)])
    assert run.rows == rows.read_rows(run.folder)


FALLING = [row(n, 5 - n / 50) for n in range(1, 61)]
STARVED = {f"load/expert_{i}": 0.0 for i in range(4, 9)}
EVEN = {f"load/expert_{i}": 0.25 for i in range(4)}


@pytest.mark.parametrize(
    "rows, now, state, words",
    [
        ([], 0, "idle", "No step is done"),
        ([*FALLING, row(61, 3.7, **EVEN)], 1062, "well", "It trains at step 61 of 100"),
        ([*FALLING, row(61, float("nan"))], 1062, "bad", "not finite"),
        ([*FALLING, row(61, bad_steps=2.0)], 1062, "bad", "2 of the last 61 steps were not finite"),
        ([*FALLING, *(row(n, 4.6) for n in range(61, 71))], 1072, "bad", "Its loss rose by"),
        ([*FALLING, row(61, **EVEN, **STARVED)], 1062, "bad", "5 of 9"),
        (FALLING, 1660, "idle", "no step for 10m00s at step 60 of 100"),
        ([row(100)], 9000, "done", "Finished at step 100 of 100, training loss 3.000."),
    ],
)
def test_it_says_whether_a_run_is_well(run, monkeypatch, rows, now, state, words):
    monkeypatch.setattr(page.time, "time", lambda: now)
    said = write(run, rows)
    assert said[0] == state and words in said[1], said


def test_overfitting_is_said_with_the_best_checkpoint_that_there_is(run, monkeypatch):
    monkeypatch.setattr(page.time, "time", lambda: 1000)
    found = rows_of(WORSE, WORSE_TRAINING)
    rows = [row(one["step"], one[TRAINING]) | one for one in found]
    state, words = write(run, rows)
    assert state == "overfit" and words.startswith("Finished at step 100 of 100")
    assert words.endswith(f"{FOUND.words}.") and run.checkpoint() is None
    assert run.summary["held_out"] == (100, 3.34) and run.summary["best"] == (40, 3.21)
    for step, end in (
        (60, "step 60 is the best checkpoint, at 3.2500."),
        (40, "step 40 is the best checkpoint."),
    ):
        os.makedirs(f"{run.folder}/checkpoints/{step}")
        run.refresh()
        assert run.summary["words"].endswith(f"{FOUND.words}; {end}")
    os.makedirs(f"{run.folder}/checkpoints/100")
    assert run.checkpoint() == 40
    state, words = write(run, [one for one in rows if one["step"] <= 80])
    assert state == "well" and "verfit" not in words and run.summary["best"] == (40, 3.21)
    assert run.checkpoint() == 100, "the newest"


def test_the_time_left_is_that_of_the_last_steps_at_their_pace(run):
    slow = [row(n, time=10.0 * n, resumed=0) for n in range(1, 11)]
    write(run, slow)
    assert run.summary["left"] == "15m00s left, once it resumes"
    write(run, [*slow, *(row(n, time=500.0 + n, resumed=1) for n in range(11, 41))])
    assert run.summary["left"].startswith("1m00s left")
    write(run, [*slow, row(11, time=500.0, resumed=1)])
    assert run.summary["left"] == "", "one step has no pace"
    write(run, [row(100)])
    assert run.summary["left"] == ""


def test_a_run_that_saved_all_and_ended_is_stopped_until_another_process_begins(run, monkeypatch):
    monkeypatch.setattr(page.time, "time", lambda: 1660)
    end = to_json(FALLING[-1] | {"time": 1063.0})
    write(run, FALLING)
    state, words = write(run, end, "ended.json")
    assert state == "idle" and words.startswith("Stopped 10m00s ago, with all saved, at step 60 of")
    assert "hangs" in write(run, "{}", "lock")[1]
    os.remove(f"{run.folder}/lock")
    monkeypatch.setattr(page.time, "time", lambda: 1062)
    assert write(run, [*FALLING, row(61, 3.7)])[0] == "well", "it trains again"


def test_what_others_left_in_a_run_breaks_no_page(run):
    write(run, [row(1)])
    for content in ("{", "[]", '{"n_device_axis": 3}', "{}"):
        state, words = write(run, content, "config.json")
        assert state == "bad" and words.startswith("It cannot be read: ")


NAMES = "__proto__", "constructor", "toString", "run", "\udcff"


@pytest.fixture
def hostile(folder, tmp_path):
    """A folder of runs, sound ones of NAMES and others that nobody could read."""
    config = (folder / "run" / "config.json").read_bytes()
    for name in (*NAMES, *(f"pipe {name}" for name in (*page.SMALL, "metrics.jsonl"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(config)
        strange = {"__proto__": 1.0, "constructor": 2.0}
        rows = lines(*(row(n, lr=0.5, **strange) for n in range(1, 9)))
        (tmp_path / name / "metrics.jsonl").write_text(rows)
        if name not in NAMES:
            path = tmp_path / name / name.removeprefix("pipe ")
            path.unlink(missing_ok=True)
            os.mkfifo(path)
    (tmp_path / "endless").mkdir()
    (tmp_path / "endless" / "config.json").symlink_to("/dev/zero")
    (tmp_path / "large").mkdir()
    with open(tmp_path / "large" / "config.json", "wb") as f:
        f.truncate(2**40)
    (tmp_path / "__proto__" / "plan.json").write_text('{"seconds": {"step": "1"}}')
    (tmp_path / "run" / "checkpoints").write_text("a file")
    return tmp_path


def test_no_run_hides_another(hostile):
    runs = page.Runs([str(hostile), str(hostile / "none"), str(hostile / "run")])
    shown = {run.name.removeprefix(f"{hostile}/"): run.summary for run in runs.refresh().values()}
    bad = {name: about["words"] for name, about in shown.items() if about["state"] == "bad"}
    sound = set(map(page.printable, NAMES))
    assert shown.keys() - bad.keys() == sound and len(bad) == len(page.SMALL) + 4
    assert all(words.startswith("It cannot be read: ") for words in bad.values())
    assert all(shown[name]["n"] == 8 for name in sound)


def test_a_run_whose_storage_does_not_answer_hides_no_other(hostile, monkeypatch):
    monkeypatch.setattr(page, "PATIENCE", 0.5)
    runs, answer = page.Runs([str(hostile)]), threading.Event()
    runs.pause = 0
    read_json, asked = page.read_json, []

    def slow(folder, *names):
        if folder.endswith("constructor"):
            asked.append(folder)
            answer.wait()
        return read_json(folder, *names)

    monkeypatch.setattr(page, "read_json", slow)
    for _ in range(3):
        found = runs.refresh()
        assert found["constructor"].summary["words"] == "Its storage does not answer."
        assert found["toString"].summary["n"] == 8
    assert len(asked) == 1, "nobody asks it again meanwhile"
    answer.set()
    wait_for(lambda: runs.refresh()["constructor"].summary["n"] == 8)


def test_the_script_shows_runs_and_metrics_of_any_name(hostile):
    """In a document that only remembers: the browser's own is not everywhere."""
    with serving(hostile) as address:
        shown = in_node(f"{ROOT}/tests/page_in_node.js", address)
    assert shown["trouble"] == "" and shown["state"].startswith("as of ") and not shown["polluted"]
    drawn = dict(shown["drawn"][0][1])
    assert shown["drawn"][0][0] == "plot_first"
    assert drawn["__proto__"] == drawn["constructor"] == 8 and "\\xff" in shown["list"]
    assert shown["stays"], "a refresh takes no focus away"
    none = shown["none"]
    assert none["heatwords"] == "No run is selected." and shown["hidden"], "no heat map stays"
    assert none["count"].startswith("0 of ") and none["trouble"] == ""


def in_node(*words):
    """What a script prints as JSON."""
    node = shutil.which("node")
    if not node:
        pytest.skip("needs node")
    done = subprocess.run([node, *words], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return json.loads(done.stdout)


def of_view(expression, **values):
    """What an expression of tools/page_view.js's functions and of these values is."""
    script = (ROOT / "tools/page_view.js").read_text()
    names = "".join(f"const {name} = {json.dumps(value)};" for name, value in values.items())
    return in_node("-e", f"{script}; {names} console.log(JSON.stringify({expression}))")


def colors_of(runs):
    return dict(of_view("[...slotsOf(runs)]", runs=runs))


def test_a_run_keeps_its_color_whatever_began_after_it():
    runs = [dict(name=f"lr-{n}e-3", started=1000.0 + n) for n in range(30)]
    runs += [dict(name="broken", started=None), dict(name="broken too", started=None)]
    colors = colors_of(runs)
    assert len({*colors.values()}) == len(runs), "no two are alike"
    assert all(colors[run["name"]] < 12 for run in runs[:10]), "ten have ten colors, not dashes"
    assert colors_of(runs[::-1]) == colors
    for n in (1, 5, 12):
        first = colors_of(runs[:n])
        assert first == {name: colors[name] for name in first}
    changed = 0
    for gone in range(10):
        left = colors_of(runs[:gone] + runs[gone + 1 : 10])
        changed += sum(left[name] != colors[name] for name in left)
    assert changed / 10 < 2, "the name makes it, but for a few"


def test_colors_and_words_are_seen_in_light_and_in_dark():
    """Contrast as WCAG 2 has it: 3 of lines, 4.5 of words, on a card."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return np.dot(linear, [0.2126, 0.7152, 0.0722])

    css = (ROOT / "tools/page.css").read_text()
    n_colors = of_view("COLORS")
    for theme in re.findall(r":root \{(.*?)\}", css, re.DOTALL):
        colors = dict(re.findall(r"--(\w+): (#\w{6})", theme))
        lines = [f"run{n}" for n in range(n_colors)]
        assert colors.keys() >= {*lines} and f"run{n_colors}" not in colors
        least = dict.fromkeys([*lines, "edge"], 3.0)
        least |= dict.fromkeys("text faint accent well done idle bad".split(), 4.5)
        for name, contrast in least.items():
            for behind in ("card", "back"):
                bright = sorted(luminance(colors[one]) + 0.05 for one in (name, behind))
                if behind == "card" or name == "faint":
                    assert bright[1] / bright[0] >= contrast, (name, behind)


VIEWS = [
    {},
    dict(run=[]),
    dict(run=["a&b=c#d", "100%", "é,/", "__proto__"], x="hours", smooth="50", log="1"),
    dict(runs="all", zoom="10,400", first_y=",3.5", first="load/expert_0", one="a b"),
]


@pytest.mark.parametrize("view", VIEWS)
def test_a_link_shows_the_same_view(view):
    shown = of_view("{ ...DEFAULTS, ...view }", view=view)
    assert of_view("viewOf(linkOf(shown))", shown=shown) == shown
    assert (of_view("linkOf(shown)", shown=shown) == "") == (view == {})


def test_ranges_are_read_as_far_as_they_make_sense():
    words = [
        "1,2",
        " 1 , 2e3",
        "5,",
        ",5",
        "0,1",
        "",
        ",",
        "x",
        "3,3",
        "4,1",
        "NaN,1",
        "1,Infinity",
    ]
    found = of_view("words.map(rangeOf)", words=words)
    ends = [[1, 2], [1, 2000], [5, None], [None, 5], [0, 1]]
    assert found == [*ends, None, None, None, None, None, [None, 1], [1, None]]


def test_smoothing_is_a_mean_of_what_came_before():
    draw = random.Random(0)
    steps = sorted(draw.sample(range(1000), 60))
    values = [draw.gauss(3, 1) for _ in steps]
    for over in (1, 20, 500):
        found = of_view("smooth(steps, values, over)", steps=steps, values=values, over=over)
        shares = [1.0] + [-np.expm1((a - b) / over) for a, b in zip(steps, steps[1:])]
        for i, smoothed in enumerate(found):
            weights = [shares[j] * np.exp((steps[j] - steps[i]) / over) for j in range(i + 1)]
            assert smoothed == pytest.approx(np.average(values[: i + 1], weights=weights))
    assert of_view("smooth([1, 2, 9], [4, 4, 4], 5)") == pytest.approx([4, 4, 4])


def test_a_thinned_curve_keeps_its_ends_and_its_extremes():
    draw = random.Random(0)
    values = [draw.gauss(0, 1) for _ in range(5000)]
    values[1234], values[4321] = 99, -99
    at = of_view("thin(values, 500)", values=values)
    assert at == sorted(set(at)) and len(at) <= 502
    assert {0, 1234, 4321, 4999} <= {*at}
    assert of_view("thin([3, 1, 2], 500)") == [0, 1, 2]
    seen = of_view("[[2, 4], [2.5, null], null, [9, 12]].map(one => within([1, 2, 3, 4, 5], one))")
    assert seen == [[0, 5], [1, 5], [0, 5], [5, 5]], "and one point more on each side"


def test_what_differs_in_the_machine_is_no_flag_that_differs(folder):
    config = json.loads((folder / "run" / "config.json").read_text())
    machine = dict(n_devices=8, n_device_axis=[2, 2, 2], microbatches=5, train_batch_size=3)
    machine |= dict(commit="other", data_fingerprint="other", cache_dir="/elsewhere")
    machine |= dict(data=f"/mnt/{config['data']}", output_dir="/mnt/runs", name="other")
    for more, flags in ((machine, []), (machine | dict(max_lr=0.5, seed=9), ["max_lr", "seed"])):
        both = [page.flags_of(one) for one in (config, config | more)]
        for i, names in enumerate((flags, machine.keys() - {"name"})):
            found = of_view("differing(each)", each=[one[i] for one in both])
            assert [row[0] for row in found] == sorted(names)


def test_a_browser_runs_no_script_but_the_page_s_own(served):
    html = (ROOT / "tools/page.html").read_text()
    assert not re.search(r"<script(?![^>]* src=\"/)|<style| style=| on\w+=|https?://", html)
    for path in ("/", "/page.js", "/api/runs", "/v1/models"):
        headers = urllib.request.urlopen(served + path).headers
        policy = headers["Content-Security-Policy"]
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'none'" and rules["script-src"] == "'self'"
        assert "http" not in policy and "*" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"


def test_mistakes_get_a_sentence(tmp_path, monkeypatch):
    refusal(lambda: page.main(page.Page(runs=(str(tmp_path / "none"),))), "no such folder")
    monkeypatch.setattr(page, "PACKAGES", ("json", "no_such_package"))
    refusal(page.check_packages, "no_such_package", "bash setup_tpu.sh page")
