"""fit, sweep and cache at the command line."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
from tests.support.training import filled

from engram import Recipe
from engram.cli import main as cli


@pytest.mark.parametrize("command", ["fit", "sweep"])
def test_every_setting_is_a_flag_with_its_default(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main([command, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for item in fields(Recipe):
        assert f"--{item.name.replace('_', '-')} " in said
        if not (command == "sweep" and item.name in ("lr", "weight_decay")):  # lists there
            about = item.metadata["about"]
            assert about[1:] in said
            assert f"default: {item.default})" in said


def test_the_commands_show_and_clear_it(
    small_trunk: Path, noise: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = filled(small_trunk, noise)
    (own_cache / "mine.txt").write_text("not the cache's")
    for other in ("holiday", "0" * 24):
        (own_cache / other).mkdir()
        (own_cache / other / "meta.json").write_text('{"camera": "x"}')
    (kept.folder / "note.txt").write_text("not the cache's either")
    assert cli.main(["cache", "info", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["folder"] == str(own_cache)
    [about] = said["caches"]
    assert about["images"] == 12
    assert about["fingerprint"] == kept.trunk.fingerprint
    assert 12 * kept.row_bytes < about["bytes"] < 12 * kept.row_bytes + 5000
    assert cli.main(["cache", "info"]) == 0
    assert "16x16" in capsys.readouterr().out
    assert cli.main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"freed": about["bytes"]}
    left = sorted(path.name for path in own_cache.rglob("*") if path.is_file())
    assert left == ["meta.json", "meta.json", "mine.txt", "note.txt"]
    assert cli.main(["cache", "info"]) == 0
