"""`engram serve`: its settings are flags, and what cannot be served is a sentence."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from socket import socket

import pytest
from tests.support.commands import Output, assert_refused, document, run

from engram.serve import service
from engram.serve.launch import Job
from engram.serve.service_settings import Settings
from engram.util.text import Description


def test_every_setting_is_a_flag(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("serve", "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    for item in fields(Settings):
        assert f"--{item.name.replace('_', '-')} " in said
        assert item.metadata["about"][1:] in said


def test_flags_and_the_token_of_the_environment_reach_the_service(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Job] = []

    def serve(job: Job, listener: socket, show: Callable[[Description], None]) -> None:
        asked.append(job)
        show(Description({"url": "http://x"}, []))

    monkeypatch.setattr(service, "serve", serve)
    monkeypatch.setattr(Job, "open", lambda job: socket())
    monkeypatch.setenv("ENGRAM_TOKEN", "secret")
    monkeypatch.setenv("ENGRAM_ASK_TOKEN", "another")
    names = ("--allow-host", "a", "--allow-host", "b", "--log", "json")
    assert run("serve", "garden", "--port", 1234, "--backbone", "vit", "--json", *names) == 0
    assert document(capsys) == {"url": "http://x"}
    settings = Settings(port=1234, allow_host=("a", "b"), log="json")
    assert asked == [Job(Path("garden"), settings, "secret", "another", "vit")]


def test_a_bundle_that_is_missing_is_a_sentence(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = run("serve", "gone", "--json")
    assert_refused("gone does not exist", code, capsys)
