"""What the embedded engine samples is what the model says: in any batch, for any architecture, to the last token."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from spiral_mega.distributed.runtime import Runtime
from spiral_mega.models.weights import pretrained_weights
from spiral_mega.rollout import build_engine
from spiral_mega.rollout.kv_cache import MIN_SPARE
from spiral_mega.rollout.transformers_engine import TransformersEngine
from tests.rollout.engine_models import (
    GPT2_POSITIONS,
    build,
    chi_square_p,
    drain,
    engine_of,
    generate,
    next_token_probabilities,
    ragged_prompts,
    request,
    teacher_forced,
)
from tests.support.configs import make_config
from tests.support.tiny_models import END_ID, PAD_ID, VOCAB, save_tiny_model

MANY_STOPS = tuple(
    range(1, 15)
)  # responses of a few tokens, so that rows leave the batch at all times
CPU = Runtime(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def model():
    return build("qwen3")


def assert_teacher_forced(model, requests, samples, temperature, tolerance=2e-5):
    for each in requests:
        for index in range(each.num_samples):
            sample = samples[each.key.episode, index]
            expected = teacher_forced(model, each.prompt_ids, sample.token_ids, temperature)
            got = torch.tensor(sample.logprobs)
            assert got.shape == expected.shape
            assert (got - expected).abs().max() < tolerance, (each.key, index)


def same(left, right):
    return left.token_ids == right.token_ids and left.finish == right.finish


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3-groups", "llama", "qwen3-windows", "gemma3-windows"]
)
def test_logprobs_are_those_of_a_plain_forward_over_prompt_and_response(family, temperature):
    """Ragged prompts, several samples each, more rows than the batch holds, rows that leave early."""
    model = build(family)
    requests = [
        request(i, prompt, samples=1 + i % 3, seed=1000 * i, tokens=20)
        for i, prompt in enumerate(ragged_prompts(9))
    ]
    samples = generate(
        engine_of(model, temperature=temperature, stop=MANY_STOPS, max_num_seqs=7), requests
    )
    assert_teacher_forced(model, requests, samples, temperature)
    assert len({len(sample.token_ids) for sample in samples.values()}) > 3
    assert {sample.finish for sample in samples.values()} == {"stop", "length"}


def test_a_long_response_outgrows_the_memory_of_its_cache_and_stays_right(model):
    asked = [
        request(i, prompt, samples=2, seed=100 * i, tokens=90 + 60 * i)
        for i, prompt in enumerate([[2, 9], [3]])
    ]
    samples = generate(engine_of(model, stop=()), asked)
    assert max(len(sample.token_ids) for sample in samples.values()) > 2 * MIN_SPARE
    assert_teacher_forced(model, asked, samples, 1.0)


def test_the_tolerance_above_tells_left_padding_that_leaks_or_a_wrong_position(model):
    """What the log-probs would be off by, if padding were attended to or positions counted it."""
    prompt, response = ragged_prompts(1)[0], [5, 6, 7]
    padded = [PAD_ID] * 3 + prompt
    gap = teacher_forced(model, prompt, response, 1.0) - teacher_forced(
        model, padded, response, 1.0
    )
    assert gap.abs().max() > 1e-2


@pytest.mark.parametrize("family", ["qwen3", "qwen3-windows"])
def test_a_response_depends_on_its_prompt_and_seed_alone(family):
    """Not on its neighbours, on max_num_seqs, or on the order of requests."""
    model = build(family)
    requests = [
        request(i, p, samples=3, seed=50 * i, tokens=5 + 3 * i)
        for i, p in enumerate(ragged_prompts(7))
    ]
    runs = [
        generate(engine_of(model, stop=MANY_STOPS, max_num_seqs=size), requests)
        for size in (1, 2, 5, 64)
    ]
    runs.append(generate(engine_of(model, stop=MANY_STOPS, max_num_seqs=4), requests[::-1]))
    alone: dict = {}
    for each in random.Random(0).sample(requests, len(requests)):
        alone |= generate(engine_of(model, stop=MANY_STOPS), [each])
    for run in runs:
        assert run.keys() == alone.keys()
        for key, sample in run.items():
            assert same(sample, alone[key])
            assert torch.allclose(
                torch.tensor(sample.logprobs), torch.tensor(alone[key].logprobs), atol=1e-5
            )


def test_sample_i_of_seed_s_is_sample_0_of_seed_s_plus_i(model):
    prompt = ragged_prompts(1)[0]
    base = 2**62 - 2  # the largest that derive_seed gives, less one
    together = generate(engine_of(model), [request("s", prompt, samples=6, seed=base)])
    for i in range(6):
        single = generate(engine_of(model), [request("s", prompt, seed=base + i)])
        assert same(together["s", i], single["s", 0])
    assert len({tuple(sample.token_ids) for sample in together.values()}) == 6, (
        "other seeds, other responses"
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_first_tokens_over_many_seeds_follow_the_exact_softmax(model, temperature):
    prompt, n = [9, 8, 7, 6], 6000
    requests = [request(i, prompt, samples=n // 4, seed=10**6 * i, tokens=1) for i in range(4)]
    samples = generate(engine_of(model, temperature=temperature, max_num_seqs=2000), requests)
    counts = torch.bincount(
        torch.tensor([s.token_ids[0] for s in samples.values()]), minlength=VOCAB
    )
    exact = next_token_probabilities(model, prompt, temperature)
    assert chi_square_p(counts, n * exact) > 1e-3
    other = next_token_probabilities(model, prompt, temperature + 0.15)
    assert chi_square_p(counts, n * other) < 1e-3, "the test can tell a temperature from another"


def test_later_tokens_follow_the_exact_joint_distribution_of_short_responses(model):
    """Pairs of tokens, by enumeration: what was drawn at one position must not tell the next uniform."""
    prompt, n, few = [20, 30], 5000, 12
    first = next_token_probabilities(model, prompt)
    likely = first.topk(few).indices.tolist()
    samples = generate(
        engine_of(model, max_num_seqs=2500), [request("p", prompt, samples=n, seed=3, tokens=2)]
    )
    expected, counts = [], []
    for a in likely:
        if a == END_ID:
            continue
        second = next_token_probabilities(model, [*prompt, a])
        expected.append(first[a] * second * n)
        drawn = [s.token_ids[1] for s in samples.values() if s.token_ids[0] == a]
        counts.append(torch.bincount(torch.tensor(drawn, dtype=torch.long), minlength=VOCAB))
    expected, counts = torch.cat(expected), torch.cat(counts)
    rest = torch.tensor([n - float(expected.sum())]), torch.tensor([n - int(counts.sum())])
    assert (
        chi_square_p(torch.cat([counts, rest[1]]), torch.cat([expected, rest[0].double()])) > 1e-3
    )


def test_a_temperature_near_zero_is_greedy_decoding(model):
    prompts = ragged_prompts(5)
    requests = [request(i, p, samples=2, seed=i, tokens=10) for i, p in enumerate(prompts)]
    samples = generate(engine_of(model, temperature=1e-4), requests)
    for (i, _), sample in samples.items():
        for position, token in enumerate(sample.token_ids):
            context = [*prompts[i], *sample.token_ids[:position]]
            assert token == int(next_token_probabilities(model, context).argmax())


def test_a_token_whose_logit_is_minus_infinity_is_never_sampled():
    model = build("llama")
    kept = torch.zeros(VOCAB)
    kept[torch.arange(0, VOCAB, 2)] = -torch.inf
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + kept)
    samples = generate(engine_of(model), [request("m", [5, 4], samples=40, tokens=10)])
    tokens = [token for sample in samples.values() for token in sample.token_ids]
    assert len(tokens) > 300
    assert all(token % 2 for token in tokens)


def forced_model(script):
    """A model that puts all probability on script[length of the context so far]."""
    model = build("llama")

    def force(module, args, kwargs, output):
        positions = kwargs["position_ids"][:, -1] + 1
        logits = torch.full((len(positions), 1, VOCAB), -torch.inf)
        for row, position in enumerate(positions.tolist()):
            logits[row, 0, script(position)] = 0.0
        output.logits = logits
        return output

    model.register_forward_hook(force, with_kwargs=True)
    return model


@pytest.mark.parametrize("stop", [END_ID, PAD_ID])
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6])
def test_a_response_ends_with_its_end_token_or_at_its_limit(stop, limit):
    """After a prompt of 3, the fifth token is the end token; at a limit of exactly 5 that still is "stop"."""
    model = forced_model(lambda position: stop if position == 7 else position)
    engine = TransformersEngine(model, temperature=1.0, stop_ids=[stop], max_num_seqs=4)
    sample = generate(engine, [request("r", [10, 11, 12], tokens=limit)])["r", 0]
    assert sample.token_ids == [3, 4, 5, 6, stop][:limit]
    assert sample.finish == ("stop" if limit >= 5 else "length")
    assert sample.logprobs == [0.0] * min(limit, 5)


def test_an_end_token_right_away_is_a_response_of_one_token():
    engine = TransformersEngine(
        forced_model(lambda position: END_ID), temperature=1.0, stop_ids=[END_ID], max_num_seqs=4
    )
    samples = generate(engine, [request("r", [10, 11], samples=3, tokens=4)])
    assert [(s.token_ids, s.finish) for s in samples.values()] == [([END_ID], "stop")] * 3


def test_any_stop_token_ends_a_response_and_no_other_does():
    for stop in ([5], [6, 9], [4, 8], []):
        engine = TransformersEngine(
            forced_model(lambda p: p), temperature=1.0, stop_ids=stop, max_num_seqs=4
        )
        sample = generate(engine, [request("r", [50, 51, 52], tokens=5)])["r", 0]
        end = min([token for token in stop if token <= 7], default=7)
        assert sample.token_ids == list(range(3, end + 1))
        assert sample.finish == ("stop" if stop else "length")


def test_limits_hold_for_each_request_of_a_batch(model):
    """Also while most rows leave the batch, one after the other."""
    requests = [
        request(i, p, samples=2, seed=i, tokens=1 + 2 * i) for i, p in enumerate(ragged_prompts(10))
    ]
    samples = generate(engine_of(model, stop=()), requests)
    assert [len(samples[i, j].token_ids) for i in range(10) for j in (0, 1)] == [
        1 + 2 * (k // 2) for k in range(20)
    ]
    assert {s.finish for s in samples.values()} == {"length"}
    assert_teacher_forced(model, requests, samples, 1.0)


def test_a_row_that_has_ended_never_runs_past_the_positions_of_the_model():
    """A prompt that nearly fills the context, next to one that has far to go."""
    model = build("gpt2")
    long = request("long", range(2, GPT2_POSITIONS), tokens=2)
    requests = [
        long,
        request("short", [5], tokens=GPT2_POSITIONS - 1),
        request("other", [6, 7], tokens=15),
    ]
    samples = generate(engine_of(model, stop=()), requests)
    assert_teacher_forced(model, requests, samples, 1.0)


def test_requests_may_be_added_while_others_are_in_flight(model):
    requests = [
        request(i, p, samples=3, seed=9 * i, tokens=12) for i, p in enumerate(ragged_prompts(6))
    ]
    expected = generate(engine_of(model, stop=MANY_STOPS), requests)
    engine = engine_of(model, stop=MANY_STOPS, max_num_seqs=4)
    waiting, samples = list(requests), {}
    while waiting or engine.has_unfinished():
        if waiting:
            engine.add(waiting.pop())
        for sample in engine.step():
            samples[sample.key.episode, sample.index] = sample
    assert samples.keys() == expected.keys()
    assert all(same(samples[key], expected[key]) for key in expected)


def test_a_sample_is_handed_out_as_soon_as_it_ends_and_a_step_is_one_token(model):
    """So that a set can start early, and a request to stop is seen within a token's time."""
    engine = engine_of(model, stop=())
    for tokens in (3, 1, 6):
        engine.add(request(tokens, [5, 6], tokens=tokens))
    steps = [[sample.key.episode for sample in engine.step()] for _ in range(6)]
    assert steps == [[1], [], [3], [], [], [6]]
    assert not engine.has_unfinished()
    assert engine.step() == []


