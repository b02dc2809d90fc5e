"""What a program in this folder begins with: imports are those of the repository, and signals end it from now on."""

import os
import sys

sys.path[0] = os.path.realpath(__file__ + "/../..")
from runtime import interrupts

interrupts.install()
