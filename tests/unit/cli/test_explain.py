"""`steelyard explain`: reading a plan file, with and without its predictions."""

import json
from pathlib import Path

import pytest

from steelyard.cli import main


@pytest.mark.parametrize("zoom", ["receipt", "offers", "peak", "frontier"])
def test_explain_prints_every_zoom_and_writes_a_page(
    planned: Path, zoom: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert main(["explain", str(planned), "--zoom", zoom, "--html", str(page)]) == 0
    assert capsys.readouterr().out.startswith("plan ecd4")
    assert "<svg" in page.read_text()


def test_explain_without_predictions_says_how_to_get_them(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.with_suffix(".json").unlink()
    assert main(["explain", str(planned)]) == 0
    out = capsys.readouterr().out
    assert "its predictions file does not exist" in out
    assert "blocks.*.mlp" in out
    assert main(["explain", str(planned), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "not predicted"
