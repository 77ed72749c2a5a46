"""What torch.compile is worth: the compiled model and the plain one, in turns in one run.

    python -m benchmarks.compile [--mode train|eval] [--backbone pico] [--batch 32]

Prints a line: the first call of the compiled model, and its time relative to the plain one.
"""

import time
from enum import StrEnum

import torch
import typer

import engram
from engram.experiments.timing import Case, compare, describe_machine, machine


class Mode(StrEnum):
    eval = "eval"
    train = "train"


def main(
    mode: Mode = Mode.train, backbone: str = "pico", batch: int = 32, seconds: float = 40
) -> None:
    vit = engram.load_backbone(backbone)
    model = engram.MemoryViT(vit).eval()
    for i in range(3):
        model.add_task(f"task{i}", 10, cells=5, seed=i)
    pixels, labels = torch.rand(batch, 3, *vit.config.image_size), torch.randint(10, (batch,))

    def answer(run: torch.nn.Module) -> None:
        with torch.no_grad():
            run(pixels)

    def learn(run: torch.nn.Module) -> None:
        model.zero_grad()
        logits = run(pixels, tasks=["task0"])["task0"]
        loss: torch.Tensor = torch.nn.functional.cross_entropy(logits, labels)
        torch.autograd.backward(loss)

    if mode is Mode.train:
        engram.train_only(model.train(), "task0")
    step = learn if mode is Mode.train else answer
    compiled: torch.nn.Module = torch.compile(model)  # type: ignore[assignment]
    began = time.perf_counter()
    step(compiled)
    first = time.perf_counter() - began
    cases = {"plain": Case(lambda: step(model)), "compiled": Case(lambda: step(compiled))}
    found = compare(cases, seconds=seconds, least=12, most=60)
    plain, fast = found["plain"], found["compiled"]
    print(
        f"{mode.value}, {vit.source}, batch {batch}: first call {first:.0f} s; plain "
        f"{1e3 * plain.seconds:.0f} ms, compiled {1e3 * fast.seconds:.0f} ms, ratio "
        f"{fast.ratio:.2f} ({fast.low:.2f} to {fast.high:.2f}, {fast.rounds} rounds)"
    )
    print(describe_machine(machine()))


if __name__ == "__main__":
    typer.run(main)
