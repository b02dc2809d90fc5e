"""Write the README.md of an exported model: how to use it, and how it was trained."""

import os

from config import resume
from config.stored import shareable
from logs.rows import read_rows
from runtime.files import read_json
from tools import common
from training.sizes import tokens_per_step

UNKNOWN = "These weights were imported; how they were trained is not known here."


def model_card(run_dir, title, config, count):
    """The card in Markdown. title: the name by which transformers finds the model. config: its config.json. count: the
    number of its parameters, in words."""
    flags = shareable(read_json(run_dir, "config.json"))
    rows = read_rows(run_dir)
    newest = max(resume.checkpoint_steps(run_dir), default=0)
    rows = [row for row in rows if row["step"] <= newest]
    code = ", trust_remote_code=True" if "auto_map" in config else ""
    prompt = flags.get("prompt") or "Once upon a time"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [jax, {config["model_type"]}]
---

# {os.path.basename(title.rstrip("/"))}

A language model of the class `{config["architectures"][0]}`. Parameters: {count}.

```python
from transformers import pipeline

generate = pipeline("text-generation", "{title}"{code})
print(generate({prompt!r}, max_new_tokens=64)[0]["generated_text"])
```

## Training

{training(flags, rows) if rows else UNKNOWN}
"""


def training(flags, rows):
    """How a run trained, in Markdown, from the flags of its config.json and the rows of its metrics.jsonl."""
    step = rows[-1]["step"]
    batch = tokens_per_step(common.stored_config(flags))
    planned = f"{flags['training_steps']:,} steps planned"
    facts = {
        "tokens": f"{step * batch:,} ({step:,} steps of {batch:,}; {planned})",
        "data": f"`{flags['mix'] or flags['data']}`",  # the names, without their folders
        "mesh (dp, pp, tp)": f"{tuple(flags['n_device_axis'])}",
        "training loss": f"{rows[-1]['loss/train_cross_entropy_loss']:.4f} nats per token",
    }
    for row in rows:
        if (loss := row.get("loss/val_cross_entropy_loss")) is not None:
            facts["validation loss"] = f"{loss:.4f} nats per token at step {row['step']:,}"
    if flags["init_from"]:
        facts["began with the weights of"] = f"`{flags['init_from']}`"
    if flags.get("commit"):
        facts["commit of the program"] = f"`{flags['commit']}`"
    for name, score in rows[-1].items():
        if name.startswith("tasks/"):
            facts[name] = f"{score}"
    table = common.markdown([{"what": name, "value": value} for name, value in facts.items()])
    return f"""{table}

`training.json` holds every flag but those of the machines: `python main.py --config training.json --data FOLDER` trains
it again from the same shards."""
