"""How is a vLLM that the run owns started? Its command line and its environment, as a pure function of what it serves.

The run sets every flag on which token-exact capture, the proof of the weights or the memory of the GPU depend. A recipe
may add others (`engine.flags`), but not change these.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightningrl.errors import UserError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for `--max-lora-rank`."""
HOST = "127.0.0.1"
WITHHELD = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_API_KEY",
)
"""Variables that a server does not inherit: with `expandable_segments` in torch's allocator, sleep frees nothing;
`VLLM_CPU_KVCACHE_SPACE` would override `--kv-cache-memory-bytes`; with a key, a server refuses requests of the run.
"""

OURS = (
    *("--model", "--served-model-name", "--host", "--port", "--dtype", "--max-model-len", "--kv-cache-memory-bytes"),
    *("--gpu-memory-utilization", "--logprobs-mode", "--structured-outputs-config.backend", "--generation-config"),
    *("--seed", "--max-loras", "--max-lora-rank", "--enable-lora", "--no-enable-lora", "--enable-sleep-mode"),
    *("--no-enable-sleep-mode", "--config", "--api-key"),
)
"""Flags that a recipe cannot have. `--config` names a file with flags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What one server is started with."""

    folder: Path
    """Hugging Face folder of the model."""
    dtype: str
    max_length: int
    """Tokens of a request, prompt and completion together."""
    lora_rank: int
    """Largest rank of an adapter; 0: the server holds none."""
    adapters: int
    """Number of policies with an adapter."""
    cache_bytes: int
    """Memory for keys and values."""
    utilization: float
    """Share of the GPU that must be free at the start. With `cache_bytes`, vLLM uses it for nothing else."""
    sleeps: bool
    """Whether it gives its GPU memory to the trainer."""
    gpu: str | None
    """The value of CUDA_VISIBLE_DEVICES; None: it is not set."""
    python: str
    """Python of the environment that has vLLM; empty: this one."""
    flags: tuple[str, ...]
    """The recipe's own flags."""


def command(launch: Launch, *, port: int) -> list[str]:
    """The command line of a server on `port`. Raises `UserError` if the recipe's flags change one of ours."""
    ours = {
        "--model": str(launch.folder),
        "--host": HOST,
        "--port": str(port),
        "--dtype": launch.dtype,
        "--max-model-len": str(launch.max_length),
        "--kv-cache-memory-bytes": str(launch.cache_bytes),
        "--logprobs-mode": "processed_logprobs",
        "--structured-outputs-config.backend": "guidance",
        "--generation-config": "vllm",
        "--seed": "0",
    }
    if launch.lora_rank:
        ours |= {"--max-loras": str(launch.adapters), "--max-lora-rank": str(slot_rank(launch.lora_rank))}
    if launch.gpu is not None:
        ours["--gpu-memory-utilization"] = f"{launch.utilization:g}"
    switches = ["--disable-uvicorn-access-log"]  # a line for every request would hide the rest of the log
    if launch.lora_rank:
        switches.append("--enable-lora")
    if launch.sleeps and launch.gpu is not None:  # a vLLM for CPUs exits if it gets this flag
        switches.append("--enable-sleep-mode")
    if launch.gpu is None:  # a CPU's generator cannot go back: vLLM dies when it reads a prompt with a seed in parts
        switches.append("--no-enable-chunked-prefill")
    check_flags(launch.flags)
    named = [word for pair in ours.items() for word in pair]
    # the module, not the command `vllm`, which a package for CPUs does not have
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    return [launch.python or sys.executable, *module, *named, *switches, *launch.flags]


def environment(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of a server: what the run has, without what breaks sleep, and what its routes need."""
    own = {
        "VLLM_SERVER_DEV_MODE": "1",  # loading weights, sleep, prefix cache
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the folder has everything
        "PYTHONUNBUFFERED": "1",  # the log tells at once what the server does
    }
    if launch.gpu is not None:
        own["CUDA_VISIBLE_DEVICES"] = launch.gpu
    return {name: value for name, value in inherited.items() if name not in WITHHELD} | own


def slot_rank(rank: int) -> int:
    """The smallest value of `--max-lora-rank` with room for `rank`."""
    fitting = [value for value in RANKS if value >= rank]
    if not fitting:
        raise UserError(
            f"vLLM takes no adapter of rank `{rank}`", hint=f"set `model.lora_rank` to at most `{RANKS[-1]}`"
        )
    return fitting[0]


def check_flags(flags: Sequence[str]) -> None:
    """Raises `UserError` for the first flag that the run sets itself, or the beginning of one, which vLLM takes too."""
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        meant = next((own for own in OURS if name.startswith("--") and own.startswith(name)), None)
        if meant is not None:
            hint = "leave it out: settings of the recipe decide it (docs/engines.md)"
            shown = f"`{name}`" if name == meant else f"`{name}`, short for `{meant}`"
            raise UserError(f"`engine.flags` has {shown}, which the run sets itself", hint=hint)
