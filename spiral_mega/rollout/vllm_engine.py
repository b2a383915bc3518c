"""vLLM in the trainer's own process: continuous batching, prefix cache, tensor parallel over groups of ranks.

Each rank runs an engine core of its own ("external launcher"). The ranks of a tensor-parallel group must be given the
same requests in the same order; they then schedule alike and need no further agreement.
"""

from __future__ import annotations

import json
import logging
import os
import random
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from spiral_mega.config import Config
from spiral_mega.config.model_set import DEFAULT_MODEL, model_for
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import ConfigError
from spiral_mega.models.weights import checked_weights, weight_shapes
from spiral_mega.rollout.engine import Replica, Request, RolloutEngine, Sample
from spiral_mega.rollout.vllm_experts import pack_experts_on_every_load

# Read by vLLM at import. In-process, or the engine core would be a process of its own, out of reach of the weights.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM makes room for
SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


class VllmEngine:
    """See spiral_mega.rollout.engine.RolloutEngine. Weights are those that `load_weights` brings, never the disk's.

    `models`: the adapters that it adds to its weights, by their models' names; `for_model` tells one's requests and loads.
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
        rollout = config.rollout
        self.stop_ids = sorted(stop_ids)
        self.temperature = rollout.sampling.temperature
        self._in_flight: dict[str, tuple[Request, int]] = {}
        self._count = 0
        self._shapes = weight_shapes(config.model.path)
        self.needs_weights = True  # dummy ones, until the first load, and half of them after one that failed
        self._lora = config.model.lora if rollout.sync.lora == "adapter" else None
        self._ids = {model: number for number, model in enumerate(models, 1)}
        self._adapters: dict[str, Any] = {}  # by model, what its requests name, once there is one
        self._asleep = False
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with contained(runtime):
            try:
                from vllm import LLM
            except ImportError as error:
                raise ConfigError(
                    "rollout.engine.name is 'vllm', which is not installed: install spiral_mega[vllm] (GPU) or run "
                    "tools/install_cpu.sh (CPU), or set rollout.engine.name=transformers"
                ) from error
            pack_experts_on_every_load()
            self._llm = LLM(
                model=config.model.path,
                tokenizer=config.model.tokenizer or config.model.path,
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=rollout.engine.tensor_parallel,
                dtype=config.policy.param_dtype,
                load_format="dummy",
                # A tied head may be trained apart from the embedding, so the engine's is its own.
                hf_overrides={"tie_word_embeddings": False},
                logprobs_mode="processed_logprobs",
                kv_cache_memory_bytes=rollout.engine.kv_cache_mb * 2**20,
                block_size=32,
                max_model_len=rollout.sampling.max_context_tokens,
                max_num_seqs=rollout.engine.max_num_seqs,
                enable_prefix_caching=True,
                scheduling_policy="priority",
                seed=config.run.seed,
                disable_log_stats=True,
                enable_lora=self._lora is not None,
                max_loras=len(self._ids),
                max_lora_rank=min(rank for rank in LORA_RANKS if rank >= (self._lora.rank if self._lora else 0)),
                **runtime.vllm_options(sleep=rollout.engine.sleep),
            )
        _forget_names(replica)
        self._engine = self._llm.llm_engine
        # It warns at every load that rotary embeddings, which have no weights, got none; `checked_weights` is stricter.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        # vLLM makes n children of a request with seeds seed + i, but returns them when all have ended. Made here, each
        # comes back as it ends, and the prefix cache serves their common prompt just the same.
        for index in range(request.num_samples):
            name = str(self._count)
            self._count += 1
            self._in_flight[name] = (request, index)
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
            adapter = self._adapters.get(model_for(request.component, self._ids))
            self._engine.add_request(name, prompt, params, lora_request=adapter, priority=request.priority)

    def abort(self, keys: Collection[tuple[Any, ...]]) -> None:
        names = [name for name, (request, _) in self._in_flight.items() if request.key in keys]
        self._engine.abort_request(names)
        for name in names:
            del self._in_flight[name]

    def has_unfinished(self) -> bool:
        return bool(self._in_flight)

    def step(self) -> list[Sample]:
        if self.needs_weights:
            raise RuntimeError("the last load_weights failed half-way: load a whole set of weights before sampling")
        samples = []
        for output in self._engine.step():
            if not output.finished:
                continue
            request, index = self._in_flight.pop(output.request_id)
            answer = output.outputs[0]
            token_ids = list(answer.token_ids)
            logprobs = [entry[token].logprob for token, entry in zip(token_ids, answer.logprobs, strict=True)]
            cached = output.num_cached_tokens or 0
            samples.append(Sample(request.key, index, token_ids, logprobs, answer.finish_reason, cached))
        return samples

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        checked = checked_weights(weights, self._shapes)
        with self._receiving():
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": checked})

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]], model: str = DEFAULT_MODEL) -> None:
        from vllm.lora.request import LoRARequest

        assert self._lora is not None
        tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}
        # vLLM takes an adapter from files; these are in memory, and gone when it has read them.
        with self._receiving(), tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="adapter-") as folder:
            save_file(tensors, Path(folder) / "adapter_model.safetensors")
            settings = {"peft_type": "LORA", "r": self._lora.rank, "lora_alpha": self._lora.alpha, "bias": "none"}
            settings |= {"target_modules": list(self._lora.targets)}
            (Path(folder) / "adapter_config.json").write_text(json.dumps(settings))
            name, number = model or "policy", self._ids[model]
            if not self._engine.add_lora(LoRARequest(name, number, folder, load_inplace=True)):
                raise RuntimeError("vLLM did not take the adapter")
        self._adapters[model] = LoRARequest(name, number, "loaded")  # requests must not load it again

    def reset_prefix_cache(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: requests were still in flight")

    def sleep(self) -> None:
        """Weights that a sync will not bring again are kept in CPU memory."""
        if self._asleep:
            return
        self._llm.sleep(level=1 if self._lora is not None else 2)
        self._asleep = True

    @contextmanager
    def _receiving(self) -> Iterator[None]:
        """Around new weights: memory for them first, and for the cache after, which is then empty."""
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
        """End the engine core. It takes the process group with it, so it comes last."""
        self._engine.engine_core.shutdown()

    def for_model(self, model: str) -> RolloutEngine:
        """The engine as that model's alone: its requests, and its adapter."""
        return _Part(self, model)


