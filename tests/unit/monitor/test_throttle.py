import pytest

from air_nb.monitor.throttle import describe_slowdown, throttle_words


def test_bits_become_words_and_unknown_ones_are_left_out():
    assert throttle_words(0) == ()
    assert throttle_words(0x4 | 0x40 | 1 << 40) == ("power_cap", "hw_thermal")


@pytest.mark.parametrize(
    "reasons, text",
    [
        (None, ""),
        ((), ""),
        (("idle", "power_cap"), ""),
        (("sw_thermal", "hw_thermal"), "slowed by heat"),
        (("hw_thermal", "power_brake"), "slowed by heat and the power brake"),
    ],
)
def test_only_what_is_wrong_is_told(reasons, text):
    assert describe_slowdown(reasons) == text
