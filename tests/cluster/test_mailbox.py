"""Word from other nodes, kept until it is taken, by a process that does not load torch."""

import subprocess
import sys

from engram.cluster.mailbox import Mailbox
from engram.farm.events import Event


def test_what_is_put_in_is_taken_once_and_in_order() -> None:
    box = Mailbox()
    box.put(Event("a", "ready"), "node 1")
    box.put(Event("b", "started"), "node 2")
    assert box.take() == [(Event("a", "ready"), "node 1"), (Event("b", "started"), "node 2")]
    assert box.take() == []


def test_it_needs_no_torch() -> None:
    code = "import engram.cluster.mailbox, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
