"""An event is told from one process to another."""

import pickle

from engram.farm.events import Event


def test_an_event_arrives_as_it_was() -> None:
    event = Event("a", "done", result={"score": "val accuracy 90.00%"})
    assert pickle.loads(pickle.dumps(event)) == event
