"""Liveness, readiness and metrics."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from fastapi.testclient import TestClient
from tests.support.engrams import familiar
from tests.support.serving import AUTH, Opened, World, ask, picture, put

from engram.model import MemoryViT


def test_health_readiness_and_metrics(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    ask(client, picture(), picture(1), tasks="first")
    client.get("/no/such/path")
    text = client.get("/metrics").text
    assert 'engram_requests_total{method="POST",path="/v1/predict",status="200"} 1.0' in text
    assert 'engram_requests_total{method="GET",path="other",status="404"} 1.0' in text
    assert 'engram_answers_total{task="first"} 2.0' in text
    assert "engram_waiting_images 0.0" in text
    assert "engram_tasks 2.0" in text


def test_metrics_count_classes_confidence_and_familiarity(
    opened: Opened, world: World, tmp_path: Path
) -> None:
    client = opened()
    model = MemoryViT(world.model.backbone)
    familiar(model.add_task("known", 3))
    data = model.save("known", tmp_path / "known.safetensors").read_bytes()
    assert client.put("/v1/tasks/known", content=data, headers=AUTH).status_code == 201
    for name in ("multilabel", "regression", "segmentation", "wild"):
        assert put(client, world, name).status_code == 201
    images = ask(client, *(picture(i) for i in range(5)))
    text = client.get("/metrics").text

    def counted(task: str) -> dict[str, float]:
        line = re.compile(
            rf'^engram_answer_classes_total{{class="(.*)",task="{task}"}} (.*)$', re.MULTILINE
        )
        return {name: float(count) for name, count in line.findall(text)}

    answers = [image["tasks"] for image in images]
    assert counted("second") == Counter(one["second"]["answer"][0]["class"] for one in answers)
    assert counted("multilabel") == Counter(
        row["class"] for one in answers for row in one["multilabel"]["answer"] if row["present"]
    )
    assert counted("segmentation") == Counter(
        one["segmentation"]["answer"]["classes"][0]["class"] for one in answers
    )
    assert not counted("regression")
    assert not counted("wild")
    sure = sum(one["second"]["answer"][0]["probability"] <= 0.5 for one in answers)
    assert f'engram_answer_confidence_bucket{{le="0.5",task="second"}} {sure:.1f}' in text
    assert 'engram_answer_confidence_count{task="multilabel"} 5.0' in text
    assert 'engram_answer_confidence_count{task="segmentation"}' not in text
    strange = sum(one["known"]["familiarity"] <= 0 for one in answers)
    assert f'engram_answer_familiarity_bucket{{le="0.0",task="known"}} {strange:.1f}' in text
    assert 'engram_answer_familiarity_count{task="second"}' not in text


def test_vectors_are_no_answers(client: TestClient) -> None:
    files = [("image", ("0.png", picture()))]
    assert client.post("/v1/embed", files=files).status_code == 200
    assert "engram_answer_classes_total{" not in client.get("/metrics").text
