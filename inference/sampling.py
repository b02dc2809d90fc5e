"""The samples that a run draws beside its checkpoints."""

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
    """Token ids, int32, that samples continue; None where no tokenizer is known, --T leaves no room or the model does
    not know one of them."""
    if encoding is None or cfg.model.T < 2:
        return None
    ids = whole_prompt(cfg, encoding)[: cfg.model.T - cfg.sample.max_tokens]
    if max(ids) >= cfg.model.vocab_size:
        return None
    return np.array(ids, np.int32)


def make_sampler(cfg, mesh, encoding, ends=()):
    """`sample(params)` -> texts that continue --prompt, with the same draws every time. There are none without a
    tokenizer (`encoding`), or where --T leaves no room. ends: tokens that end a text (`weights.ends`). Decoding needs
    the blocks in their order in the model (`arranger`)."""
    prompt = prompt_ids(cfg, encoding)
    if prompt is None:
        return lambda params: []
    in_order = utils.replace(cfg, pp_interleave=1)
    rearrange = arranger(cfg, abstract_params(in_order, mesh))
    ends = {encoding.eot_token, *ends}
    s, dp = cfg.sample, cfg.run.n_device_axis[0]
    n_rows = math.ceil(s.inference_batch / dp) * dp  # dp must divide them
    ids, lengths = decoding.pad([prompt] * n_rows, len(prompt))
    whole = len(prompt) + s.max_tokens
    prefill, advance = decoding.make_stream(in_order, mesh, s, whole, s.max_tokens)

    def sample(params):
        params = rearrange(params)
        state = prefill(params, ids, lengths, jax.random.key(cfg.run.seed))
        _, drawn = advance(params, state)
        rows = np.concatenate([ids, np.asarray(drawn).T], 1)[: s.inference_batch]
        texts = []
        for _, *row in rows.tolist():  # the first begins every document, and is the end of text too
            shown = itertools.takewhile(lambda token: token not in ends, row)
            texts.append(text_of(encoding, shown))
        return texts

    return sample
