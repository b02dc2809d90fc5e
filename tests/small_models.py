"""Models that compile in seconds, as flags and as settled configurations."""

import dataclasses
import shlex

import jax
import numpy as np

import utils
from config import parser, presets, settle


def given(words):
    """{flag: value} of words of a command line."""
    return parser.read_words(utils.Config, shlex.split(words), "tests")[0]


# A model small enough to compile in seconds, with every part that a large one has.
SMALL = given("""
    --model_dimension 32 --vocab_size 250 --n_head 4 --blocks 4 --layers_per_block 3 --T 32 --latent_dim 16
    --rope_dim 8 --ffn_dim 64 --attention blockwise --n_experts 8 --experts_per_token 2 --n_shared 1
    --expert_dim 32 --capacity_factor 0 --max_lr 5e-3 --end_lr 2e-4 --embedding_lr 2 --warmup_steps 2
    --end_steps 100 --microbatches 4 --pp_interleave 1 --compilation_cache ''
""")
# for runs that are looked at for their files and processes: one kind of layers compiles in two thirds of the time
SMALL_RUN = SMALL | dict(layers_per_block=1)


def small_config(mesh=(1, 1, 1), sequences=32, **flags):
    """A validated Config of SMALL on `mesh` with `sequences` training sequences a batch over the whole mesh."""
    small = SMALL | dict(n_device_axis=mesh, n_devices=int(np.prod(mesh)))
    small |= dict(train_batch_size=sequences // mesh[0], val_batch_size=max(4, 8 // mesh[0]))
    cfg = utils.replace(presets.preset("tiny"), **small | flags)
    return settle.validate(cfg, jax.device_count())


def settled(m):
    """The utils.Model with the widths written out that 0 or -1 stand for."""
    widths = dict(ffn_dim=m.ffn_width, expert_dim=m.expert_width)
    return dataclasses.replace(m, head_dim=m.key_dim, q_latent_dim=m.q_latent, **widths)
