"""Config, workload and sampling parameters: strict, frozen, and every refusal one line that names key, value and limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backend.config import EngineConfig, default_cpu_threads
from backend.errors import ConfigError
from backend.sampling_params import SamplingParams
from backend.settings import Settings
from backend.workload.spec import PoissonRate, UniformLength, Workload

CASES: list[tuple[type[Settings], str, Any, str]] = [
    (EngineConfig, "cache.blocksize", 8, "unknown key 'cache.blocksize'; allowed here: block_size, num_blocks, dtype"),
    (EngineConfig, "kache.block_size", 8, "unknown key 'kache'; allowed here: model, cache, scheduler"),
    (EngineConfig, "cache.block_size", 7, "cache.block_size = 7 is not supported; allowed: 1, 2, 4, 8, 16"),
    (EngineConfig, "cache.block_size", True, "cache.block_size = True is not supported; allowed: 1, 2, 4"),
    (EngineConfig, "kernels.enforce_eager", 1, "kernels.enforce_eager = 1: input should be a valid boolean"),
    (EngineConfig, "kernels.backend", "cuda", "kernels.backend = 'cuda' is not supported; allowed: 'auto', 'triton'"),
    (EngineConfig, "cache.num_blocks", "many", "cache.num_blocks = 'many': input should be a valid integer"),
    (EngineConfig, "cache.num_blocks", 2**63, "cache.num_blocks = 9223372036854775808: input should be less than"),
    (EngineConfig, "cache.num_blocks", True, "cache.num_blocks = True: input should be a valid integer"),
    (EngineConfig, "cache.gpu_memory_utilization", 1.5, "cache.gpu_memory_utilization = 1.5: input should be less"),
    (
        EngineConfig,
        "scheduler.max_num_seqs",
        0,
        "scheduler.max_num_seqs = 0: input should be greater than or equal to 1",
    ),
    (EngineConfig, "model.name", "", "model.name = ''"),
    (EngineConfig, "cache.layout", "ring", "cache.layout = 'ring' is not supported; allowed: 'paged', 'contiguous'"),
    (EngineConfig, "scheduler.batching", "dynamic", "scheduler.batching = 'dynamic' is not supported; allowed: 'cont"),
    (
        EngineConfig,
        "scheduler.policy",
        "lifo",
        "scheduler.policy = 'lifo' is not supported; allowed: 'fcfs', 'prefill_",
    ),
    # What comes later is refused by name until it exists.
    (EngineConfig, "cache.dtype", "int2", "cache.dtype = 'int2' is not supported; allowed: 'auto'"),
    (EngineConfig, "cache.enable_prefix_caching", "yes", "cache.enable_prefix_caching = 'yes'"),
    (EngineConfig, "scheduler.preemption", "drop", "scheduler.preemption = 'drop' is not supported"),
    (
        EngineConfig,
        "quantization.method",
        "int3",
        "quantization.method = 'int3' is not supported; allowed: 'int8', 'int4', 'nf4', 'fp8', 'w8a8_int8' or 'llm",
    ),
    *(
        (
            EngineConfig,
            "quantization.method",
            method,
            f"quantization.method: '{method}' needs calibration, for which loading a model has no text: `servelab quantize "
            f"MODEL --method {method} --name NAME`",
        )
        for method in ("gptq", "awq")
    ),
    (
        EngineConfig,
        "quantization",
        {"method": "fp8", "group_size": 64},
        "group_size = 64 belongs to method = 'int4' or 'nf4'",
    ),
    (
        EngineConfig,
        "quantization",
        {"method": "nf4", "threshold": 6.0},
        "threshold = 6.0 belongs to method = 'llm_int8'",
    ),
    (
        EngineConfig,
        "quantization",
        {"method": "llm_int8", "threshold": 0.0},
        "quantization.threshold = 0.0: input should",
    ),
    (EngineConfig, "quantization", {"head": "int8"}, "head = 'int8' needs a method for the layers"),
    (
        EngineConfig,
        "speculative.method",
        "oracle",
        "speculative.method = 'oracle' is not supported; allowed: 'none', 'ngram'",
    ),
    (EngineConfig, "speculative", {"ngram_min": 3, "ngram_max": 2}, "ngram_min = 3 is above ngram_max = 2"),
    (EngineConfig, "speculative.num_speculative_tokens", 0, "speculative.num_speculative_tokens = 0: input should"),
    (EngineConfig, "target.kind", "http", "target.kind = 'http' is not supported; allowed: 'in_process'"),
    (EngineConfig, "parallel.tensor", 2, "parallel.tensor = 2 is not supported; allowed: 1"),
    (
        Workload,
        "arrivals.kind",
        "bursts",
        "arrivals.kind = 'bursts' is not supported; allowed: 'all_at_once', 'closed_loop'",
    ),
    (Workload, "arrivals.kind", "poisson", "arrivals.rate is missing"),
    (Workload, "output_len", 0, "output_len = 0: input should be greater than or equal to 1"),
    (Workload, "output_len", {"kind": "uniform", "min": 5, "max": 2}, "output_len: min = 5 is above max = 2"),
    (Workload, "output_len", {"kind": "normal", "mean": 5, "std": float("inf")}, "output_len.std = inf"),
    (
        Workload,
        "output_len",
        {"kind": "uniform", "min": 1, "max": 10**24},
        "output_len.max = 1000000000000000000000000",
    ),
    (Workload, "source.prompts", [1], "source.prompts.0 = 1: input should be a valid string"),
    (Workload, "source.prompts", "hello", "source.prompts = 'hello': input should be a valid list"),
    (Workload, "source.prompts", [], "prompts is empty"),
    (Workload, "source", {"kind": "shared_prefix", "groups": 1000, "prompts_per_group": 1000}, "at most 100,000"),
    (Workload, "sampling.temperature", -1.0, "sampling.temperature = -1.0: input should be greater than or equal to 0"),
    (Workload, "slo.ttft_ms", 0.0, "slo.ttft_ms = 0.0: input should be greater than 0"),
    (SamplingParams, "temperature", float("nan"), "temperature = nan: input should be a finite number"),
    (SamplingParams, "temperature", float("inf"), "temperature = inf"),
    (SamplingParams, "top_p", 0.0, "top_p = 0.0: input should be greater than 0"),
    (SamplingParams, "top_p", 1.01, "top_p = 1.01: input should be less than or equal to 1"),
    (SamplingParams, "top_k", -2, "top_k = -2"),
    (SamplingParams, "max_tokens", 0, "max_tokens = 0: input should be greater than or equal to 1"),
    (SamplingParams, "min_tokens", 200, "min_tokens = 200 is above max_tokens = 128"),
    (SamplingParams, "stop", [""], "stop holds an empty string"),
    (SamplingParams, "stop_token_ids", [-1], "stop_token_ids.0 = -1"),
    (SamplingParams, "seed", -1, "seed = -1"),
]


@pytest.mark.parametrize(("cls", "key", "value", "message"), CASES, ids=lambda value: str(value)[:40])
def test_a_refusal_names_the_key_the_value_and_the_limit(
    cls: type[Settings], key: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        cls().with_overrides({key: value})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize("cls", [EngineConfig, Workload, SamplingParams])
def test_settings_round_trip_and_cannot_be_changed(cls: type[Settings]) -> None:
    settings = cls()
    assert cls.from_dict(settings.to_dict()) == settings
    with pytest.raises(Exception, match="frozen"):
        settings.seed = 3  # type: ignore[attr-defined]


def test_a_hash_is_the_same_in_every_process_and_differs_with_any_value() -> None:
    code = "from backend.config import EngineConfig; print(EngineConfig().stable_hash())"
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[1],
        env={"PYTHONHASHSEED": "7", "PATH": ""},
    )
    assert elsewhere.stdout.strip() == EngineConfig().stable_hash()
    assert EngineConfig().with_overrides({"cache.block_size": 8}).stable_hash() != EngineConfig().stable_hash()


def test_toml_as_users_write_it(tmp_path: Path) -> None:
    path = tmp_path / "workload.toml"
    path.write_bytes(
        b"\xef\xbb\xbf"  # some editors begin a file with a byte order mark
        b'seed = 3\noutput_len = { kind = "uniform", min = 16, max = 64 }\n'
        b'[arrivals]\nkind = "poisson"\nrate = 4\n[sampling]\ntemperature = 0\nstop = ["END"]\n'
    )
    workload = Workload.from_toml(path)
    assert workload.output_len == UniformLength(min=16, max=64)
    assert workload.arrivals == PoissonRate(rate=4.0)
    assert workload.sampling.stop == ("END",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"seed = ", "workload.toml: "),
        (b"\xff\xfe", "workload.toml: "),
        (b"a = " + b"[" * 100_000, "workload.toml: "),
        (b"seed = " + b"9" * 10_000, "workload.toml: a number has thousands of digits"),
        (b"#" * 5_000_000, "workload.toml: 5,000,000 bytes; at most 4,194,304 are read"),
        (b"sead = 3", "unknown key 'sead'"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "workload.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        Workload.from_toml(path)
    assert "\n" not in str(caught.value)


def test_devices_and_folders_are_no_settings(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero"), tmp_path / "missing", Path("~nobody-of-this-name/w.toml")):
        with pytest.raises(ConfigError, match=str(path)):
            Workload.from_toml(path)


def test_another_kind_starts_its_table_afresh() -> None:
    poisson = Workload().with_overrides({"arrivals.rate": 2.0, "arrivals.kind": "poisson"})
    assert poisson.arrivals == PoissonRate(rate=2.0)
    closed = poisson.with_overrides({"arrivals.kind": "closed_loop"})
    assert closed.to_dict()["arrivals"] == {"kind": "closed_loop", "concurrency": 4}


def test_resolving_fills_in_what_depends_on_the_device() -> None:
    on_cpu = EngineConfig().resolve(device="cpu", max_model_len=8192)
    assert (on_cpu.model.dtype, on_cpu.scheduler.max_num_seqs, on_cpu.scheduler.max_num_batched_tokens) == (
        "float32",
        16,
        512,
    )
    assert on_cpu.kernels.cpu_threads == default_cpu_threads() >= 1
    assert (on_cpu.kernels.backend, on_cpu.kernels.enforce_eager) == ("reference", True)
    assert on_cpu.scheduler.async_scheduling is False
    on_cuda = EngineConfig().resolve(device="cuda", max_model_len=8192)
    assert (on_cuda.model.dtype, on_cuda.scheduler.max_num_seqs, on_cuda.scheduler.max_num_batched_tokens) == (
        "bfloat16",
        256,
        8192,
    )
    assert (on_cuda.kernels.backend, on_cuda.kernels.enforce_eager) == ("triton", False)
    assert on_cuda.scheduler.async_scheduling is True
    asked = EngineConfig().with_overrides({"scheduler.max_num_seqs": 3, "model.max_model_len": 100})
    resolved = asked.resolve(device="cuda", max_model_len=8192)
    assert (resolved.scheduler.max_num_seqs, resolved.model.max_model_len) == (3, 100)


def test_kernels_of_triton_are_refused_on_a_cpu_unless_they_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = EngineConfig().with_overrides({"kernels.backend": "triton"})
    assert asked.resolve(device="cuda", max_model_len=8192).kernels.backend == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert asked.resolve(device="cpu", max_model_len=8192).kernels.backend == "triton"
    for value in ("0", ""):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        with pytest.raises(
            ConfigError, match=r"kernels\.backend = 'triton' needs a CUDA device; allowed on a CPU: 'auto', 'ref"
        ):
            asked.resolve(device="cpu", max_model_len=8192)
