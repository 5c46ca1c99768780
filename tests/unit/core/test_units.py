import pytest

from slurm_resil.core.errors import UsageError
from slurm_resil.core.units import duration_s, host_port, period_s, size_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("10min", 600), ("1h30m", 5400), ("250ms", 0.25), ("1-12:00:00", 129600), ("01:30", 5400), ("0s", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "10", "ten", "5 parsecs", "-3s", "3s4", "1:2"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration"):
        duration_s(text)


@pytest.mark.parametrize(
    ("text", "size"), [("4MiB", 4 << 20), ("2GB", 2 * 10**9), ("512k", 512 << 10), ("7", 7), ("1.5KiB", 1536)]
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "4 furlongs", "MiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        size_bytes(text)


@pytest.mark.parametrize("text", ["0s", "367d", "9999999999h"])
def test_a_period_is_more_than_nothing_and_a_year_at_most(text: str) -> None:
    with pytest.raises(UsageError, match=text):
        period_s(text)
    assert period_s("366d") == 366 * 86400


def test_addresses() -> None:
    assert host_port("ctl-1.site:7321") == ("ctl-1.site", 7321)
    assert host_port("[fd00::1]:1") == ("fd00::1", 1)
    for text in ("", "ctl", "ctl:x", "ctl:0", "ctl:65536", ":1", "fd00::1:1", "ctl:1 "):
        with pytest.raises(UsageError, match="HOST:PORT"):
            host_port(text)