def test_an_aborted_request_gives_nothing_more_and_the_others_what_they_would_have(model):
    asked = [request(i, [2, 10 + i, 3], samples=2, seed=10 * i) for i in range(4)]
    whole = generate(engine_of(model), asked)
    engine = engine_of(model, max_num_seqs=6)  # the last one waits
    for each in asked:
        engine.add(each)
    engine.step()
    engine.abort([asked[1].key, asked[3].key])
    rest = drain(engine)
    assert {key for key, _ in rest} <= {0, 2}
    for place, sample in rest.items():
        assert sample.token_ids == whole[place].token_ids
    engine.add(asked[0])
    engine.step()
    engine.abort([asked[0].key])
    assert not engine.has_unfinished()
    assert engine.step() == []


def test_requests_of_lower_priority_go_first_and_equals_in_order(model):
    engine = engine_of(model, max_num_seqs=1)
    for name, priority in (("a", 0), ("b", -5), ("c", 0), ("d", -5)):
        engine.add(replace(request(name, [2, 10, 3], tokens=1), priority=priority))
    assert [sample.key.episode for _ in range(8) for sample in engine.step()] == [
        "b",
        "d",
        "a",
        "c",
    ]


def test_only_the_first_sample_of_a_request_pays_for_its_prompt(model):
    samples = generate(
        engine_of(model), [request("a", [2, 10, 11, 3], samples=3), request("b", [2, 10, 11, 3])]
    )
    assert [samples["a", i].cached_tokens for i in range(3)] == [0, 4, 4]
    assert samples["b", 0].cached_tokens == 0


