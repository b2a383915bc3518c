"""vLLM in the trainer's own process: continuous batching, prefix cache, tensor parallelism.

Each rank runs its own engine core ("external launcher"). The ranks of a tensor-parallel group must
be given the same requests in the same order; they then schedule alike, and need no other
coordination.

With `rollout.engine.sleep` engine and policy take turns on the device's memory, in this order:

    engine   sample, sleep            wake weights, load, wake KV cache, reset prefix cache, sample
    policy                  update,
                            empty torch's cache
    -------------------------------------------------------------------------------------> time

Sleep drops the weights, which the next sync brings again (level 2), or keeps them in CPU memory
where only adapters are synced (level 1).
"""

from __future__ import annotations

import json
import logging
import os
import random
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from spiral_mega.config import Config
from spiral_mega.config.model_set import DEFAULT_MODEL, model_for
from spiral_mega.config.schema import LoraConfig
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import ConfigError
from spiral_mega.models.weights import checked_weights, weight_shapes
from spiral_mega.rollout.engine import Replica, Request, RequestKey, RolloutEngine, Sample
from spiral_mega.rollout.vllm_experts import pack_experts_on_every_load

# vLLM reads these at import. In-process, as weights cannot be loaded into an engine core that is
# another process.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values of max_lora_rank that vLLM accepts
SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


