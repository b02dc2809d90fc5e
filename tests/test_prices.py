"""The table of list prices, and what chip-hours cost by it."""

from planning import prices
from runtime import chips


def test_every_chip_has_an_entry():
    assert prices.TABLE["chips"].keys() == chips.CHIPS.keys()
    for entry in prices.TABLE["chips"].values():
        on_demand, spot = entry["on_demand"], entry["spot"]
        assert on_demand is None or 0 < on_demand < 100
        assert (
            spot is None or 0 < spot <= on_demand
        )  # a spot price alone would say nothing of the list
        assert (entry["source"] in prices.TABLE["sources"]) == (on_demand is not None)


def test_a_price_grows_with_chips_and_hours():
    one, many = prices.price_of("v5e", 1, 1), prices.price_of("v5e", 8, 24)
    assert many.chip_hours == 192
    assert many.on_demand == 192 * one.on_demand and many.spot == 192 * one.spot
    assert str(many).startswith(f"${many.on_demand:,.0f} on demand, ${many.spot:,.0f} spot")
    assert "us-west4" in str(many) and str(one).startswith("$1.20 on demand")


def test_what_is_not_known_is_not_guessed():
    unknown = prices.price_of("v7x", 4, 1)
    assert unknown.on_demand is None and unknown.spot is None and "$" not in str(unknown)
    assert "spot price unknown" in str(prices.price_of("H100", 8, 24))