@pytest.mark.parametrize(("prompt", "samples", "tokens"), [([], 1, 1), ([5], 0, 1), ([5], 1, 0)])
def test_a_request_that_can_give_no_sample_is_refused(model, prompt, samples, tokens):
    engine = engine_of(model)
    with pytest.raises(
        ValueError, match=r"'r'.* needs a prompt, max_tokens >= 1 and num_samples >= 1"
    ):
        engine.add(request("r", prompt, samples=samples, tokens=tokens))
    assert not engine.has_unfinished()


def test_loaded_weights_replace_the_old_ones_completely():
    old, new = build("qwen3", seed=0), build("qwen3", seed=1)
    engine = engine_of(old)
    requests = [request(i, p, samples=2, seed=i) for i, p in enumerate(ragged_prompts(4))]
    generate(engine, requests)  # nothing of the old model may stay in a cache
    engine.load_weights((name, p.detach().clone()) for name, p in new.named_parameters())
    samples = generate(engine, requests)
    assert_teacher_forced(new, requests, samples, 1.0)
    sample = samples[0, 0]
    gap = teacher_forced(old, requests[0].prompt_ids, sample.token_ids, 1.0) - torch.tensor(
        sample.logprobs
    )
    assert gap.abs().max() > 0.1
    engine.load_weights(old.named_parameters())
    assert_teacher_forced(old, requests, generate(engine, requests), 1.0)


