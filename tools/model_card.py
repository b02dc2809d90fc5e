"""README.md of an exported model: what its run wrote, and how to use it."""

import os

from runtime.files import read_file, read_json
from tools import common
from training import settings
from training.runlog import read_rows

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [{tags}]
---

# {name}

A language model of the class `{kind}`. Parameters: {count}.

```python
from transformers import pipeline

generate = pipeline("text-generation", "{title}"{code})
print(generate({prompt!r}, max_new_tokens=64)[0]["generated_text"])
```

## Training

{training}
"""
TRAINING = """| | |
| --- | --- |
{rows}

`training.json` holds every flag: `python main.py --config training.json` trains it again from the same shards."""


def model_card(run_dir, title, config, count):
    """Markdown. title: the name under which transformers finds the model; config: its config.json; count: of its
    parameters, in words."""
    flags = read_json(run_dir, "config.json")
    rows = rows_up_to_the_checkpoint(run_dir)
    training = "These weights were imported; how they were trained is not known here."
    if rows:
        lines = [f"| {name} | {value} |" for name, value in facts(flags, rows)]
        training = TRAINING.format(rows="\n".join(lines))
    return CARD.format(
        tags=", ".join(["jax", config["model_type"]]),
        title=title,
        name=os.path.basename(title.rstrip("/")),
        kind=config["architectures"][0],
        count=count,
        code=", trust_remote_code=True" if "auto_map" in config else "",
        prompt=flags["prompt"] or "Once upon a time",
        training=training,
    )


def rows_up_to_the_checkpoint(run_dir):
    """Rows of metrics.jsonl up to the newest checkpoint."""
    rows, _ = read_rows(read_file(os.path.join(run_dir, "metrics.jsonl")) or b"")
    newest = max(settings.checkpoint_steps(run_dir), default=0)
    return [row for row in rows if row["step"] <= newest]


def facts(flags, rows):
    """Yield (what, value) of a run, by its config.json and the rows of metrics.jsonl."""
    step = rows[-1]["step"]
    batch = common.tokens_per_step(common.stored_config(flags))
    yield (
        "tokens",
        f"{step * batch:,} ({step:,} steps of {batch:,}; {flags['training_steps']:,} steps planned)",
    )
    yield "data", f"`{flags['mix'] or flags['data']}`"
    if flags["init_from"]:
        yield "began with the weights of", f"`{flags['init_from']}`"
    yield "training loss", f"{rows[-1]['loss/train_cross_entropy_loss']:.4f} nats per token"
    val = "loss/val_cross_entropy_loss"
    if evaluated := [row for row in rows if val in row]:
        last = evaluated[-1]
        yield "validation loss", f"{last[val]:.4f} nats per token at step {last['step']:,}"
    for name, score in rows[-1].items():
        if name.startswith("tasks/"):
            yield name, score
    yield "mesh (dp, pp, tp)", tuple(flags["n_device_axis"])
    if flags.get("commit"):
        yield "commit of the program", f"`{flags['commit']}`"