class VllmEngine:
    """A `RolloutEngine`. Its weights are those that `load_weights` brings, never those on disk.

    `models` names the models that share the engine's weights, each with an adapter of its own;
    `for_model` returns the engine as one of them sees it.
    """

    def __init__(
        self,
        config: Config,
        stop_ids: frozenset[int],
        runtime: Runtime,
        replica: Replica,
        models: Sequence[str] = (DEFAULT_MODEL,),
    ) -> None:
        self.replica = replica
        self.stop_ids = sorted(stop_ids)
        self.temperature = config.rollout.sampling.temperature
        self.needs_weights = True  # until the first load, and after a load that failed part-way
        # By vLLM's request id: the request, and the index of the sample.
        self._in_flight: dict[str, tuple[Request, int]] = {}
        self._num_requests = 0
        self._shapes = weight_shapes(config.model.path)
        self._lora = config.model.lora if config.rollout.sync.lora == "adapter" else None
        self._adapter_ids = {model: number for number, model in enumerate(models, 1)}
        self._adapters: dict[str, Any] = {}  # LoRARequest by model, after its first load
        self._asleep = False
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with contained(runtime):
            self._llm = _make_llm(config, runtime, self._lora, num_adapters=len(models))
        _unlink_shared_memory(replica)
        self._engine = self._llm.llm_engine
        # It warns at every load that rotary embeddings, which have no weights, got none;
        # `checked_weights` is stricter.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(
            logging.ERROR
        )

    def add(self, request: Request) -> None:
        self.add_for(request, model_for(request.key.component, self._adapter_ids))

    def add_for(self, request: Request, model: str) -> None:
        """Queue a request that `model` is to answer."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        # For n samples vLLM would make n children with seeds seed + i, but return them when all
        # have finished. Separate requests return each sample as it finishes, and the prefix cache
        # serves their common prompt just the same.
        for index in range(request.num_samples):
            request_id = str(self._num_requests)
            self._num_requests += 1
            self._in_flight[request_id] = (request, index)
            params = SamplingParams(
                temperature=self.temperature,
                max_tokens=request.max_tokens,
                seed=request.seed + index,
                logprobs=0,
                stop_token_ids=self.stop_ids,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = TokensPrompt(prompt_token_ids=request.prompt_ids)
            self._engine.add_request(
                request_id,
                prompt,
                params,
                lora_request=self._adapters.get(model),
                priority=request.priority,
            )

    def abort(self, keys: Collection[RequestKey]) -> None:
        request_ids = [
            request_id
            for request_id, (request, _) in self._in_flight.items()
            if request.key in keys
        ]
        self._engine.abort_request(request_ids)
        for request_id in request_ids:
            del self._in_flight[request_id]

    def has_unfinished(self) -> bool:
        return bool(self._in_flight)

    def step(self) -> list[Sample]:
        if self.needs_weights:
            raise RuntimeError(
                "the last load_weights failed part-way: load all weights before sampling"
            )
        return [self._sample(output) for output in self._engine.step() if output.finished]

    def _sample(self, output: Any) -> Sample:
        """Return the sample in vLLM's output of a finished request."""
        request, index = self._in_flight.pop(output.request_id)
        answer = output.outputs[0]
        token_ids = list(answer.token_ids)
        by_token = zip(token_ids, answer.logprobs, strict=True)
        logprobs = [entry[token].logprob for token, entry in by_token]
        return Sample(
            key=request.key,
            index=index,
            token_ids=token_ids,
            logprobs=logprobs,
            finish=answer.finish_reason,
            cached_tokens=output.num_cached_tokens or 0,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        checked = checked_weights(weights, self._shapes)
        with self._loading():
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": checked})

    def load_adapter(
        self, weights: Iterable[tuple[str, torch.Tensor]], model: str = DEFAULT_MODEL
    ) -> None:
        from vllm.lora.request import LoRARequest

        assert self._lora is not None
        name, number = model or "policy", self._adapter_ids[model]
        tensors = {tensor_name: tensor.cpu().contiguous() for tensor_name, tensor in weights}
        # vLLM reads an adapter from files; these are in memory, and are removed once it has read
        # them.
        with (
            self._loading(),
            tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="adapter-") as folder,
        ):
            _write_adapter(Path(folder), tensors, self._lora)
            if not self._engine.add_lora(LoRARequest(name, number, folder, load_inplace=True)):
                raise RuntimeError("vLLM did not accept the adapter")
        self._adapters[model] = LoRARequest(
            name, number, "loaded"
        )  # requests must not load it again

    def reset_prefix_cache(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: requests were still in flight")

    def sleep(self) -> None:
        """Free the device's memory, but keep in CPU memory what a sync will not bring again."""
        if self._asleep:
            return
        self._llm.sleep(level=1 if self._lora is not None else 2)
        self._asleep = True

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Wake the weights before a load, and the KV cache after it.

        The cache is then empty: what it held was computed with the old weights.
        """
        self.needs_weights = True
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        yield
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
        self._asleep = False
        self.needs_weights = False
        self.reset_prefix_cache()

    def close(self) -> None:
        """Shut the engine core down. This destroys the process group too, so close the engine last."""
        self._engine.engine_core.shutdown()

    def for_model(self, model: str) -> RolloutEngine:
        """Return the engine as it serves one model alone: that model's requests and adapter."""
        return _ModelEngine(self, model)


class _ModelEngine:
    """See VllmEngine.for_model."""

    def __init__(self, engine: VllmEngine, model: str) -> None:
        self.engine, self.model, self.replica = engine, model, engine.replica
        self.step, self.abort = engine.step, engine.abort
        self.has_unfinished, self.reset_prefix_cache = (
            engine.has_unfinished,
            engine.reset_prefix_cache,
        )
        self.sleep, self.close = engine.sleep, engine.close

    def add(self, request: Request) -> None:
        self.engine.add_for(request, self.model)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the base weights, unless another model, whose base is the same, has already done so."""
        if self.engine.needs_weights:
            self.engine.load_weights(weights)

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.engine.load_adapter(weights, self.model)


def _make_llm(config: Config, runtime: Runtime, lora: LoraConfig | None, num_adapters: int) -> Any:
    """Return vLLM's engine with dummy weights; call within `contained`."""
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(
            "rollout.engine.name is 'vllm', which is not installed: install spiral_mega[vllm] "
            "(GPU) or run tools/install_cpu.sh (CPU), or set rollout.engine.name=transformers"
        ) from error
    pack_experts_on_every_load()
    engine, sampling = config.rollout.engine, config.rollout.sampling
    lora_rank = lora.rank if lora is not None else 0
    return LLM(
        model=config.model.path,
        tokenizer=config.model.tokenizer or config.model.path,
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=engine.tensor_parallel,
        dtype=config.policy.param_dtype,
        load_format="dummy",
        # A tied head may be trained away from the embedding, so the engine unties them.
        hf_overrides={"tie_word_embeddings": False},
        logprobs_mode="processed_logprobs",
        kv_cache_memory_bytes=engine.kv_cache_mb * 2**20,
        block_size=32,
        max_model_len=sampling.max_context_tokens,
        max_num_seqs=engine.max_num_seqs,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        seed=config.run.seed,
        disable_log_stats=True,
        enable_lora=lora is not None,
        max_loras=num_adapters,
        max_lora_rank=min(rank for rank in LORA_RANKS if rank >= lora_rank),
        **runtime.vllm_options(sleep=engine.sleep),
    )


def _write_adapter(folder: Path, tensors: dict[str, torch.Tensor], lora: LoraConfig) -> None:
    """Write an adapter in PEFT's format."""
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "bias": "none",
        "target_modules": list(lora.targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@contextmanager
def contained(runtime: Runtime) -> Iterator[None]:
    """Set the launcher's variables for vLLM's start; afterwards undo what vLLM changed.

    Restored are environment variables (but for VLLM_*), `torch.set_num_threads`, and the random
    states of Python, numpy and torch.
    """
    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.get_rng_state()
    os.environ["RANK"] = str(runtime.rank)
    os.environ["LOCAL_RANK"] = str(runtime.local_rank)
    os.environ["WORLD_SIZE"] = str(runtime.world_size)
    try:
        yield
    finally:
        for name in set(os.environ) - set(environment):
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update(environment)
        torch.set_num_threads = set_num_threads
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def _unlink_shared_memory(replica: Replica) -> None:
    """Unlink the shared memory by which an engine's ranks communicate in vLLM's CPU build.

    Call it once all of them have opened the memory.

    Its names contain nothing but the ranks, and vLLM unlinks them only in Python's teardown. A
    process that ends without one, killed or not, would leave names that keep the next run on this
    machine from starting.
    """
    if SHARED_MEMORY is None:
        return
    ranks = "-".join(map(str, replica.ranks(replica.index)))
    for path in Path(SHARED_MEMORY).glob(f"*-[[]{ranks}[]]-cpushm_*"):
        path.unlink(missing_ok=True)
