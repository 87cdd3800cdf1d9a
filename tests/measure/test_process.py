from steelyard.measure.process import cpu_seconds, rss_bytes, rss_peak_bytes

MIB = 1 << 20


def test_resident_bytes_follow_what_is_held() -> None:
    before = rss_bytes()
    held = bytearray(b"x") * (256 * MIB)
    assert rss_bytes() > before + 200 * MIB
    assert rss_peak_bytes() >= before + 200 * MIB
    del held
    assert rss_bytes() < before + 100 * MIB < rss_peak_bytes()


def test_computing_takes_cpu_seconds() -> None:
    before = cpu_seconds()
    sum(range(2_000_000))
    assert cpu_seconds() > before
