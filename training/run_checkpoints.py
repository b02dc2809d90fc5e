"""Initializes, restores and saves the training state of a run, laid out for the run's mesh and pipeline.

This is not part of `training/checkpointing.py`, since it needs the flags, the mesh and the optimizer of a run.
Sampling, export and evaluation read checkpoints without them.
"""

import functools
import os

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import utils
from config import resume
from training.checkpointing import Checkpoints
from training.train_state import abstract_state, arranger, init_state


class RunCheckpoints(Checkpoints):
    """The checkpoints of a run.

    They hold the blocks in their order in the model, whatever --pp_interleave is, so they fit every mesh. `arranger`
    converts a state from and to the order in which the stages of this run hold the blocks.
    """

    def __init__(
        self, cfg, mesh, optimizer, fingerprint, load_weights=None, mix_borders=(), lock=None
    ):
        """fingerprint: of the data. load_weights(abstract): returns the parameters that the run starts from, of
        `weights.open_weights`; None for random ones. mix_borders: `Mixture.borders` of the data. lock: the `Lock` of
        the run directory, which is confirmed before anything is written or removed there; None in the processes for
        which process 0 holds it.
        """
        self.cfg = utils.replace(cfg, pp_interleave=1)
        explain = functools.partial(resume.other_flags, self.cfg)
        folder = os.path.join(cfg.run.folder, "checkpoints")
        settings = dict(keep=cfg.run.keep_checkpoints, every=cfg.run.keep_every, explain=explain)
        if lock:
            settings["confirm"] = lock.confirm
        super().__init__(folder, **settings)
        self.optimizer = optimizer
        self.load_weights = load_weights
        self.stored = abstract_state(self.cfg, mesh, optimizer)
        self.to_stored = arranger(cfg, self.stored)
        self.to_running = arranger(cfg, abstract_state(cfg, mesh, optimizer))
        self.extra = dict(
            mesh=list(cfg.run.n_device_axis),
            versions={p.__name__: p.__version__ for p in (jax, optax, ocp, np)},
            config=resume.to_resume(cfg, fingerprint),
            mix_borders=list(mix_borders),
        )

    def restore_or_init(self):
        """(state, meta) of the newest sound checkpoint; the initial ones where there are no checkpoints."""
        return self._running(self.restore(self.stored))

    def roll_back(self, before):
        """(state, meta) of the newest sound checkpoint of a step earlier than `before`; later ones are deleted.

        Checkpoints of --save_steps are preferred. Those that a stop left in between depend on when somebody stopped the
        run, and a rollback must not.
        """
        return self._running(self.restore(self.stored, before, self.cfg.run.save_steps))

    def _running(self, found):
        """What `restore` found, or else the initial state, with the blocks in the order of the run's stages."""
        if not found:
            params = self.load_weights and self.load_weights(self.stored.params)
            state = init_state(self.cfg, self.stored, self.optimizer, params)
            found = state, dict(step=0, sequences=0)
        state, meta = found
        return self.to_running(state), meta

    def save_running(self, step, sequences, state, bad_steps, val_loss=None, patience=None):
        """Start to write the state. bad_steps: the `BadSteps` of the run. val_loss: that of the evaluation at this
        step. patience: as in `save`."""
        extra = self.extra | dict(faults=bad_steps.state())
        self.save(step, self.to_stored(state), sequences, extra, val_loss, patience)

    def not_saved(self, step):
        """The steps up to `step` that no checkpoint holds yet, in words."""
        first = (self.on_disk or 0) + 1
        return f"the steps from {first} to {step}" if step >= first else "no step"
