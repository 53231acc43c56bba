"""One training step of a Qwen3-0.6B-shaped model on a CPU, next to TRL's `GRPOTrainer` on the same rows.

    python -m venv .venv-trl && .venv-trl/bin/pip install "torch>=2.9,<2.14" && .venv-trl/bin/pip install trl peft
    python benchmarks/trl.py [--trl .venv-trl/bin/python] [--batches 8] [--sides calls rollouts] [--kinds lora full]

Random weights, a vocabulary of 151,936 words, float32, two threads. A group of eight rollouts with three turns each: a
prompt of 200 tokens, then answers of 40 tokens and tool results of 40 tokens. The calls have 240, 320 and 400 tokens.

    ours       one forest: every unique prefix once
    calls      TRL, one row per call, padded to the longest, `batch` rows at a time
    rollouts   TRL, one row per rollout, tool results masked: possible where every history is a prefix of the next

Both sides compute activations again in the backward pass, as TRL does by default. Rows have no log-probabilities from
sampling, so TRL takes its own: the ratio is 1. Here they are recorded with the weights of the start. An advantage per
rollout is drawn at random; every sampled token has the same weight (TRL's loss `dapo`).

Each side is a process of its own. Memory is the peak of the resident memory in forward and backward, less what was
resident before and the gradients of what learns. Then all gradients are compared. Prints a table and writes
benchmarks/results/trl.json.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.peak import Step

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Lesson, build_forest
from lightningrl.models.base import Decoder
from lightningrl.models.load import export_folder, load_model
from lightningrl.models.lora import load_adapter, save_adapter, with_adapter
from lightningrl.models.memory import keep_freed_memory
from lightningrl.models.tiny import build_model, build_tokenizer
from lightningrl.trainer.local import LocalTrainer
from lightningrl.types import Transition

VOCAB, GROUP, TURNS, PROMPT, ANSWER, RESULT, RANK, THREADS = 151_936, 8, 3, 200, 40, 40, 16, 2
SHAPE = {"hidden": 1024, "heads": 16, "kv_heads": 8, "head_size": 128, "intermediate": 3072}
LAYERS, MIB = 28, 2**20


def lessons(seed: int = 0) -> list[Lesson]:
    """The calls of a group, every token with the same weight and its rollout's advantage."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, PROMPT)
    made: list[Lesson] = []
    for member in range(GROUP):
        history, advantage = prompt, np.float32(rng.normal())
        for turn in range(TURNS):
            answer = rng.integers(0, VOCAB, ANSWER)
            call = Transition(
                call_id=f"{member}/{turn}",
                parent_call_id=None,
                agent="",
                policy_version=0,
                prompt_ids=history.astype(np.int32),
                completion_ids=answer.astype(np.int32),
                logprobs=np.zeros(ANSWER, np.float32),
                reward=None,
            )
            weights = np.full(ANSWER, 1 / (GROUP * TURNS * ANSWER))
            advantages = np.full(ANSWER, advantage)
            made.append(
                Lesson(rollout_id=str(member), group_id="", transition=call, advantages=advantages, weights=weights)
            )
            history = np.concatenate((history, answer, rng.integers(0, VOCAB, RESULT)))
    return made


def rows_of(given: list[Lesson], *, merged: bool) -> list[dict[str, Any]]:
    """TRL's rows: one per call, or one per rollout whose tool results are not sampled."""
    rows: list[dict[str, Any]] = []
    for lesson in given:
        call = lesson.transition
        ids, advantage = call.completion_ids.tolist(), float(lesson.advantages[0])
        if merged and not call.call_id.endswith("/0"):
            row = rows[-1]
            results = call.prompt_ids[len(row["prompt_ids"]) + len(row["completion_ids"]) :].tolist()
            row["completion_ids"] += results + ids
            row["sampled"] += [0] * len(results) + [1] * len(ids)
        else:
            prompt = call.prompt_ids.tolist()
            rows.append(
                {"prompt_ids": prompt, "completion_ids": ids, "sampled": [1] * len(ids), "advantage": advantage}
            )
    return rows


def ours(model: Decoder, out: Path) -> dict[str, Any]:
    """One step of our trainer: measures, and the gradients as files."""
    config = TrainerConfig.model_validate({"threads": THREADS, "checkpointing": "on"})
    trainer = LocalTrainer(model, config=config, loss=LossConfig(), export=lambda model, path: None)
    given = lessons()
    forest = build_forest(given)
    recorded = np.split(trainer.evaluate(forest).logprobs, GROUP * TURNS)
    for lesson, logprobs in zip(given, recorded, strict=True):
        lesson.transition.logprobs[:] = logprobs
    forest = build_forest(given)
    step = Step()
    trainer.forward_backward(forest)
    step.pause()
    peak = step.peak()
    for name, p in model.trainable().items():
        assert p.grad is not None
        p.grad.numpy().tofile(out / f"{name.replace('.default', '')}.bin")
    step.resume()
    trainer.optim_step(learning_rate=1e-5)
    return step.seconds() | {
        "rss_before": step.rss_before,
        "peak": peak,
        "peak_of_step": step.peak(),
        "gradients": sum(p.nbytes for p in model.trainable().values()),
        "tokens": len(forest.token_ids),
    }


