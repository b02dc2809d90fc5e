"""The training state of a run: begun, restored and saved, laid out as the run's mesh and pipeline need it."""

import functools
import os

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import utils
from config import settle
from training.checkpointing import Checkpoints
from training.train_state import abstract_state, arranger, init_state


class RunCheckpoints(Checkpoints):
    """The checkpoints of a run. In them the blocks are in order, as `arranger` has them: they fit every mesh."""

    def __init__(self, cfg, mesh, optimizer, data, load_weights=None, mix_borders=(), lock=None):
        """data: fingerprint of the shards. load_weights(abstract): parameters that the run begins with, of
        `weights.open_weights`; None: random ones. mix_borders: `Mixture.borders` of the data. lock: the `Lock` of the
        run directory, which is confirmed before anything appears or goes there; None: another process has it."""
        self.cfg = utils.replace(cfg, pp_interleave=1)
        explain = functools.partial(settle.other_flags, self.cfg)
        folder = os.path.join(cfg.run.folder, "checkpoints")
        how = dict(keep=cfg.run.keep_checkpoints, every=cfg.run.keep_every, explain=explain)
        super().__init__(folder, **how, **({"confirm": lock.confirm} if lock else {}))
        self.optimizer = optimizer
        self.load_weights = load_weights
        self.stored = abstract_state(self.cfg, mesh, optimizer)
        self.to_stored = arranger(cfg, self.stored)
        self.to_running = arranger(cfg, abstract_state(cfg, mesh, optimizer))
        self.about = dict(
            mesh=list(cfg.run.n_device_axis),
            versions={p.__name__: p.__version__ for p in (jax, optax, ocp, np)},
            config=settle.to_resume(cfg, data),
            mix_borders=list(mix_borders),
        )

    def restore_or_begin(self):
        """(state, what was saved beside it) of the newest sound checkpoint; where there is none, of step 0."""
        return self._running(self.restore(self.stored))

    def roll_back(self, before):
        """The same of the newest one of a step earlier than `before`; later ones are deleted. Those of regular saves
        come first, so that stops in between change nothing."""
        return self._running(self.restore(self.stored, before, self.cfg.run.save_steps))

    def _running(self, found):
        if not found:
            params = self.load_weights and self.load_weights(self.stored.params)
            state = init_state(self.cfg, self.stored, self.optimizer, params)
            found = state, dict(step=0, sequences=0)
        state, meta = found
        return self.to_running(state), meta

    def save_running(self, step, sequences, state, bad_steps, val_loss=None, patience=None):
        """Begin to write the state. bad_steps: the `BadSteps` of the run; val_loss: of the evaluation at this step;
        patience: of `save`."""
        about = self.about | dict(faults=bad_steps.state())
        self.save(step, self.to_stored(state), sequences, about, val_loss, patience)

    def not_saved(self, step):
        """The steps up to `step` that are in no checkpoint yet, in words."""
        first = (self.on_disk or 0) + 1
        return f"the steps from {first} to {step}" if step >= first else "no step"
