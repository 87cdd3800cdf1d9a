import mmap

from steelyard.measure.process import cpu_seconds, rss_bytes, rss_peak_bytes

MIB = 1 << 20


def test_resident_bytes_follow_what_is_held() -> None:
    before = rss_bytes()
    # The test maps its own memory. malloc may return freed heap pages; in a worker that had run
    # many tests, all 256 MiB were such pages.
    held = mmap.mmap(-1, 256 * MIB)
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    assert rss_bytes() > before + 200 * MIB
    assert rss_peak_bytes() >= before + 200 * MIB
    held.close()
    assert rss_bytes() < before + 100 * MIB < rss_peak_bytes()


def test_computing_takes_cpu_seconds() -> None:
    before = cpu_seconds()
    sum(range(2_000_000))
    assert cpu_seconds() > before
