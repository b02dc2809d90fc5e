"""The numbers of finished runs that README and the pages state, written to docs/measured.json.

python -m dev.measure runs/tiny runs/gpt2-tiny runs/mesh
python -m dev.measure runs/tiny --quiet "two quiet cores of an AMD EPYC virtual machine"

The runs are those of README's commands; `python tools/compare.py runs/tiny runs/gpt2-tiny --output docs/loss.svg`
draws their picture. tests/test_docs.py compares the pages with the file. After a change that alters a loss, run
README's commands and this one again, and correct the sentences that the test names. Speeds are written only with
--quiet, which names a machine that ran nothing else; otherwise those of an earlier run are kept.
"""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import statistics
import subprocess
import sys

MEASURED = pathlib.Path(__file__).parent.parent / "docs" / "measured.json"


def losses_of(rows, config):
    """A run's losses, from the rows of its metrics.jsonl and its config.json."""
    evaluated = [row for row in rows if "loss/val_cross_entropy_loss" in row]
    val_loss = [round(row["loss/val_cross_entropy_loss"], 4) for row in evaluated]
    last = rows[-1]
    day = datetime.datetime.fromtimestamp(last["time"], datetime.timezone.utc).date()
    return {
        "date": day.isoformat(),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "mesh": config["n_device_axis"],
        "tokens": last["step"] * config["global_batch_size"] * config["T"],
        "steps": [row["step"] for row in evaluated],
        "val_loss": val_loss,
        "first_val_loss": val_loss[0],
        "final_val_loss": val_loss[-1],
        "final_train_loss": round(last["loss/train_cross_entropy_loss"], 4),
    }


def speed_of(rows, machine):
    """A run's duration and its median speed, with the machine that it ran on."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "seconds": round(sum(rows[-1][key] for key in rows[-1] if key.startswith("seconds/"))),
        "seconds_compiling": round(rows[-1]["seconds/compiling"]),
        "tokens_per_second": round(statistics.median(row["tokens_per_second"] for row in rows)),
    }


def evaluation_of(folder):
    """The result of tools/evaluate.py for a run, on the validation shards beside those that it was trained on."""
    config = json.loads((folder / "config.json").read_text())
    words = ["tools/evaluate.py", str(folder), "--data", config["data"], "--json"]
    done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)["data"][0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=pathlib.Path)
    parser.add_argument("--quiet", metavar="MACHINE", help="write speeds too, as of this machine")
    asked = parser.parse_args()
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    for folder in asked.runs:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found = losses_of(rows, json.loads((folder / "config.json").read_text()))
        speed = measured.get(folder.name, {}).get("speed")
        if asked.quiet:
            speed = speed_of(rows, asked.quiet)
        if speed:
            found["speed"] = speed
        if folder.name == "tiny":
            found["evaluated"] = evaluation_of(folder)
        measured[folder.name] = found
    MEASURED.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
