"""What chip-hours cost, by the dated list prices in planning/prices.json.

Each chip has the price of one provider. Providers differ by a factor of four, and spot prices change every day. So the
table says whether a run costs tens or thousands of dollars, not what the bill will be. A chip without a known price
has null.

This file needs no package, so that a program on a machine without the environment can import it.
"""

import json
from pathlib import Path
from typing import NamedTuple

TABLE = json.loads(Path(__file__).with_name("prices.json").read_text())


class Price(NamedTuple):
    """US dollars for some chip-hours; None where the table has no price."""

    chip_hours: float
    on_demand: float | None
    spot: float | None
    source: str | None  # provider, region and date, in words

    def __str__(self):
        """As in "$230 on demand, $101 spot (list prices: Google Cloud, us-west4, ...)"."""
        if self.on_demand is None:
            return "no list price of this chip is known here"
        spot = "spot price unknown" if self.spot is None else f"{dollars(self.spot)} spot"
        return f"{dollars(self.on_demand)} on demand, {spot} (list prices: {self.source})"


def price_of(chip_name, n, hours):
    """The `Price` of n chips for some hours. `chip_name` is a name of runtime/chips.py: KNOWN.

    n counts whole chips as they are rented. A chip of a TPU v2, v3 or 7x is two jax devices: v3-8 is four chips."""
    entry = TABLE["chips"][chip_name]
    chip_hours = n * hours
    amounts = [entry[kind] and entry[kind] * chip_hours for kind in ("on_demand", "spot")]
    return Price(chip_hours, *amounts, TABLE["sources"].get(entry["source"]))


def dollars(amount):
    """ "$1,234", or "$0.35" below ten dollars."""
    return f"${amount:,.0f}" if amount >= 10 else f"${amount:.2f}"
