"""Arms of a tuning, from templates and by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from breakeven.errors import UsageError
from breakeven.variants import Variant, expand, k_said

TRIPLES = [("t", "serve:run {port} --steps {steps} --topk {topk} --tokens {draft_tokens}")]


def test_a_template_gives_an_arm_for_each_draft_length() -> None:
    found, left_out = expand([("k{k}", "vllm:eagle3:{k}")], [0, 1, 3])
    assert found == [
        Variant("k0", "vllm:eagle3:0", 0),
        Variant("k1", "vllm:eagle3:1", 1),
        Variant("k3", "vllm:eagle3:3", 3),
    ]
    assert left_out == []


def test_a_name_without_the_field_gets_the_number_behind_it_and_other_braces_stay() -> None:
    (found,), _ = expand([("k", 'serve:vllm serve M --port {port} --speculative-config {"n":{k}}')], [2])
    assert found == Variant("k2", 'serve:vllm serve M --port {port} --speculative-config {"n":2}', 2)


def test_an_arm_beside_a_template_says_its_draft_length_by_its_name() -> None:
    found, _ = expand([("off", "http://a"), ("k{k}", "http://b{k}")], [1, 2])
    assert [(each.name, each.k) for each in found] == [("off", 0), ("k1", 1), ("k2", 2)]


@pytest.mark.parametrize(
    ("name", "where", "k"),
    [
        ("off", "http://a", 0),
        ("k3", "http://a", 3),
        ("k=12", "http://a", 12),
        ("on", "http://a", None),
        ("kx", "http://a", None),
        ("on", "vllm:eagle3:2", 2),
        ("on", "vllm:", 0),
        ("on", "vllm:off", 0),
        ("on", "vllm:eagle3:[[1,4,2]]", None),
        ("on", "local:", 0),
        ("on", "local:@model.gguf", 0),
        ("on", "local:ngram-simple", None),
    ],
)
def test_what_an_arm_drafts_is_told_by_its_place_or_its_name(name: str, where: str, k: int | None) -> None:
    assert k_said(name, where) == k


def test_without_a_template_the_numbers_are_those_of_the_arms_in_their_order() -> None:
    found, _ = expand([("a", "http://a"), ("b", "http://b")], [0, 4])
    assert [(each.name, each.k) for each in found] == [("a", 0), ("b", 4)]


def test_shapes_are_all_combinations_that_can_be_drafted() -> None:
    found, left_out = expand(TRIPLES, [], {"steps": (1, 2), "topk": (1, 4), "draft-tokens": (3, 16)})
    assert [each.shape for each in found] == ["1/4/3", "2/1/3", "2/4/3", "2/4/16"]
    assert found[1] == Variant("t-2-1-3", "serve:run {port} --steps 2 --topk 1 --tokens 3", 2, 1, 3)
    assert [text.split(" is left out: ")[0] for text in left_out] == ["1/1/3", "1/1/16", "1/4/16", "2/1/16"]
    assert left_out[0].endswith("with top-k 1 the draft tokens are steps + 1, which is 2")
    assert left_out[2].endswith("1 step of top-k 4 make 2 to 5 draft tokens")


def test_steps_alone_are_chains() -> None:
    found, _ = expand([("s{steps}", "http://a{steps}")], [], {"steps": (1, 3)})
    assert found == [Variant("s1", "http://a1", 1, 1, 2), Variant("s3", "http://a3", 3, 1, 4)]


@pytest.mark.parametrize(
    ("arms", "ks", "vary", "words"),
    [
        ([("on", "vllm:eagle3:2")], [0, 1, 2], None, r"--k gives 3 draft lengths for 1 arm, and --arm on has no \{k\}"),
        ([("k{k}", "http://a")], [0, 1], None, r"--arm k\{k\}=http://a has no \{k\} behind the '='"),
        ([("k{k}", "http://a{k}")], [], None, r"has \{k\}: say which draft lengths with --k"),
        ([("a{k}", "x{k}"), ("b{k}", "y{k}")], [1, 2], None, "both templates"),
        ([("k{k}", "http://a{k}")], [1, 2, 1], None, "--k 1 is given twice"),
        ([("a", "vllm:eagle3:2"), ("b", "vllm:")], [3, 0], None, "--k says 3 for --arm a=vllm:eagle3:2"),
        ([("off", "http://a"), ("k2", "http://b")], [0, 3], None, "--k says 3 for --arm k2=http://b, which drafts 2"),
        ([("k{k}", "http://a{k}")], [1], {"steps": (1,)}, "--k and --vary contradict each other"),
        ([("a", "http://a")], [], {"steps": (1, 2)}, r"--arm a has no \{steps\}"),
        (TRIPLES, [], {"topk": (1, 4)}, "--vary needs steps"),
        ([("a", "x{steps}")], [], {"steps": (1,), "topk": (1,)}, r"has no \{topk\} behind the '='"),
        (TRIPLES, [], {"steps": (1,), "topk": (1,), "draft-tokens": (16,)}, "--vary leaves no arm: 1/1/16 is left out"),
        ([("s", "x{steps}")], [], {"steps": (0,)}, "name the arm without speculation by hand"),
    ],
)
def test_what_doesnt_fit_together_is_named(
    arms: Sequence[tuple[str, str]], ks: Sequence[int], vary: Mapping[str, Sequence[int]] | None, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        expand(arms, ks, vary)
    assert "\n" not in str(caught.value)
