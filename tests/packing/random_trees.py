"""Random sequences that share prefixes in every way, and the nodes of their token tree by definition."""

from hypothesis import strategies as st

from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence


@st.composite
def sequence_lists(
    draw: st.DrawFn, *, vocab: int = 3, longest: int = 9, most: int = 8
) -> list[TrainingSequence]:
    """Generate up to `most` sequences of one or two prompt indices.

    With few distinct tokens, shared prefixes, copies and prefixes of each other are common. Numbers are exact in
    float32.
    """
    tokens = st.integers(0, vocab - 1)
    count = draw(st.integers(1, most))
    sequences = []
    for i in range(count):
        prompt = draw(st.lists(tokens, min_size=1, max_size=longest))
        response = draw(st.lists(tokens, max_size=longest))
        if sequences and draw(st.booleans()):
            prompt = draw(st.sampled_from(sequences)).prompt_ids
        if sequences and draw(st.booleans()):
            response = draw(st.sampled_from(sequences)).response_ids
        sequences.append(
            make(
                draw(st.integers(0, 1)),
                i,
                prompt,
                response,
                advantage=draw(st.sampled_from([-1, 0.5])),
            )
        )
    return sequences


def make(
    prompt_index: int, position: int, prompt: list[int], response: list[int], advantage: float = 1.0
) -> TrainingSequence:
    sampler = [-0.25 - ((3 * position + 5 * j) % 16) / 8 for j in range(len(response))]
    return TrainingSequence(
        SequenceKey(prompt_index, position),
        prompt,
        response,
        sampler,
        advantage,
        weight=(1 + position % 3) / 4,
    )


def tokens_of(sequence: TrainingSequence) -> tuple[int, ...]:
    return (*sequence.prompt_ids, *sequence.response_ids)


def distinct_prefixes(sequences: list[TrainingSequence]) -> set[tuple[int, tuple[int, ...]]]:
    """Return the nodes of the forest: every prefix of every sequence, with its prompt index."""
    return {
        (s.key.prompt_index, tokens_of(s)[:n])
        for s in sequences
        for n in range(1, s.num_tokens + 1)
    }
