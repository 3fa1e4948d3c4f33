"""The statistics and tables of the benchmarks."""

from __future__ import annotations

import pytest

from benchmarks.measure import Measurement, format_value, median, percentile, table


def _measurements(tool, values, what="first line", unit="s", limit=None):
    return [
        Measurement("launch", "8 ranks", what, tool, value, unit, repeat, limit) for repeat, value in enumerate(values)
    ]


def _rows(measurements, **options):
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table(measurements, **options).splitlines()
    ]


@pytest.mark.parametrize(
    "value, text", [(0.0, "0"), (0.13849, "0.138"), (1.0, "1.00"), (13.849, "13.8"), (1384.9, "1385"), (-0.5, "-0.500")]
)
def test_numbers_have_three_significant_digits(value, text):
    assert format_value(value) == text


def test_what_did_not_happen_in_time_is_longer_than_any_time():
    assert median([1.0, None, 3.0]) == 3.0
    assert median([1.0, None, None]) is None


def test_percentile_is_a_value_that_was_measured():
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile(list(range(1, 101)), 0.95) == 95
    assert percentile([7.0], 0.0) == 7.0


def test_table_has_a_column_per_tool_and_the_ratio_of_medians():
    rows = _rows([*_measurements("air_nb", [0.1, 0.2, 0.9]), *_measurements("torchrun", [9.0, 10.0, 11.0])])
    assert rows[0] == ["case", "what", "air_nb", "torchrun", "air_nb / torchrun"]
    assert rows[2] == ["8 ranks", "first line, s", "0.200 (0.100-0.900)", "10.0 (9.00-11.0)", "0.0200"]


def test_tool_without_a_measurement_is_a_dash_and_has_no_ratio():
    measurements = [*_measurements("air_nb", [0.1]), *_measurements("torchrun", [9.0], what="cell done")]
    rows = _rows(measurements)
    assert rows[2] == ["8 ranks", "first line, s", "0.100", "-", "-"]
    assert rows[3] == ["8 ranks", "cell done, s", "-", "9.00", "-"]


def test_baseline_that_was_not_measured_gets_no_column():
    rows = _rows(_measurements("air_nb", [0.1]), baselines=("torchrun", "import torch"))
    assert rows[0] == ["case", "what", "air_nb"]


def test_never_names_the_limit_and_spoils_the_range():
    rows = _rows(
        [*_measurements("air_nb", [None, None, 1.0], limit=15.0), *_measurements("torchrun", [1.0, None, 2.0])]
    )
    assert rows[2][2:] == ["never in 15.0", "2.00 (1.00-never)", "-"]


def test_words_are_shown_once_each():
    rows = _rows(_measurements("air_nb", ["error", "error", "ok"], what="cell status", unit=""))
    assert rows[2] == ["8 ranks", "cell status", "error, ok"]


def test_negative_difference_of_two_times_has_no_ratio():
    rows = _rows([*_measurements("air_nb", [-0.04]), *_measurements("torchrun", [0.5])])
    assert rows[2][2:] == ["-0.0400", "0.500", "-"]
