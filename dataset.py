"""Batches: sequences by number become arrays on the mesh, made ahead of the step that needs them.

Comes before: `shards/mixture.py`, which says what sequence n of a run is. Comes next: `model.py`, to which a step gives
each batch.
"""

import itertools
import math
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait

import jax
import numpy as np
from jax.sharding import NamedSharding

from collectives import BATCH_SPEC


def put_batch(sequences, first, shape, mesh):
    """Global (tokens, targets), int32 [accumulation, M, B, T], of the sequences from number `first` on.

    `sequences` maps numbers [n] to int32 [n, T + 1]. The numbers run fastest along B, then M, then accumulation, so a
    batch holds the same sequences however it is cut. A host reads only the sequences that its devices hold.
    """
    numbers = first + np.arange(math.prod(shape[:3])).reshape(shape[:3])
    sharding = NamedSharding(mesh, BATCH_SPEC)
    indices = sharding.addressable_devices_indices_map(shape).values()
    mine = np.unique(np.concatenate([numbers[index[:3]].ravel() for index in indices]))
    rows = sequences(mine)  # [n, T + 1]

    def put(values):  # [n, T]
        def part(index):  # what a device holds, for its slices of the global array
            return values[np.searchsorted(mine, numbers[index[:3]]), index[3]]

        return jax.make_array_from_callback(shape, sharding, part)

    return put(rows[:, :-1]), put(rows[:, 1:])


class Prefetch:
    """Iterator over make(n) for every n of `numbers`, which a background thread makes `depth` items ahead.

    An error in the thread is raised in place of its item. busy() is called before each wait for an item and returns
    when the devices have nothing left to do: only time after that counts as `waited`.
    """

    def __init__(self, make, numbers, depth=3, busy=lambda: None):
        self.make = make
        self.numbers = iter(numbers)
        self.depth = depth
        self.busy = busy
        self.waited = 0.0  # seconds in which the devices idled for want of an item
        self.worker = ThreadPoolExecutor(1, "prefetch")
        self.ahead = deque()  # futures, in order

    def __iter__(self):
        return self

    def __next__(self):
        self._submit(self.depth + 1)
        if not self.ahead:
            self.close()
            raise StopIteration
        return self._wait(self.ahead.popleft()).result()

    def error(self, n):
        """The first error among the next n items, or None. Waits until they are made."""
        self._submit(self.depth)
        errors = [self._wait(item).exception() for item in itertools.islice(self.ahead, n)]
        return next(filter(None, errors), None)

    def _submit(self, n):
        """Have the thread make items until n are made or on their way."""
        for number in itertools.islice(self.numbers, n - len(self.ahead)):
            self.ahead.append(self.worker.submit(self.make, number))

    def _wait(self, item):
        """Wait for the future `item` and return it."""
        if not item.done():
            self.busy()
            start = time.monotonic()
            wait([item])
            self.waited += time.monotonic() - start
        return item

    def close(self):
        """Make no more items, and wait for the one that is being made."""
        self.worker.shutdown(cancel_futures=True)
