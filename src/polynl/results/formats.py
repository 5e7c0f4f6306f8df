"""Numbers as text, the same in every table, chart and message."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NOT_MEASURED = "–"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
COUNT_UNITS = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, ""))


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def beyond_chance(self) -> bool:
        """Whether a difference is not zero, as far as the interval as shown tells.

        Nearer to zero than its last digit, drawing the images once more could move an end across.

        >>> Interval(0.5, 0.06, 1.0).beyond_chance, Interval(0.5, 0.04, 1.0).beyond_chance
        (True, False)
        """
        return round(self.low, 1) > 0 or round(self.high, 1) < 0

    def __str__(self) -> str:
        return f"{percent(self.value)} ({percent(self.low)} to {percent(self.high)})"


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "thread"), plural(2, "thread"), plural(1000, "image")
    ('1 thread', '2 threads', '1,000 images')
    """
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def digits(value: float) -> str:
    """A positive number with three digits, or all of those before the decimal point.

    >>> digits(0.04321), digits(7.125), digits(1234.5)
    ('0.0432', '7.12', '1234')
    """
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """Seconds with three digits in a unit that suits them, or minutes and hours.

    >>> duration(4.2e-5), duration(0.0123), duration(2.5), duration(95), duration(5400)
    ('42.0 µs', '12.3 ms', '2.50 s', '1 min 35 s', '1 h 30 min')
    """
    whole = round(seconds)
    if whole >= 60:
        minutes, hours = whole // 60, whole // 3600
        return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {whole % 60} s"
    size, unit = next((entry for entry in TIME_UNITS if seconds >= entry[0]), TIME_UNITS[-1])
    return f"{_three_digits(seconds / size)} {unit}"


def _three_digits(value: float) -> str:
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}"


def large_count(count: float) -> str:
    """A number of parameters or operations with three digits, in a unit that suits it.

    >>> large_count(23_516_228), large_count(4_111_514_624), large_count(52_900), large_count(96)
    ('23.5 M', '4.11 G', '52.9 k', '96')
    """
    # Numbers that round to a thousand of a unit are one of the next.
    size, unit = next((entry for entry in COUNT_UNITS if count >= 0.9995 * entry[0]), COUNT_UNITS[-1])
    return f"{count:.0f}" if size == 1 else f"{_three_digits(count / size)}{unit}"


def byte_size(count: float) -> str:
    """A number of bytes in binary units.

    >>> byte_size(3 * 2**20), byte_size(5 * 2**30), byte_size(2048)
    ('3.0 MiB', '5.0 GiB', '2.0 KiB')
    """
    power, unit = next((entry for entry in ((30, "GiB"), (20, "MiB")) if count >= 2 ** entry[0]), (10, "KiB"))
    return f"{count / 2**power:.1f} {unit}"


def if_measured(value: float | None, written: Callable[[float], str]) -> str:
    """A value as `written` shows it, or a dash.

    >>> if_measured(2.0, duration), if_measured(None, duration)
    ('2.00 s', '–')
    """
    return NOT_MEASURED if value is None else written(value)


def ratio(value: float | None) -> str:
    """A quotient of two measurements.

    >>> ratio(1.234), ratio(1234.5), ratio(None)
    ('1.23', '1,234', '–')
    """
    return if_measured(value, ("{:.2f}" if value is None or value < 100 else "{:,.0f}").format)


def percent(score: float) -> str:
    """A score with one decimal, whatever the last bits that the order of a sum leaves.

    >>> percent(66.649999999999991), percent(66.650000000000006)
    ('66.7', '66.7')
    """
    return f"{round(score, 6):.1f}"


def mean_and_spread(values: Sequence[float]) -> str:
    """The mean and, for several values, their standard deviation.

    >>> mean_and_spread([70.0]), mean_and_spread([70.0, 72.0]), mean_and_spread([])
    ('70.0', '71.0 ± 1.4', '–')
    """
    if not values:
        return NOT_MEASURED
    mean = percent(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean} ± {percent(statistics.stdev(values))}"


def signed(difference: Interval | None) -> str:
    """A difference and its interval.

    >>> signed(Interval(2.13, 0.6, 3.5)), signed(Interval(-0.4, -2.0, 1.23)), signed(None)
    ('+2.1 (+0.6 to +3.5)', '−0.4 (−2.0 to +1.2)', '–')
    """
    if difference is None:
        return NOT_MEASURED
    value, low, high = map(points, (difference.value, difference.low, difference.high))
    return f"{value} ({low} to {high})"


def points(difference: float) -> str:
    """A difference of scores, with its sign.

    >>> points(2.13), points(-0.4)
    ('+2.1', '−0.4')
    """
    return f"{round(difference, 6):+.1f}".replace("-", "−")


def number(value: float) -> str:
    """A number with about two or three digits.

    >>> number(3136), number(0.25), number(49.123), number(2.0), number(0.0661), number(4.6e-05)
    ('3,136', '0.25', '49.1', '2', '0.066', '4.6·10⁻⁵')
    """
    if not math.isfinite(value):
        return "not a number"
    size = abs(value)
    if value == int(value) and size < 1e9:
        text = f"{int(value):,}"
    elif size < 1e-3 or size >= 1e9:
        digits, _, power = f"{value:.1e}".partition("e")
        text = f"{digits}·10{str(int(power)).translate(SUPERSCRIPT)}"
    elif size < 0.1:
        text = f"{value:.2g}"
    else:
        text = f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2}f}"
    return text.replace("-", "−")