def test_later_changes_of_the_sent_tensors_do_not_reach_the_engine():
    new = build("qwen3", seed=1)
    engine = engine_of(build("qwen3"))
    engine.load_weights(new.named_parameters())
    twin = build("qwen3", seed=1)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.zero_()
    requests = [request("r", [4, 5, 6])]
    assert_teacher_forced(twin, requests, generate(engine, requests), 1.0)


def test_a_tensor_that_is_unknown_or_of_another_shape_is_named():
    model = build("qwen3")
    engine = engine_of(model)
    weights = dict(model.named_parameters())
    with pytest.raises(
        ValueError, match=r"model\.extra\.weight has shape \(3,\); the engine has no such tensor"
    ):
        engine.load_weights({**weights, "model.extra.weight": torch.zeros(3)}.items())
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight has shape \(1, 64\); the engine has \(64,\)"
    ):
        engine.load_weights({**weights, "model.norm.weight": torch.zeros(1, 64)}.items())


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.layers.1.self_attn.q_norm.weight"])
def test_a_tensor_that_was_not_sent_is_named(missing):
    model = build("qwen3")
    weights = {name: p for name, p in model.named_parameters() if name != missing}
    with pytest.raises(ValueError, match=f"weights were not sent: {missing}$"):
        engine_of(model).load_weights(weights.items())


