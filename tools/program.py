"""How every program here begins: with the repository on Python's path, then by `begin`."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from runtime.interrupts import begin as begin
