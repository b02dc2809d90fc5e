"""Tasks of EleutherAI's lm_eval, asked of a model on any mesh. Importing this file imports lm_eval.

Text becomes tokens, and tokens that are too many are cut, as in lm_eval's own backend for Hugging Face models (`HFLM`):
the same weights get the same scores there.
"""

import contextlib
import functools
import itertools
import logging
import math
import os
import random
import sys

import jax
import numpy as np
from tqdm import tqdm

import utils
from data.encoding import encode_text
from inference import decoding
from inference.scores import Piece, length_for, make_scorer
from runtime.messages import UserError, first_line, nearest, say
from shards.tokenization import HubTokenizer, check_ids, special_tokens, text_of, whole_characters
from training.sizes import val_batch_shape
from training.train_state import abstract_params, arranger

try:
    import lm_eval.api.task
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import evaluate
    from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from lm_eval.utils import make_table as make_table
except ImportError as e:
    raise UserError(
        f"needs lm_eval ({e}); bash setup_tpu.sh eval installs it", flag="tasks"
    ) from None

MAX_TOKENS = 256  # that a task may have generated where it does not say
TOP_K = 50  # of a task that draws and does not say, as transformers has it
SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}  # of drawing
SEED = 1234  # of the examples in prompts, lm_eval's

progress = functools.partial(tqdm, leave=False, disable=not sys.stderr.isatty())
lm_eval.api.task.tqdm = progress  # its own bar stays, in files too
for library in ("lm_eval", "huggingface_hub"):
    logging.getLogger(library).setLevel(logging.ERROR)


class TaskModel(TemplateLM):
    """A model as lm_eval asks it; set `params` before. All processes ask the same and compute each answer together.
    batch_size: of `make_scorer`; T: of the longest sequence; start: the flag; ends: of `weights.ends`; alive(): called
    during the answers."""

    params = eot_token_id = prefix_token_id = None  # the last precedes what has no context

    def __init__(
        self, cfg, mesh, encoding, batch_size, T, start="auto", ends=(), alive=lambda: None
    ):
        super().__init__()
        self.encoding, self.T, self.alive = encoding, T, alive
        self.ends = {encoding.eot_token, *ends}
        self.vocab_size = cfg.model.vocab_size
        self.before = []  # token ids before every context
        if start == "end_of_text":
            self.before = [encoding.eot_token]
        elif start == "auto" and isinstance(encoding, HubTokenizer):
            self.before = list(encoding.before_text())
        self.score = make_scorer(cfg, mesh, batch_size)
        self.rows = batch_size * cfg.run.n_device_axis[0]  # of a batch that is continued
        in_order = utils.replace(cfg, pp_interleave=1)
        self.arrange = arranger(cfg, abstract_params(in_order, mesh))
        self.stream = functools.cache(functools.partial(decoding.make_stream, in_order, mesh))
        self.special = special_tokens(encoding)
        self.eot_token_id = encoding.eot_token
        self.prefix_token_id = getattr(encoding, "bos_token", encoding.eot_token)

    def tok_encode(self, string, add_special_tokens=None, **_):
        """Token ids of a text, after `before` unless add_special_tokens is False."""
        before = [] if add_special_tokens is False else self.before
        return [*before, *encode_text(whole_characters(string), self.encoding).tolist()]

    def check(self, ids):
        """Raises UserError for a token of a question that the model does not know."""
        check_ids(self.encoding, ids, self.vocab_size, "a question of the tasks")

    def loglikelihood(self, requests, disable_tqdm=True):
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests, **_):
        return self.measure([pair for _, *pair in requests])

    def loglikelihood_rolling(self, requests, disable_tqdm=True):
        begin = [self.prefix_token_id]
        pairs = [(begin, self.tok_encode(*request.args)) for request in requests]
        return [log_likelihood for log_likelihood, _ in self.measure(pairs)]

    def measure(self, pairs):
        """(log-likelihood, whether greedy decoding draws it) of each of the `pairs` (context, continuation) of ids."""
        found = []
        for unit, pair in enumerate(pairs):
            self.check(itertools.chain(*pair))
            for context, continuation in self.windows(*pair):
                ids = np.array([*context, *continuation])[-self.T - 1 :]
                found.append(Piece(ids, len(ids) - 1 - len(continuation), unit))
        found.sort(key=lambda piece: -len(piece.ids))  # batches of like lengths, the largest first
        likelihoods = [0.0] * len(pairs)
        greedy = [True] * len(pairs)
        for s in progress(self.score(self.params, found), "likelihoods", len(found)):
            self.alive()
            likelihoods[s.unit] -= s.loss
            greedy[s.unit] &= s.greedy
        return list(zip(likelihoods, greedy))

    def windows(self, context, continuation):
        """A pair as pairs whose continuations fit in T tokens, each after as much as fits with it."""
        if len(continuation) <= self.T:
            return [(context, continuation)]
        rolling = get_rolling_token_windows(continuation, context[-1], self.T, context_len=1)
        return map(make_disjoint_window, rolling)

    def generate_until(self, requests, disable_tqdm=True):
        asked = []  # (prompt, settings of drawing)
        for request in requests:
            text, settings = request.args
            prompt = self.tok_encode(text) or [self.prefix_token_id]
            self.check(prompt)
            asked.append((prompt, settings))
        # batches of the same settings, the longest prompts first
        ordered = Collator(asked, lambda pair: -len(pair[0]), group_by="gen_kwargs")
        params = self.arrange(self.params)
        texts = []
        with progress(total=len(asked), desc="continuations") as bar:
            for batch in ordered.get_batched(self.rows):
                prompts, (settings, *_) = zip(*batch)
                options, until = draws(settings, self.encoding)
                room = self.T - options.max_tokens
                cut = [prompt[-room:] for prompt in prompts]
                texts += self.continued(params, cut, options, until)
                bar.update(len(batch))
        return ordered.get_original(texts)

    def continued(self, params, prompts, options, until):
        """The texts that follow the token ids of at most `rows` prompts, each up to the first of the strings until."""
        n = length_for(max(map(len, prompts)))
        n_chunks = math.ceil(options.max_tokens / decoding.CHUNK)
        prefill, advance = self.stream(options, n + n_chunks * decoding.CHUNK)
        missing = self.rows - len(prompts)
        ids, lengths = decoding.pad([*prompts, *prompts[:1] * missing], n)
        state = prefill(params, ids, lengths, jax.random.key(0))
        drawn = [[] for _ in prompts]
        for chunk in decoding.chunks_of(advance, params, state, n_chunks):
            self.alive()
            drawn = [row + more for row, more in zip(drawn, chunk.tolist())]
            ends = [self.ending(row[: options.max_tokens], until) for row in drawn]
            if all(ended for _, ended in ends):
                break
        return [text for text, _ in ends]

    def ending(self, tokens, until):
        """(the text of token ids up to its end, whether that was reached)."""
        before = list(itertools.takewhile(lambda token: token not in self.ends, tokens))
        ended = len(before) < len(tokens)
        text = text_of(self.encoding, [token for token in before if token not in self.special])
        for string in filter(None, until):
            ended = ended or string in text
            text = text.split(string)[0]
        return text, ended


