import sys

from tools import program

# python -m tools.NAME imports it by the name that it has for python tools/NAME.py
sys.modules.setdefault("program", program)
