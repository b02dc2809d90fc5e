"""The command line of a tool that would then run for minutes, and no more: parse.py bench FLAG..."""

import importlib
import sys

from runtime import interrupts

if __name__ == "__main__":
    tool = importlib.import_module(f"tools.{sys.argv[1]}")
    interrupts.run(lambda: tool.parse(sys.argv[2:]))