def draws(settings, encoding):
    """(utils.Sample, strings before which a text ends) of a task's settings. Raises UserError for unknown ones."""
    given = {name: value for name, value in settings.items() if value is not None}
    if given.get("top_p") == 1:
        del given["top_p"]  # which changes nothing
    settings = normalize_gen_kwargs(given, MAX_TOKENS)
    if unknown := settings.keys() - SETTINGS:
        raise UserError(
            f"{', '.join(sorted(unknown))}: these settings of generation are not supported"
        )
    options = utils.Sample(
        max_tokens=settings["max_gen_toks"],
        temperature=float(settings.get("temperature", settings["do_sample"])),
        top_k=settings.get("top_k", TOP_K),
    )
    end = text_of(encoding, [encoding.eot_token])
    return options, handle_stop_sequences(settings["until"], end)


def load_tasks(words, folders, lm, num_fewshot=None):
    """{"tasks": {name: task}, "groups": {name: group}} of the tasks, groups, tags and patterns in `words`, with commas
    between them, which lm_eval and the task files in `folders` know. Raises UserError where one cannot be asked."""
    names = [name for word in words for name in word.split(",") if name]
    if not names:
        raise UserError("names no task", flag="tasks")
    for folder in folders:
        if not os.path.isdir(folder):
            raise UserError("there is no such folder", flag="include_path", value=folder)
    loaded = {"tasks": {}, "groups": {}}
    manager = TaskManager(include_path=list(folders), include_defaults=False)
    if not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=list(folders))  # with its own, which takes seconds
    for name in names:
        try:
            found = load_task(manager, name, lm, num_fewshot)
            loaded["tasks"] |= found["tasks"]
            loaded["groups"] |= found.get("groups", {})
        except UserError as e:
            raise UserError(e.said, flag="tasks", value=name) from None
        except Exception as e:  # of lm_eval, of datasets, or of what the task file says
            said = f"{type(e).__name__}: {first_line(e)}"
            raise UserError(
                f"cannot be loaded ({said}); check its file, and that its data can be reached",
                flag="tasks",
                value=name,
            ) from None
    return loaded


