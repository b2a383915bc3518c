"""Counts against torch's and the packing's own, what the configurations say, and what a user is told."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from spiral_mega.capacity import flops, megatron_memory, megatron_time
from spiral_mega.capacity.flops import Work
from spiral_mega.capacity.forecast import forecast
from spiral_mega.capacity.hardware import MACHINES
from spiral_mega.capacity.megatron_memory import rank_weights
from spiral_mega.capacity.memory import fits, phases
from spiral_mega.capacity.search import changed, largest_cache, remedies, search
from spiral_mega.capacity.step_time import TEMPLATE_TOKENS, sample_batch, step_time, tree_work
from spiral_mega.capacity.tables import summary
from spiral_mega.cli import app
from spiral_mega.errors import UserError
from spiral_mega.models.dimensions import measure_model
from spiral_mega.models.model_config import resolve_model_config
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree import build_tree
from spiral_mega.packing.tree_layout import TreeLayout
from spiral_mega.simulation.workload import Lengths, SimProblem
from spiral_mega.validation.load import load_config
from spiral_mega.validation.models import check_models
from tests.support.configs import make_config
from tests.support.tiny_models import save_tiny_model

ROOT = Path(__file__).parents[2]
EXPECTED = re.compile(r"^# plan --nodes (\d+) --gpu (\S+): (.*)$", re.MULTILINE)
FIELD = sorted(
    path.name for path in (ROOT / "configs").glob("*.yaml") if EXPECTED.search(path.read_text())
)
SHAPE: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3},
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
    },
}


def field(name: str, *overrides: str) -> Any:
    return load_config(ROOT / "configs" / name, overrides)


def test_the_field_has_its_configurations() -> None:
    assert {
        "qwen3_4b_paper.yaml",
        "qwen3_4b_grpo.yaml",
        "qwen3_8b.yaml",
        "qwen3_8b_lora.yaml",
    } <= set(FIELD)
    assert {"qwen3_8b_megatron.yaml", "qwen3_30b_a3b_megatron.yaml"} <= set(FIELD)


@pytest.mark.parametrize("name", FIELD)
def test_the_memory_in_a_configurations_comment_is_what_plan_expects_and_fits(name: str) -> None:
    ((nodes, gpu, said),) = EXPECTED.findall((ROOT / "configs" / name).read_text())
    config = field(name)
    sizes, machine = (
        measure_model(resolve_model_config(config.model), config.model.lora),
        MACHINES[gpu],
    )
    world = int(nodes) * machine.node_gpus
    assert said == summary(phases(config, sizes, world), machine)
    assert fits(config, sizes, world, machine)


def test_the_papers_token_budgets_are_equal() -> None:
    spiral, grpo = field("qwen3_4b_paper.yaml"), field("qwen3_4b_grpo.yaml")
    a = spiral.algorithm
    sampled = (
        a.search_traces + a.num_sets * a.aggregation_traces
    ) * spiral.rollout.sampling.max_response_tokens
    assert (
        sampled
        == grpo.algorithm.search_traces * grpo.rollout.sampling.max_response_tokens
        == 98_304
    )


def test_sizes_are_those_that_the_models_are_known_by() -> None:
    paper = field("qwen3_4b_paper.yaml")
    small = measure_model(resolve_model_config(paper.model), paper.model.lora)
    large = measure_model(resolve_model_config(field("qwen3_8b.yaml").model), None)
    assert (small.params, large.params) == (4_022_468_096, 8_190_735_360)
    assert small.kv_bytes == large.kv_bytes == 147_456
    per_layer = 32 * (2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728))
    assert small.trained_params == 36 * per_layer + 32 * (2560 + 151_936)


def test_a_mixture_of_experts_has_the_sizes_it_is_known_by() -> None:
    """30.5 B weights, 3.3 B of them for a token, as Qwen says; counted here by hand."""
    sizes = measure_model(resolve_model_config(field("qwen3_30b_a3b_megatron.yaml").model), None)
    expert, table = 3 * 2048 * 768, 151_936 * 2048
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    layer = attention + 128 * expert + 128 * 2048 + 2 * 2048 + 2 * 128
    assert sizes.params == 48 * layer + 2 * table + 2048 == 30_532_122_624
    assert (sizes.moe_layers, sizes.experts, sizes.experts_per_token, sizes.expert_params) == (
        48,
        128,
        8,
        expert,
    )
    assert sizes.active_params == 48 * (attention + 8 * expert + 128 * 2048) + table
    fsdp = field("qwen3_30b_a3b_megatron.yaml", "policy.backend=fsdp", *cut())
    with pytest.raises(UserError, match=r"mixtures of experts on policy\.backend=megatron only"):
        forecast(fsdp, print, nodes=2, gpu="h200")


def cut(**layout: int) -> list[str]:
    """Overrides for a layout in which what is not named is 1."""
    kinds = (
        "tensor_parallel",
        "pipeline_parallel",
        "virtual_stages",
        "context_parallel",
        "expert_parallel",
    )
    return [f"policy.megatron.{kind}={layout.get(kind, 1)}" for kind in kinds]


@pytest.mark.parametrize("name", ["qwen3_8b_megatron.yaml", "qwen3_30b_a3b_megatron.yaml"])
def test_the_ranks_of_a_megatron_layout_hold_the_model_between_them(name: str) -> None:
    config = field(name, *cut(pipeline_parallel=2, virtual_stages=3))
    sizes = measure_model(resolve_model_config(config.model), None)
    assert (
        sum(held.dense + held.experts for held in (rank_weights(config, sizes, s) for s in (0, 1)))
        == sizes.params
    )
    spread = field(
        name, *cut(tensor_parallel=4, pipeline_parallel=2, virtual_stages=3, expert_parallel=4)
    )
    norms = sizes.layers * (2 * sizes.hidden + 2 * sizes.head_dim) + sizes.hidden
    whole = norms + sizes.moe_layers * sizes.experts * sizes.hidden  # and routers, on every rank
    assert 4 * sum(
        held.dense + held.experts for held in (rank_weights(spread, sizes, s) for s in (0, 1))
    ) == (sizes.params + 3 * whole)


def test_a_megatron_layout_trades_memory_for_time() -> None:
    def of(*more: str, **layout: int) -> tuple[float, float, float]:
        config = field("qwen3_8b_megatron.yaml", *cut(**layout), "batch.problems=64", *more)
        sizes, machine = (
            measure_model(resolve_model_config(config.model), config.model.lora),
            MACHINES["h100-80"],
        )
        held = megatron_memory.stages(config, sizes, 8)
        work = sum(
            (tree_work(problem) for problem in sample_batch(config, Lengths(), 0)), Work(0, 0, 0)
        )
        time = megatron_time.training_seconds(config, sizes, machine, 8, work)
        return (
            max(sum(t.resident.values()) for t in held),
            max(sum(t.update.values()) for t in held),
            time,
        )

    plain, tensor, context = of(), of(tensor_parallel=4), of(context_parallel=2)
    pipeline, virtual = of(pipeline_parallel=4), of(pipeline_parallel=4, virtual_stages=3)
    assert tensor[0] < plain[0] / 3
    assert tensor[1] < plain[1]
    assert tensor[2] > plain[2]
    assert pipeline[0] < plain[0] / 2
    assert pipeline[2] > virtual[2] > plain[2]
    assert virtual[1] > pipeline[1]  # more micro-batches in flight
    assert context[0] == plain[0]
    assert context[1] < plain[1]
    adapters = of("model.lora={rank: 32}", tensor_parallel=4)
    assert adapters[0] < tensor[0] / 2


def test_flops_are_those_that_torch_counts() -> None:
    tokens = 48
    config = Qwen3Config(**SHAPE, attn_implementation="eager")
    model = Qwen3ForCausalLM(config)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    counted = {
        str(op).rpartition(".")[2]: count
        for op, count in counter.get_flop_counts()["Global"].items()
    }
    sizes = measure_model(config, None)
    # Eager attention computes all tokens^2 pairs; its backward pass four products for two.
    products, scores = counted["mm"], counted["bmm"]
    forward, top = flops.linear(sizes, tokens), flops.head(sizes, tokens)
    assert products == 3 * forward + 3 * top
    assert scores == 3 * flops.attention(sizes, tokens**2)
    work = Work(tokens, tokens, tokens**2)
    # Besides what torch counts: the head's logits and the attention's scores are computed again in the backward pass.
    again = top + 0.5 * flops.attention(sizes, tokens**2)
    assert (
        flops.training(sizes, work, frozen=False, checkpointing=False) == products + scores + again
    )


def test_a_trees_tokens_and_pairs_are_those_that_the_packing_computes() -> None:
    config = field(
        "qwen3_4b_paper.yaml",
        "batch.problems=6",
        "rollout.sampling.max_response_tokens=90",
        "algorithm.target_length=null",
    )
    for draw, problem in enumerate(
        sample_batch(config, Lengths(median=40, prompt_low=5, prompt_high=20), seed=3)
    ):
        tree = build_tree(_sequences(draw, problem))
        layout = TreeLayout(tree.depth, tree.subtree_end)
        seen = sum(int(d) + 1 for d in tree.depth)  # a token sees its path
        work = tree_work(problem)
        assert layout.segments
        assert work.tokens == tree.num_tokens
        assert work.head_tokens == sum(problem.lengths())
        assert work.pairs == pytest.approx(
            seen, rel=0.02
        )  # it counts half a pair for a token with itself


def _sequences(draw: int, problem: SimProblem) -> list[TrainingSequence]:
    """With tokens that nothing shares by chance."""
    rng = random.Random(draw)

    def text(count: int) -> list[int]:
        return [rng.randrange(2**30) for _ in range(count)]

    start, header = text(problem.prompt), text(problem.prompt + TEMPLATE_TOKENS)
    traces = [text(length) for length in problem.search]
    pairs = [(start, trace) for trace in traces]
    for members, answers in zip(problem.sets, problem.aggregation, strict=True):
        context = [*header, *(token for j in members for token in traces[j])]
        pairs += [(context, text(length)) for length in answers]
    return [
        TrainingSequence(SequenceKey(draw, i), p, r, [0.0] * len(r), 1.0, 1.0)
        for i, (p, r) in enumerate(pairs)
    ]


def test_a_step_takes_longer_on_fewer_or_slower_gpus_and_with_longer_traces() -> None:
    config = field("qwen3_8b_lora.yaml", "batch.problems=16")
    sizes = measure_model(resolve_model_config(config.model), config.model.lora)

    def seconds(gpu: str, nodes: int, median: float) -> float:
        return step_time(config, sizes, MACHINES[gpu], nodes, Lengths(median=median)).total

    usual = seconds("h100-80", 1, 800)
    assert seconds("h100-80", 2, 800) < usual < seconds("a100-80", 1, 800)
    assert seconds("b200", 1, 800) < seconds("h200", 1, 800) < usual < seconds("h100-80", 1, 1600)


def test_a_grpo_step_samples_its_search_traces_alone() -> None:
    config = field("qwen3_4b_grpo.yaml", "batch.problems=8")
    batch = sample_batch(config, Lengths(), 0)
    assert all(len(problem.search) == 12 and not problem.sets for problem in batch)
    sizes = measure_model(resolve_model_config(config.model), config.model.lora)
    time = step_time(config, sizes, MACHINES["h100-80"], 1, Lengths())
    assert time.sampled_tokens == sum(sum(problem.search) for problem in batch)
    assert time.sampling > 0


def test_remedies_lower_the_peak_and_layouts_found_fit() -> None:
    config = field(
        "qwen3_8b.yaml",
        "rollout.engine.sleep=false",
        "policy.activation_checkpointing=false",
        "batch.problems=8",
    )
    sizes, machine = measure_model(resolve_model_config(config.model), None), MACHINES["h100-80"]
    assert not fits(config, sizes, 16, machine)
    now = max(phase.total for phase in phases(config, sizes, 16))
    found = {next(iter(changes)): peak for changes, peak in remedies(config, sizes, 16, machine)}
    assert {
        "rollout.engine.sleep",
        "policy.activation_checkpointing",
        "rollout.engine.kv_cache_mb",
    } <= found.keys()
    assert max(found.values()) < now
    layouts = search(config, sizes, machine, 2, Lengths(median=400))
    assert layouts == sorted(layouts, key=lambda layout: layout.time.total)
    assert all(fits(changed(config, layout.changes), sizes, 16, machine) for layout in layouts)
    best = changed(config, layouts[0].changes)
    more = changed(
        best, {"rollout.engine.kv_cache_mb": largest_cache(best, sizes, 16, machine) + 4096}
    )
    assert not fits(more, sizes, 16, machine)  # it is the largest cache


def test_the_command_ends_with_1_where_the_run_does_not_fit_and_says_what_would_help(
    tmp_path: Path,
) -> None:
    picture = tmp_path / "memory.png"
    common = ["plan", str(ROOT / "configs/qwen3_8b.yaml"), "batch.problems=8"]
    well = CliRunner().invoke(app, [*common, "--nodes", "2", "--plot", str(picture)])
    assert well.exit_code == 0, well.output
    assert "per rank at the peak" in well.output
    assert "assumptions, none measured" in well.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    ill = CliRunner().invoke(app, [*common, "--gpus-per-node", "4", "--nodes", "1"])
    assert ill.exit_code == 1
    assert "DOES NOT FIT" in ill.output
    assert "rollout.engine.kv_cache_mb=" in ill.output
    unknown = CliRunner().invoke(app, [*common, "--gpu", "tpu"])
    assert unknown.exit_code == 2


def test_a_run_refuses_a_model_other_than_the_one_planned_with(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    own = json.loads((folder / "config.json").read_text())
    planned = {key: own[key] for key in ("model_type", "hidden_size", "num_hidden_layers")}
    check_models(make_config(folder, model={"dimensions": planned}))
    with pytest.raises(
        UserError, match=r"hidden_size is 2560 in model\.dimensions and 64 in the model"
    ):
        check_models(make_config(folder, model={"dimensions": planned | {"hidden_size": 2560}}))
