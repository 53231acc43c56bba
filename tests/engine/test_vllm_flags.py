"""The command line and the environment of a vLLM that a run owns."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightningrl.engine.vllm_flags import OURS, Launch, check_flags, command, environment
from lightningrl.errors import UserError

LAUNCH = Launch(
    folder=Path("model"),
    dtype="bfloat16",
    max_length=4096,
    lora_rank=0,
    adapters=1,
    cache_bytes=2**30,
    utilization=0.61,
    sleeps=False,
    gpu=None,
    python="",
    flags=(),
)


def flags(launch: Launch) -> dict[str, str]:
    words = command(launch, port=8000)[3:]
    return {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


def test_every_flag_that_capture_and_proof_need_is_set() -> None:
    assert command(LAUNCH, port=8000)[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert flags(replace(LAUNCH, gpu="0")) == {
        "--model": "model",
        "--host": "127.0.0.1",
        "--port": "8000",
        "--dtype": "bfloat16",
        "--max-model-len": "4096",
        "--kv-cache-memory-bytes": str(2**30),
        "--logprobs-mode": "processed_logprobs",
        "--structured-outputs-config.backend": "guidance",
        "--generation-config": "vllm",
        "--seed": "0",
        "--gpu-memory-utilization": "0.61",
        "--disable-uvicorn-access-log": "",
    }


def test_adapters_have_room_in_a_rank_that_vllm_takes() -> None:
    found = flags(replace(LAUNCH, lora_rank=12, adapters=3))
    assert (found["--max-loras"], found["--max-lora-rank"]) == ("3", "16") and "--enable-lora" in found
    with pytest.raises(UserError, match="rank `600`"):
        command(replace(LAUNCH, lora_rank=600), port=8000)


def test_a_server_sleeps_only_on_a_gpu() -> None:
    on_gpu = flags(replace(LAUNCH, sleeps=True, gpu="1"))
    assert "--enable-sleep-mode" in on_gpu and on_gpu["--gpu-memory-utilization"] == "0.61"
    assert "--enable-sleep-mode" not in flags(replace(LAUNCH, sleeps=True))  # vLLM for CPUs would exit


def test_a_server_without_a_gpu_reads_no_prompt_in_parts() -> None:
    """vLLM 0.30 to 0.33 for CPUs dies if the prompt of a request with a seed is read in parts."""
    assert "--no-enable-chunked-prefill" in flags(LAUNCH)
    assert "--no-enable-chunked-prefill" not in flags(replace(LAUNCH, gpu="0"))


@pytest.mark.parametrize(
    "flag", ["--dtype=float16", "--max_model_len", "--kv-cache-memory-bytes", "--enable-lora", "--api-key"]
)
def test_a_recipe_cannot_change_the_flags_of_the_run(flag: str) -> None:
    with pytest.raises(UserError, match=f"`{flag.partition('=')[0].replace('_', '-')}`, which the run sets itself"):
        command(replace(LAUNCH, flags=(flag, "1")), port=8000)
    assert command(replace(LAUNCH, flags=("--enforce-eager",)), port=8000)[-1] == "--enforce-eager"


@pytest.mark.parametrize(
    ("flag", "own"), [("--dtyp=float16", "--dtype"), ("--logprobs-mod", "--logprobs-mode"), ("--conf", "--config")]
)
def test_the_beginning_of_a_flag_is_that_flag(flag: str, own: str) -> None:
    with pytest.raises(UserError, match=f"short for `{own}`, which the run sets itself"):
        check_flags([flag])
    with pytest.raises(UserError, match="`--config`, which the run sets itself"):
        check_flags(["--enforce-eager", "--config=more.yaml"])
    check_flags(["--enforce-eager", "--max-num-seqs", "8", "-O0", "--tensor-parallel-size=2"])


def test_every_flag_that_the_run_sets_is_refused() -> None:
    ours = flags(replace(LAUNCH, gpu="0", lora_rank=8, sleeps=True))
    assert set(ours) - set(OURS) == {"--disable-uvicorn-access-log"}


def test_a_server_asks_for_no_key() -> None:
    assert "VLLM_API_KEY" not in environment(LAUNCH, {"VLLM_API_KEY": "secret"})


def test_a_server_inherits_what_does_not_break_sleep() -> None:
    inherited = {"HOME": "/home", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_VISIBLE_DEVICES": "0,1"}
    on_cpu = environment(LAUNCH, inherited)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in on_cpu and (on_cpu["HOME"], on_cpu["CUDA_VISIBLE_DEVICES"]) == (
        "/home",
        "0,1",
    )
    assert on_cpu["VLLM_SERVER_DEV_MODE"] == on_cpu["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert environment(replace(LAUNCH, gpu="1"), inherited)["CUDA_VISIBLE_DEVICES"] == "1"
