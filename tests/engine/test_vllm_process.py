"""What the log of a vLLM says. The lines are vLLM's own: those for GPUs are from its source."""

import pytest

from lightningrl.engine.vllm_process import cause_of, phase_of

CPU = """\
WARNING 11-22 15:34:03 [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup.
(EngineCore pid=18117) INFO 11-22 15:34:22 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(Worker pid=18580) INFO 11-22 15:34:35 [cpu_model_runner.py:68] Starting to load model /models/first...
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 311.73it/s]
(Worker pid=18580) INFO 11-22 15:34:35 [default_loader.py:501] Loading weights took 0.01 seconds
(EngineCore pid=18117) INFO 11-22 15:34:36 [kv_cache_utils.py:2327] CPU KV cache size: 2,097,152 tokens
(EngineCore pid=18117) INFO 11-22 15:34:40 [core.py:402] init engine (profile, create kv cache, warmup model) took 3.7 s
"""
GPU = """\
INFO 11-22 15:34:22 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
INFO 11-22 15:34:23 [gpu_model_runner.py:5040] Starting to load model Qwen/Qwen3-0.6B...
INFO 11-22 15:34:25 [default_loader.py:501] Loading weights took 0.51 seconds
INFO 11-22 15:34:25 [gpu_model_runner.py:5150] Model loading took 1.12 GiB memory and 2.060815 seconds
INFO 11-22 15:34:31 [backends.py:1105] Using cache directory: /home/me/.cache/vllm for vLLM's torch.compile
INFO 11-22 15:34:31 [backends.py:1167] Dynamo bytecode transform time: 5.06 s
INFO 11-22 15:34:38 [monitor.py:20] torch.compile took 11.76 s in total
INFO 11-22 15:34:39 [gpu_worker.py:760] Available KV cache memory: 4.0 GiB
Capturing CUDA graphs (decode, FULL):  40%|####      | 14/35 [00:01<00:01, 14.26it/s]
INFO 11-22 15:34:42 [gpu_model_runner.py:6582] Graph capturing finished in 3 secs, took 0.51 GiB
INFO 11-22 15:34:43 [core.py:402] init engine (profile, create kv cache, warmup model) took 18.41 s
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (CPU, [None, "starting its engine", *["loading the weights"] * 2, *["warming up"] * 2, "opening its port"]),
        (
            GPU,
            [
                *("starting its engine", "loading the weights"),
                *["warming up"] * 2,
                *["compiling"] * 4,
                *["capturing CUDA graphs"] * 2,
                "opening its port",
            ],
        ),
    ],
    ids=["CPU", "GPU"],
)
def test_each_line_of_the_log_names_the_phase_of_the_start(log: str, expected: list[str | None]) -> None:
    lines = log.splitlines(keepends=True)
    assert [phase_of("".join(lines[: count + 1])) for count in range(len(lines))] == expected


FAILED = """\
(Worker pid=8824) ERROR 11-22 16:06:26 [multiproc_executor.py:1063] RuntimeError: CPU Generator does not use offset
(EngineCore pid=8708) ERROR 11-22 16:06:26 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=8708) ERROR 11-22 16:06:26 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=8708) ERROR 11-22 16:06:26 [core.py:1512]     engine_core.run_busy_loop()
(EngineCore pid=8708) ERROR 11-22 16:06:26 [core.py:1512] RuntimeError: Worker failed with error 'CPU Generator does \
not use offset', please check the stack trace above for the root cause
(APIServer pid=8685) ERROR 11-22 16:06:26 [vllm_error.py:52] vllm.v1.engine.exceptions.EngineDeadError: see above
"""


def test_the_error_with_which_an_engine_failed_is_found_in_its_log() -> None:
    assert cause_of(FAILED) == "RuntimeError: Worker failed with error 'CPU Generator does not use offset'"
    start = FAILED.replace("encountered a fatal error", "failed to start")
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert cause_of(start.replace("RuntimeError: Worker failed", f"{memory}\n")) == memory
    assert cause_of(CPU) is None