def load_task(manager, name, lm, num_fewshot):
    """{"tasks": {name: task}, "groups": {name: group}} of one word of --tasks, prepared."""
    if not manager.match_tasks([name]):
        raise UserError(f"there is no such task{nearest(name, manager.all_tasks)}")
    with fixed_seeds():
        found = manager.load(manager.match_tasks([name]))
        for task in found["tasks"].values():
            prepare(task, lm, num_fewshot)
    return found


def prepare(task, lm, num_fewshot):
    """Set a task's number of examples and make its first question, so that what is wrong with it is seen early."""
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        raise UserError(
            f"{task.task_name} runs code that the model writes, or shows it more than text"
        )
    given = task.get_config("num_fewshot")
    if num_fewshot is not None and given != 0:  # as lm_eval does: 0 in a task's file stays
        task.set_config("num_fewshot", num_fewshot)
    elif given is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(SEED)
    task.build_all_requests(limit=1)
    if task.OUTPUT_TYPE == "generate_until":
        options, _ = draws(task.get_config("generation_kwargs") or {}, lm.encoding)
        if options.max_tokens >= lm.T:
            raise UserError(
                f"{task.task_name} asks for {options.max_tokens} tokens (max_gen_toks), which leaves no room for a "
                f"question in --T {lm.T}"
            )


def ask(lm, params, loaded, limit=0, bootstrap=0):
    """lm_eval's results of what `load` returns: at most `limit` questions of each task, 0 for all. bootstrap: draws for
    standard errors that have no formula; 0: no standard errors at all."""
    lm.params = params
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(SEED)
    about = dict(limit=limit or None, bootstrap_iters=bootstrap, log_samples=False)
    with fixed_seeds(), contextlib.redirect_stdout(sys.stderr):
        os.environ["DISABLE_MULTIPROC"] = "1"  # its bootstrap would fork this process
        results = evaluate(lm, loaded, **about)
    lm.params = None
    return results


@contextlib.contextmanager
def fixed_seeds():
    """Python's and numpy's random numbers, which some tasks draw, begin as lm_eval lets them. Python's are restored, or
    all hosts would wait alike before they try storage again."""
    before = random.getstate()
    random.seed(0)
    np.random.seed(SEED)
    yield
    random.setstate(before)


def numbers(results):
    """{"tasks/TASK/METRIC": number} of the results of `ask`, without standard errors."""
    found = {}
    for name, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            if filtered and not metric.endswith("_stderr") and isinstance(value, int | float):
                metric = key.removesuffix(",none")
                found[f"tasks/{name}/{metric}"] = float(value)
    return found


def make_task_scorer(cfg, mesh, encoding, ends=()):
    """`score_tasks(params, step, last, phases)` -> {"tasks/TASK/METRIC": number} of --eval_tasks in a training run,
    on its mesh; {} where they are not due. Raises UserError where a task cannot be asked."""
    run = cfg.run
    if encoding is None:
        raise UserError("the tokenizer of the shards is not known; give --tokenizer", flag="tasks")
    dp, pp, _ = run.n_device_axis
    _, M, B = val_batch_shape(cfg)
    batch_size = max(1, M * B // (dp * pp))
    lm = TaskModel(cfg, mesh, encoding, batch_size, cfg.model.T, ends=ends)
    given = run.eval_tasks.split(",")
    folders = [name for name in given if "/" in name]
    loaded = load_tasks([name for name in given if "/" not in name], folders, lm)

    def score_tasks(params, step, last, phases):
        if not last and step % run.save_steps:
            return {}
        with phases("tasks", step):
            lm.alive = phases.watchdog.alive
            found = numbers(ask(lm, params, loaded, run.eval_tasks_limit))
        words = [f"{name.removeprefix('tasks/')} {value:.4f}" for name, value in found.items()]
        say(f"tasks at step {step}:  {'  '.join(words)}")
        return found

    return score_tasks