def test_an_engine_that_took_half_of_the_weights_does_not_sample_until_a_load_succeeds():
    old, new = build("qwen3", seed=0), build("qwen3", seed=1)
    engine = engine_of(old)
    half = list(new.named_parameters())[:5]
    with pytest.raises(ValueError, match="not sent"):
        engine.load_weights(half)
    engine.add(request("r", [4, 5, 6]))
    with pytest.raises(RuntimeError, match="load_weights"):
        engine.step()
    engine.load_weights(new.named_parameters())
    assert_teacher_forced(new, [request("r", [4, 5, 6])], drain(engine), 1.0)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_engine_built_for_a_folder_samples_that_model(tmp_path, family, dtype, tied):
    """In its compute type: in bfloat16 the rotary frequencies must still be those of float32."""
    folder = save_tiny_model(tmp_path, family, tied=tied, seed=4)
    config = make_config(
        folder, policy={"param_dtype": dtype}, rollout={"sampling.temperature": 0.8}
    )
    engine = build_engine(config, frozenset(MANY_STOPS), CPU)
    engine.load_weights(pretrained_weights(str(folder)))
    requests = [
        request(i, p, samples=2, seed=i) for i, p in enumerate(ragged_prompts(6, longest=60))
    ]
    samples = generate(engine, requests)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    assert next(engine.model.parameters()).dtype == plain.dtype
    assert_teacher_forced(
        plain, requests, samples, 0.8, tolerance=2e-5 if dtype == "float32" else 0.25
    )
    if dtype == "bfloat16":
        gaps = torch.cat(
            [
                teacher_forced(plain, r.prompt_ids, samples[r.key.episode, 0].token_ids, 0.8)
                - torch.tensor(samples[r.key.episode, 0].logprobs)
                for r in requests
            ]
        )
        assert gaps.abs().mean() < 0.03
        assert abs(float(gaps.mean())) < 0.01


def test_the_heads_of_a_tied_model_can_be_loaded_apart(tmp_path):
    """LoRA on the unembedding moves the head away from the embedding."""
    folder = save_tiny_model(tmp_path, tied=True)
    engine = build_engine(make_config(folder), frozenset([END_ID]), CPU)
    weights = dict(pretrained_weights(str(folder)))
    weights["lm_head.weight"] = weights["lm_head.weight"] * 1.5
    engine.load_weights(weights.items())
    plain = AutoModelForCausalLM.from_pretrained(folder)
    requests = [request("r", [7, 8, 9], samples=4)]
    for sample in generate(engine, requests).values():
        logits = plain(torch.tensor([[7, 8, 9, *sample.token_ids]])).logits[0, 2:-1] * 1.5
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.token_ids)[:, None])[
            :, 0
        ]
        assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=2e-5)


def test_a_model_whose_cache_holds_a_recurrent_state_is_refused():
    """Its state cannot be left-padded and repeated like keys and values."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    shape |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts": 0,
        "linear_num_value_heads": 2,
    }
    shape |= {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    config = Qwen3NextConfig(**shape, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM .* LinearAttentionLayer"):
        TransformersEngine(
            Qwen3NextForCausalLM(config), temperature=1.0, stop_ids=[END_ID], max_num_seqs=4
        )
