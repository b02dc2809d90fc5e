"""CORE, the mean over 22 tasks of how far a model is above chance (DataComp-LM, arXiv:2406.11794, appendix G), as a
group of lm_eval's tasks.

The data is a folder as nanochat publishes it (eval_bundle.zip): core.yaml lists the tasks, their files and examples per
prompt, eval_meta_data.csv the accuracy of chance, eval_data/ has a file of questions for each. Prompts, examples and
answers are those of its evaluation.
"""

import csv
import itertools
import json
import os
import random

import yaml
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import Task
from lm_eval.config.group import AggMetricConfig
from lm_eval.config.task import TaskConfig

from runtime.messages import UserError

NAME = "core"  # of the group, and before the name of each task
CHOICES = {"multiple_choice", "schema"}  # kinds of tasks whose answer is one of several texts


def group(folders):
    """The Group of the tasks in the first of `folders` that holds core.yaml. Raises UserError."""
    folder = next((f for f in folders if os.path.isfile(os.path.join(f, "core.yaml"))), None)
    if folder is None:
        raise UserError("its data is a folder with core.yaml in it, to be named as --include_path")
    with open(os.path.join(folder, "core.yaml")) as f:
        entries = yaml.safe_load(f)["icl_tasks"]
    with open(os.path.join(folder, "eval_meta_data.csv"), newline="") as f:
        chance = {
            row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(f)
        }
    centered = AggMetricConfig("centered", weight_by_size=False)
    found = Group(NAME, aggregate_metric_list=[centered], metadata={"version": 1.0})
    for entry in entries:
        found.add(CoreTask(folder, entry, chance[entry["label"]]))
    return found


class CoreTask(Task):
    """One of the tasks. A question is all of its prompts, an answer their `Scored`s (tasks.py: Judged.spans)."""

    VERSION = 1.0
    OUTPUT_TYPE = "spans"

    def __init__(self, folder, entry, chance):
        """entry: of core.yaml; chance: accuracy of who guesses."""
        self.path, self.chance = os.path.join(folder, "eval_data", entry["dataset_uri"]), chance
        self.kind, self.between = entry["icl_task_type"], entry.get("continuation_delimiter", " ")
        super().__init__()
        about = dict(task=f"{NAME}_{entry['label']}", num_fewshot=entry["num_fewshot"][0])
        self._config = TaskConfig(**about, output_type="loglikelihood")

    def download(self, *_):
        with open(self.path, encoding="utf-8") as f:
            self.rows = [json.loads(line) for line in f if line.strip()]
        random.Random(1337).shuffle(self.rows)  # so that the first ones stand for all
        self.numbers = {id(row): number for number, row in enumerate(self.rows)}

    def has_training_docs(self):
        return False

    def has_validation_docs(self):
        return False

    def has_test_docs(self):
        return True

    def test_docs(self):
        return self.rows

    def doc_to_text(self, doc):
        return self.texts(doc)[0]

    def doc_to_target(self, doc):
        return doc.get("gold", doc.get("continuation"))

    def fewshot_context(self, doc, num_fewshot, **_):
        """The solved questions before a question: other ones, drawn by its number."""
        number = self.numbers[id(doc)]
        others = [i for i in range(len(self.rows)) if i != number]
        chosen = random.Random(1234 + number).sample(others, min(num_fewshot, len(others)))
        return "".join(self.texts(self.rows[i], solved=True)[0] + "\n\n" for i in chosen)

    def texts(self, doc, solved=False):
        """The texts of a question: one for each choice; or, for a continuation, without it and with it. `solved`: the
        right one alone."""
        if self.kind == "multiple_choice":
            texts = [doc["query"] + self.between + choice for choice in doc["choices"]]
        elif self.kind == "schema":
            contexts = doc["context_options"]
            texts = [context + self.between + doc["continuation"] for context in contexts]
        else:
            context = doc["context"].strip() + self.between
            texts = [context.rstrip(), context + doc["continuation"]]
        right = doc["gold"] if self.kind in CHOICES else 1
        return [texts[right]] if solved else texts

    def construct_requests(self, doc, ctx, metadata=None, **_):
        texts = [ctx + text for text in self.texts(doc)]
        return Instance(self.OUTPUT_TYPE, doc, (self.kind, *texts), 0, metadata)

    def process_results(self, doc, results):
        (scored,) = results
        if self.kind in CHOICES:
            losses = [s.loss / s.tokens for s in scored]
            right = losses.index(min(losses)) == doc["gold"]
        else:
            right = scored[0].greedy
        return {"acc": float(right), "centered": (right - self.chance) / (1 - self.chance)}

    def aggregation(self):
        return {"acc": mean, "centered": mean}

    def higher_is_better(self):
        return {"acc": True, "centered": True}


def pairs(kind, sequences):
    """(context, continuation) of what counts in the token ids of each text of a question: what follows the beginning
    that all choices share, the end that all schemas share, what a continuation adds to the text without it."""
    if kind == "schema":
        shared = same([ids[::-1] for ids in sequences])
        starts = [len(ids) - shared for ids in sequences]
    else:
        starts = [same(sequences)] * len(sequences)
    split = [max(1, min(start, len(ids) - 1)) for start, ids in zip(starts, sequences)]
    found = [(ids[:start], ids[start:]) for start, ids in zip(split, sequences)]
    return found if kind in CHOICES else found[1:]


def same(sequences):
    """The length of the beginning that all sequences share."""
    columns = zip(*sequences)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
