"""Samples that a training run draws when it saves a checkpoint."""

import itertools
import math

import jax
import numpy as np

import utils
from config.prompt import whole_prompt
from inference import decoding
from shards.tokenization import text_of
from training.train_state import abstract_params, arranger


def prompt_ids(cfg, encoding):
    """int32 [n]: the token ids of --prompt. None where no tokenizer is known, where --T leaves no room, or where the
    model's vocabulary lacks one of the tokens."""
    if encoding is None or cfg.model.T < 2:
        return None
    ids = whole_prompt(cfg, encoding)[: cfg.model.T - cfg.sample.max_tokens]
    if max(ids) >= cfg.model.vocab_size:
        return None
    return np.array(ids, np.int32)


def make_sampler(cfg, mesh, encoding, ends=()):
    """`sample(params)` -> a list of texts that continue --prompt, drawn with the same random numbers every time.

    The list is empty where there is no prompt (`prompt_ids`). ends: from `weights.end_tokens`. Decoding needs the
    blocks in the model's order, so parameters of a run with --pp_interleave are rearranged first (`arranger`).
    """
    prompt = prompt_ids(cfg, encoding)
    if prompt is None:
        return lambda params: []
    in_order = utils.replace(cfg, pp_interleave=1)
    rearrange = arranger(cfg, abstract_params(in_order, mesh))
    ends = {encoding.eot_token, *ends}
    s = cfg.sample
    dp = cfg.run.n_device_axis[0]
    # a multiple of dp, over which the rows are split
    n_rows = math.ceil(s.inference_batch / dp) * dp
    ids, lengths = decoding.pad([prompt] * n_rows, len(prompt))
    whole = len(prompt) + s.max_tokens
    prefill, advance = decoding.make_stream(in_order, mesh, s, whole, s.max_tokens)

    def sample(params):
        params = rearrange(params)
        state = prefill(params, ids, lengths, jax.random.key(cfg.run.seed))
        _, drawn = advance(params, state)
        rows = np.concatenate([ids, np.asarray(drawn).T], 1)[: s.inference_batch]
        texts = []
        # without the first token, the end of text, which begins every document and would end every sample
        for _, *row in rows.tolist():
            shown = itertools.takewhile(lambda token: token not in ends, row)
            texts.append(text_of(encoding, shown))
        return texts

    return sample