def difference(found: Path, expected: Path) -> float:
    """Relative error of all gradients in one folder against those of another."""
    names = {path.name for path in expected.glob("*.bin")}
    assert names == {path.name for path in found.glob("*.bin")}
    apart = whole = 0.0
    for name in names:
        a, b = (np.fromfile(folder / name, np.float32).astype(np.float64) for folder in (found, expected))
        apart, whole = apart + float(((a - b) ** 2).sum()), whole + float((b**2).sum())
    return (apart / whole) ** 0.5


def make_model(folder: Path, *, layers: int) -> None:
    """Write the model, its tokenizer, which TRL asks for, and an adapter that has learnt a little."""
    tokenizer = build_tokenizer(["a b c"], vocab_size=300)
    model = build_model(VOCAB, layers=layers, **SHAPE, eos_token_id=0, pad_token_id=1)
    export_folder(model, folder / "model", tokenizer=tokenizer)
    adapted = with_adapter(load_model(str(folder / "model")), rank=RANK)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in adapted.trainable().items():
            if "lora_B" in name:
                p.copy_(0.01 * torch.randn(p.shape, generator=noise))
    (folder / "adapter").mkdir()
    save_adapter(adapted, folder / "adapter")


def run_ours(folder: Path, kind: str) -> dict[str, Any]:
    """Our side in a process of its own."""
    out = folder / f"ours-{kind}"
    out.mkdir()
    subprocess.run([sys.executable, __file__, "--side", str(folder), "--kinds", kind], check=True)
    return json.loads((out / "found.json").read_text())


def run_trl(folder: Path, python: str, *, kind: str, merged: bool, batch: int) -> dict[str, Any]:
    out = folder / f"trl-{kind}-{merged}-{batch}"
    out.mkdir()
    rows = rows_of(lessons(), merged=merged)
    given = {
        "model": str(folder / "model"),
        "adapter": str(folder / "adapter") if kind == "lora" else None,
        "rows": rows,
        "batch": min(batch, len(rows)),
        "threads": THREADS,
        "out": str(out),
    }
    (out / "given.json").write_text(json.dumps(given))
    script = Path(__file__).parent / "peers" / "grpo_trainer.py"
    subprocess.run([python, str(script), str(out / "given.json")], check=True, stdout=subprocess.DEVNULL)
    found = json.loads((out / "found.json").read_text()) | {"rows": len(rows), "batch": given["batch"]}
    found["gradient_error"] = difference(out, folder / f"ours-{kind}")
    for path in out.glob("*.bin"):
        path.unlink()
    return found


def compare(folder: Path, arguments: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """Measure our step and TRL's steps of one kind; prints a line for each."""
    found = [{"side": "ours", "kind": kind, **run_ours(folder, kind)}]
    tell(found[0], found[0])
    for side in arguments.sides:
        for batch in arguments.batches:
            theirs = run_trl(folder, arguments.trl, kind=kind, merged=side == "rollouts", batch=batch)
            found.append({"side": side, "kind": kind, **theirs})
            tell(found[-1], found[0])
    return found


def tell(row: dict[str, Any], mine: dict[str, Any]) -> None:
    """Complete a row with its ratios to our side, and print it."""
    row["over_bytes"] = row["peak"] - row["rss_before"] - mine["gradients"]
    row["times_cpu"], row["times_wall"] = row["cpu_s"] / mine["cpu_s"], row["wall_s"] / mine["wall_s"]
    row["times_memory"] = row["over_bytes"] / mine["over_bytes"]
    time = f"{row['wall_s']:6.0f} s, CPU {row['cpu_s']:6.0f} s ({row['times_cpu']:.1f}×)"
    memory = f"{row['over_bytes'] / MIB:6.0f} MiB ({row['times_memory']:.1f}×)"
    gradient = f"gradient {row.get('gradient_error', 0.0):.1e}"
    print(f"{row['kind']:5} {row['side']:9} {row.get('batch', ''):>5} | {time} | {memory} | {gradient}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl", default=".venv-trl/bin/python", help="the Python of TRL's environment")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--batches", type=int, nargs="+", default=[8], help="rows that TRL computes at a time")
    parser.add_argument("--sides", nargs="+", choices=("calls", "rollouts"), default=["calls", "rollouts"])
    parser.add_argument("--kinds", nargs="+", choices=("lora", "full"), default=["lora", "full"])
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    if arguments.side:  # a process of our side
        keep_freed_memory()
        model, (kind,) = load_model(str(arguments.side / "model")), arguments.kinds
        model = load_adapter(model, arguments.side / "adapter") if kind == "lora" else model
        out = arguments.side / f"ours-{kind}"
        (out / "found.json").write_text(json.dumps(ours(model, out)))
        return
    told = "from importlib.metadata import version as v; print(v('trl'), v('torch'), v('transformers'))"
    versions = subprocess.run(
        [arguments.trl, "-I", "-c", told], check=True, capture_output=True, text=True
    ).stdout.split()
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "peer": dict(zip(("trl", "torch", "transformers"), versions, strict=True)),
        "layers": arguments.layers,
        "threads": THREADS,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), layers=arguments.layers)
        for kind in arguments.kinds:
            result["rows"] += compare(Path(folder), arguments, kind)
            if arguments.layers == LAYERS:
                path = Path(__file__).parent / "results" / "trl.json"
                path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
