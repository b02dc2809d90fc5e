"""CORE, the mean over 22 tasks of how far a model is above chance (DataComp-LM, arXiv:2406.11794, appendix G).

The data is a folder as nanochat publishes it (eval_bundle.zip): core.yaml lists the tasks, their files and examples per
prompt, eval_meta_data.csv the accuracy of chance, eval_data/ has a file of questions for each. Prompts, examples and
answers are those of its evaluation.
"""

import csv
import itertools
import json
import os
import random
from typing import NamedTuple

import yaml

from runtime.messages import UserError

NAME = "core"  # of their mean, and before the name of each task
CHOICES = {"multiple_choice", "schema"}  # kinds of tasks whose answer is one of several texts


class CoreTask(NamedTuple):
    """One of the tasks: choices of an answer, choices of a context (schema), or a continuation."""

    name: str
    kind: str
    between: str  # text between a question and its answer
    shots: int  # solved questions before a question
    chance: float  # accuracy of a guess
    rows: list  # its questions


def load(folders):
    """The `CoreTask`s in the first of `folders` that holds core.yaml. Raises UserError where none does."""
    there = [f for f in folders if os.path.isfile(os.path.join(f, "core.yaml"))]
    if not there:
        raise UserError("its data is a folder with core.yaml in it; name that as --include_path")
    folder = there[0]
    with open(os.path.join(folder, "core.yaml")) as f:
        entries = yaml.safe_load(f)["icl_tasks"]
    with open(os.path.join(folder, "eval_meta_data.csv"), newline="") as f:
        baselines = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(f)}
    tasks = []
    for entry in entries:
        with open(os.path.join(folder, "eval_data", entry["dataset_uri"]), encoding="utf-8") as f:
            rows = [json.loads(line) for line in f if line.strip()]
        random.Random(1337).shuffle(rows)  # so that the first ones represent all
        task = CoreTask(
            name=f"{NAME}_{entry['label']}",
            kind=entry["icl_task_type"],
            between=entry.get("continuation_delimiter", " "),
            shots=entry["num_fewshot"][0],
            chance=baselines[entry["label"]] / 100,
            rows=rows,
        )
        tasks.append(task)
    return tasks


def scores(tasks, lm, limit=0):
    """{name: {"acc,none": accuracy, "centered,none": above chance}} of each task and of their mean, as lm_eval names
    results. lm: a tasks.TaskModel; limit: questions to take of each task, 0 for all."""
    found = {}
    for task in tasks:
        rows = task.rows[: limit or None]
        questions = []
        for number in range(len(rows)):
            encoded = [lm.tok_encode(text, False) for text in prompts(task, number)]
            questions.append(pairs(task.kind, [[lm.prefix_token_id, *ids] for ids in encoded]))
        scored = iter(lm.measure(list(itertools.chain(*questions))))
        right = 0
        for row, question in zip(rows, questions):
            answers = [next(scored) for _ in question]
            losses = [answer.loss / answer.tokens for answer in answers]
            is_best = losses.index(min(losses)) == row.get("gold")
            right += is_best if task.kind in CHOICES else answers[0].greedy
        acc = right / len(rows)
        centered = (acc - task.chance) / (1 - task.chance)
        found[task.name] = {"acc,none": acc, "centered,none": centered}
    mean = sum(one["centered,none"] for one in found.values()) / len(tasks)
    return found | {NAME: {"centered,none": mean}}


def prompts(task, number):
    """The texts of a question of a task, after solved ones, which its number draws."""
    others = [row for i, row in enumerate(task.rows) if i != number]
    before = ""
    for row in random.Random(1234 + number).sample(others, min(task.shots, len(others))):
        right = row["gold"] if task.kind in CHOICES else 1
        before += texts(task, row)[right] + "\n\n"
    return [before + text for text in texts(task, task.rows[number])]


def texts(task, row):
    """The texts of a question: one for each choice; or, for a continuation, without it and with it."""
    if task.kind == "multiple_choice":
        return [row["query"] + task.between + choice for choice in row["choices"]]
    if task.kind == "schema":
        contexts = row["context_options"]
        return [context + task.between + row["continuation"] for context in contexts]
    context = row["context"].strip() + task.between
    return [context.rstrip(), context + row["continuation"]]


def pairs(kind, sequences):
    """(context, continuation) of what counts in the token ids of each text of a question: what follows the beginning
    that all choices share, the end that all schemas share, what a continuation adds to the text without it."""
    starts = [shared(sequences)] * len(sequences)
    if kind == "schema":
        end = shared([ids[::-1] for ids in sequences])
        starts = [len(ids) - end for ids in sequences]
    split = [max(1, min(start, len(ids) - 1)) for start, ids in zip(starts, sequences)]
    found = [(ids[:start], ids[start:]) for start, ids in zip(split, sequences)]
    return found if kind in CHOICES else found[1:]


def shared(sequences):
    """The length of the beginning that all sequences share."""
    columns = zip(*sequences)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