class _Part:
    """See VllmEngine.part."""

    def __init__(self, engine: VllmEngine, model: str) -> None:
        self.engine, self.model, self.replica = engine, model, engine.replica
        self.step, self.has_unfinished, self.abort = engine.step, engine.has_unfinished, engine.abort
        self.reset_prefix_cache, self.sleep, self.close = engine.reset_prefix_cache, engine.sleep, engine.close

    def add(self, request: Request) -> None:
        self.engine.add(changed(request, component=self.model))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The base, which is the same for all: whoever comes first brings it."""
        if self.engine.needs_weights:
            self.engine.load_weights(weights)

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.engine.load_adapter(weights, self.model)


@contextmanager
def contained(runtime: Runtime) -> Iterator[None]:
    """Give vLLM the launcher's variables, and keep what it changes in the process from lasting beyond its start."""
    environment, threads = dict(os.environ), torch.set_num_threads
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    os.environ.update(RANK=str(runtime.rank), LOCAL_RANK=str(runtime.local_rank), WORLD_SIZE=str(runtime.world_size))
    try:
        yield
    finally:
        for name in set(os.environ) - set(environment):
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update(environment)
        torch.set_num_threads = threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _forget_names(replica: Replica) -> None:
    """Take the names off the memory by which the ranks of an engine talk in vLLM's CPU build; all have joined by now.

    They tell nothing but the ranks, and vLLM takes them off in Python's teardown alone: left by a process that ended
    without one, killed or not, they would keep the next run on this machine from starting.
    """
    ranks = "-".join(map(str, replica.ranks(replica.index)))
    for path in Path(SHARED_MEMORY).glob(f"*-[[]{ranks}[]]-cpushm_*") if SHARED_MEMORY else ():
        path.unlink(missing_ok=True)
