import sys

from data import program

# python -m data.NAME imports it by the name that it has for python data/NAME.py
sys.modules.setdefault("program", program)
