"""The samples that a run draws beside its checkpoints."""

import itertools

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import utils
from data.tokenization import text_of
from inference import decoding
from training import settings, steps


def make_sampler(cfg, mesh, encoding):
    """`sample(params)` -> texts that continue --prompt, with the same draws every time; no texts where there is no
    tokenizer (`encoding`) or --T leaves no room.

    Decoding wants the blocks in order; a run with --pp_interleave has them dealt out to its stages in rounds.
    """
    prompt = settings.prompt_ids(cfg, encoding)
    in_order = utils.replace(cfg, pp_interleave=1)
    rearrange = steps.arranger(cfg, steps.abstract_params(in_order, mesh))
    replicated = NamedSharding(mesh, P())
    generate = jax.jit(decoding.make_generate(in_order, mesh), out_shardings=replicated)

    def sample(params):
        if prompt is None:
            return []
        rows = generate(rearrange(params), prompt, jax.random.key(cfg.run.seed))
        return [text_after_first(row, encoding) for row in np.asarray(rows).tolist()]

    return sample


def text_after_first(row, encoding):
    """The text of token ids up to the end of text, without the first, which is the end of text too: it begins every
    document."""
    ids = itertools.takewhile(lambda token: token != encoding.eot_token, row[1:])
    return text_of(encoding, ids)
