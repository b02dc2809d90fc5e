"""Evaluate a model on tasks of EleutherAI's lm_eval, on any mesh. Importing this file imports lm_eval.

Text is tokenized, and long prompts are truncated, as in lm_eval's own backend for Hugging Face models (`HFLM`), so the
same weights get the same scores there.
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
from shards.tokenization import HubTokenizer, check_ids, ordinary, text_of, whole_characters
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

MAX_TOKENS = 256  # tokens to generate where a task does not say how many, as in lm_eval
TOP_K = 50  # for a task that samples and does not set it: transformers' default
# the settings of generation that are supported
SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}
SEED = 1234  # of the choice of examples in prompts: lm_eval's default

progress = functools.partial(tqdm, leave=False, disable=not sys.stderr.isatty())
# lm_eval's own progress bar would stay on the screen, and would be written into files too
lm_eval.api.task.tqdm = progress
for library in ("lm_eval", "huggingface_hub"):
    logging.getLogger(library).setLevel(logging.ERROR)


class TaskModel(TemplateLM):
    """A model with the interface that lm_eval expects. Set `params` before use.

    All processes make the same requests and compute each answer together. batch_size: as in `make_scorer`. T: tokens of
    the longest sequence. start: the flag --start. ends: from `weights.end_tokens`. alive: called after each batch.
    """

    params = eot_token_id = prefix_token_id = None  # prefix: precedes a text without a context

    def __init__(
        self, cfg, mesh, encoding, batch_size, T, start="auto", ends=(), alive=lambda: None
    ):
        super().__init__()
        self.encoding = encoding
        self.T = T
        self.alive = alive
        self.ends = {encoding.eot_token, *ends}
        self.vocab_size = cfg.model.vocab_size
        self.before = []  # token ids before every context
        if start == "end_of_text":
            self.before = [encoding.eot_token]
        elif start == "auto" and isinstance(encoding, HubTokenizer):
            self.before = list(encoding.before_text())
        self.score = make_scorer(cfg, mesh, batch_size)
        self.rows = batch_size * cfg.run.n_device_axis[0]  # prompts of a batch to generate for
        in_order = utils.replace(cfg, pp_interleave=1)
        self.arrange = arranger(cfg, abstract_params(in_order, mesh))
        self.stream = functools.cache(functools.partial(decoding.make_stream, in_order, mesh))
        self.eot_token_id = encoding.eot_token
        self.prefix_token_id = getattr(encoding, "bos_token", encoding.eot_token)

    def tok_encode(self, string, add_special_tokens=None, **_):
        """The token ids of a text, preceded by `before` unless add_special_tokens is False."""
        before = [] if add_special_tokens is False else self.before
        return [*before, *encode_text(whole_characters(string), self.encoding).tolist()]

    def check(self, ids):
        """Raises UserError where a question has a token that the model's vocabulary lacks."""
        check_ids(self.encoding, ids, self.vocab_size, "a question of the tasks")

    def loglikelihood(self, requests, disable_tqdm=True):
        """lm_eval's, without its progress bar: `log_likelihoods` has one."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests, **_):
        return self.log_likelihoods([pair for _, *pair in requests])

    def loglikelihood_rolling(self, requests, disable_tqdm=True):
        """The log-likelihood of each whole text in `requests`."""
        context = [self.prefix_token_id]
        pairs = [(context, self.tok_encode(*request.args)) for request in requests]
        return [log_likelihood for log_likelihood, _ in self.log_likelihoods(pairs)]

    def log_likelihoods(self, pairs):
        """[(log-likelihood of the continuation, whether greedy decoding would produce it)] for pairs (context,
        continuation) of token ids."""
        found = []
        for unit, pair in enumerate(pairs):
            self.check(itertools.chain(*pair))
            for context, continuation in self.windows(*pair):
                ids = np.array([*context, *continuation])[-self.T - 1 :]
                found.append(Piece(ids, len(ids) - 1 - len(continuation), unit))
        # similar lengths share a batch, the longest first
        found.sort(key=lambda piece: -len(piece.ids))
        likelihoods = [0.0] * len(pairs)
        greedy = [True] * len(pairs)
        for s in progress(self.score(self.params, found), "likelihoods", len(found)):
            self.alive()
            likelihoods[s.unit] -= s.loss
            greedy[s.unit] &= s.greedy
        return list(zip(likelihoods, greedy))

    def windows(self, context, continuation):
        """Divide a pair into pairs whose continuations have at most T tokens, each with as much context as fits."""
        if len(continuation) <= self.T:
            return [(context, continuation)]
        rolling = get_rolling_token_windows(continuation, context[-1], self.T, context_len=1)
        return map(make_disjoint_window, rolling)

    def generate_until(self, requests, disable_tqdm=True):
        """The text that the model generates for each request (prompt, settings)."""
        asked = []  # (token ids of the prompt, settings of generation)
        for request in requests:
            text, settings = request.args
            prompt = self.tok_encode(text) or [self.prefix_token_id]
            self.check(prompt)
            asked.append((prompt, settings))
        # A batch has requests of the same settings. The longest prompts come first.
        ordered = Collator(asked, lambda pair: -len(pair[0]), group_by="gen_kwargs")
        params = self.arrange(self.params)
        texts = []
        with progress(total=len(asked), desc="continuations") as bar:
            for batch in ordered.get_batched(self.rows):
                prompts, (settings, *_) = zip(*batch)
                options, until = sampling_settings(settings, self.encoding)
                room = self.T - options.max_tokens
                truncated = [prompt[-room:] for prompt in prompts]
                texts += self.generate(params, truncated, options, until)
                bar.update(len(batch))
        return ordered.get_original(texts)

    def generate(self, params, prompts, options, until):
        """Generate a text for each of at most `rows` prompts of token ids, up to the first of the strings `until`."""
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
            ends = [self.text_of_row(row[: options.max_tokens], until) for row in drawn]
            if all(ended for _, ended in ends):
                break
        return [text for text, _ in ends]

    def text_of_row(self, tokens, until):
        """(text of the generated tokens up to its end, whether that end was reached)."""
        before = list(itertools.takewhile(lambda token: token not in self.ends, tokens))
        ended = len(before) < len(tokens)
        text = text_of(self.encoding, ordinary(self.encoding, before))
        for string in filter(None, until):
            ended = ended or string in text
            text = text.split(string)[0]
        return text, ended


def sampling_settings(settings, encoding):
    """Convert a task's settings of generation: (utils.Sample, list of strings that end a text). Raises UserError for
    settings that are not supported."""
    given = {name: value for name, value in settings.items() if value is not None}
    if given.get("top_p") == 1:
        del given["top_p"]  # a top_p of 1 leaves out no token
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
    """Load tasks: {"tasks": {name: task}, "groups": {name: group}}.

    words: names of tasks, groups, tags and patterns, also several in a word with commas between them. folders: hold
    task files of the user's own, beside those of lm_eval. Raises UserError where one cannot be loaded or evaluated.
    """
    names = [name for word in words for name in word.split(",") if name]
    if not names:
        raise UserError("names no task", flag="tasks")
    for folder in folders:
        if not os.path.isdir(folder):
            raise UserError("there is no such folder", flag="include_path", value=folder)
    loaded = {"tasks": {}, "groups": {}}
    manager = TaskManager(include_path=list(folders), include_defaults=False)
    if not all(manager.match_tasks([name]) for name in names):
        # with lm_eval's own tasks, which take seconds to index
        manager = TaskManager(include_path=list(folders))
    for name in names:
        try:
            found = load_task(manager, name, lm, num_fewshot)
            loaded["tasks"] |= found["tasks"]
            loaded["groups"] |= found.get("groups", {})
        except UserError as e:
            raise UserError(e.said, flag="tasks", value=name) from None
        # errors of lm_eval, of datasets and of the code in task files have no common class
        except Exception as e:
            said = f"{type(e).__name__}: {first_line(e)}"
            raise UserError(
                f"cannot be loaded ({said}); check its file, and that its data can be reached",
                flag="tasks",
                value=name,
            ) from None
    return loaded


def load_task(manager, name, lm, num_fewshot):
    """`load_tasks` for one name. Each task is prepared (`prepare_task`)."""
    if not manager.match_tasks([name]):
        raise UserError(f"there is no such task{nearest(name, manager.all_tasks)}")
    with fixed_seeds():
        found = manager.load(manager.match_tasks([name]))
        for task in found["tasks"].values():
            prepare_task(task, lm, num_fewshot)
    return found


def prepare_task(task, lm, num_fewshot):
    """Set a task's number of examples, and build its first question, so that errors in its file show before any work.
    Raises UserError."""
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        raise UserError(
            f"{task.task_name} runs code that the model writes, or shows it more than text"
        )
    given = task.get_config("num_fewshot")
    if num_fewshot is not None and given != 0:  # as in lm_eval, a 0 in a task's file is kept
        task.set_config("num_fewshot", num_fewshot)
    elif given is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(SEED)
    task.build_all_requests(limit=1)
    if task.OUTPUT_TYPE == "generate_until":
        options, _ = sampling_settings(task.get_config("generation_kwargs") or {}, lm.encoding)
        if options.max_tokens >= lm.T:
            raise UserError(
                f"{task.task_name} asks for {options.max_tokens} tokens (max_gen_toks), which leaves no room for a "
                f"question in --T {lm.T}"
            )


def evaluate_tasks(lm, params, loaded, limit=0, bootstrap=0):
    """lm_eval's results for tasks that `load_tasks` returned.

    limit: the most questions of each task; 0: all. bootstrap: number of resamples for standard errors that have no
    formula; 0: no standard errors at all.
    """
    lm.params = params
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(SEED)
    settings = dict(limit=limit or None, bootstrap_iters=bootstrap, log_samples=False)
    with fixed_seeds(), contextlib.redirect_stdout(sys.stderr):
        os.environ["DISABLE_MULTIPROC"] = "1"  # else lm_eval's bootstrap would fork this process
        results = evaluate(lm, loaded, **settings)
    lm.params = None
    return results


@contextlib.contextmanager
def fixed_seeds():
    """Seed Python's and numpy's random numbers, which some tasks use, as lm_eval does.

    Python's state is restored at the end. Otherwise all hosts would draw the same waiting times before they retry
    storage, and all would retry at once.
    """
    before = random.getstate()
    random.seed(0)
    np.random.seed(SEED)
    yield
    random.setstate(before)


def metrics_of(results):
    """{"tasks/TASK/METRIC": number} from the results of `evaluate_tasks`, without standard errors."""
    found = {}
    for name, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            if filtered and not metric.endswith("_stderr") and isinstance(value, int | float):
                metric = key.removesuffix(",none")
                found[f"tasks/{name}/{metric}"] = float(value)
    return found


def make_task_scorer(cfg, mesh, encoding, ends=()):
    """`score_tasks(params, step, last, phases)` -> {"tasks/TASK/METRIC": number}, the --eval_tasks of a training run.

    They are evaluated on the run's mesh, at steps that save a checkpoint; the result is {} at other steps. ends: from
    `weights.end_tokens`. Raises UserError where a task cannot be loaded.
    """
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
            found = metrics_of(evaluate_tasks(lm, params, loaded, run.eval_tasks_limit))
        words = [f"{name.removeprefix('tasks/')} {value:.4f}" for name, value in found.items()]
        say(f"tasks at step {step}:  {'  '.join(words)}")
        return found

    return score_tasks
