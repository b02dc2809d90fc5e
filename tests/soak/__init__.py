"""A soak of the programs: python -m tests.soak. pytest collects none of it."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]  # the repository, and what its tests share

import environment

environment.prepare()  # before jax is imported
