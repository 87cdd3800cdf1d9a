"""The page on presets agrees with the presets, and the example of a cluster file is valid."""

from steelyard.hardware.cluster_file import decode_tree
from tests.system.docs import clusters, pages


def test_the_page_shows_every_preset() -> None:
    now = clusters.PAGE.read_text(encoding="utf-8")
    assert now == clusters.page(now, clusters.section()), "python -m tests.system.docs.clusters"


def test_the_example_cluster_file_parses() -> None:
    text = (pages.ROOT / "docs" / "cluster-files.md").read_text(encoding="utf-8")
    (example, *_) = [block.text for block in pages.blocks(text) if block.language == "toml"]
    tree = decode_tree(example)
    assert tree.num_devices == 4 * 8 + 2 * 8
    assert len(tree.classes) == 2
