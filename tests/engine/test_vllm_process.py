"""What the log of a starting vLLM says. The lines are vLLM's own: those for GPUs are from its source."""

import pytest

from lightningrl.engine.vllm_process import phase_of

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
