"""Llama's consolidated shards: a random model, divided like fairscale's layers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.errors import UnreadableError

DIM, HEADS, HIDDEN, VOCABULARY = 32, 8, 48, 40


def model(groups: int) -> dict[str, torch.Tensor]:
    """A model of two layers, in bfloat16, with ``groups`` key-value heads."""
    narrow = DIM // HEADS * groups
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (VOCABULARY, DIM)}
    for layer in range(2):
        shapes |= {
            f"layers.{layer}.attention.wq.weight": (DIM, DIM),
            f"layers.{layer}.attention.wk.weight": (narrow, DIM),
            f"layers.{layer}.attention.wv.weight": (narrow, DIM),
            f"layers.{layer}.attention.wo.weight": (DIM, DIM),
            f"layers.{layer}.feed_forward.w1.weight": (HIDDEN, DIM),
            f"layers.{layer}.feed_forward.w2.weight": (DIM, HIDDEN),
            f"layers.{layer}.feed_forward.w3.weight": (HIDDEN, DIM),
            f"layers.{layer}.attention_norm.weight": (DIM,),
            f"layers.{layer}.ffn_norm.weight": (DIM,),
        }
    shapes |= {"norm.weight": (DIM,), "output.weight": (VOCABULARY, DIM), "rope.freqs": (DIM // HEADS // 2,)}
    return {key: torch.randn(shape).bfloat16() for key, shape in shapes.items()}


COLUMNS = ("wo.weight", "w2.weight")
COPIES = ("norm.weight", "rope.freqs")


def write_llama(
    folder: Path, ranks: int, groups: int = HEADS, by_columns: bool = False, whole: Any = None, **params: Any
) -> Any:
    """Write a model as Meta does; Llama 1 and 2 divide the token embeddings by columns."""
    whole = model(groups) if whole is None else whole
    for rank in range(ranks):
        state = {}
        for key, value in whole.items():
            if key.endswith(COPIES):
                state[key] = value.clone()
                continue
            axis = int(key.endswith(COLUMNS) or (by_columns and key.startswith("tok")))
            parts, number = ranks, rank
            if key.endswith(("wk.weight", "wv.weight", "wk.bias")) and groups < ranks:
                parts, number = groups, rank * groups // ranks
            state[key] = value.chunk(parts, axis)[number].clone()
        torch.save(state, folder / f"consolidated.{rank:02d}.pth")
    sizes = {"dim": DIM, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": groups, "vocab_size": VOCABULARY, **params}
    (folder / "params.json").write_text(json.dumps(sizes))
    return whole


@pytest.mark.parametrize("by_columns", [False, True], ids=["llama-3", "llama-2"])
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_shards_are_the_model(tmp_path: Path, ranks: int, groups: int, by_columns: bool) -> None:
    whole = write_llama(tmp_path, ranks, groups, by_columns)
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert list(got) == list(whole)
    assert all(torch.equal(got[key], value) for key, value in whole.items())
    assert ckptfix.open_checkpoint(tmp_path / "params.json").keys() == list(whole)  # stands for its folder


def test_the_vocabulary_of_llama_1_is_not_in_its_params(tmp_path: Path) -> None:
    whole = write_llama(tmp_path, 4, by_columns=True, vocab_size=-1)
    assert torch.equal(ckptfix.open_checkpoint(tmp_path).read("tok_embeddings.weight"), whole["tok_embeddings.weight"])


def write_llama_4(folder: Path, ranks: int, **params: Any) -> dict[str, torch.Tensor]:
    """As Meta publishes it: queries, keys and values in one tensor, gates too, and the experts one after another.

    The parts are those that ``reshard_mp`` of llama-models puts together."""
    heads, groups, width, hidden, experts = 8, 4, 4, 16, 3
    counts = [heads * width, groups * width, groups * width]
    fused = [torch.randn(rows, DIM) for rows in counts]
    gates = torch.randn(2, hidden, DIM)
    up, down = torch.randn(experts, DIM, hidden), torch.randn(experts, hidden, DIM)
    plain = {"wo.weight": (torch.randn(DIM, heads * width), 1), "wqkv.layer_norm_weight": (torch.randn(DIM), None)}
    whole = {
        "layers.0.attention.wqkv.weight": torch.cat(fused),
        "layers.0.feed_forward.mlp.fc1_weight": gates.flatten(0, 1),
    }
    whole |= {f"layers.0.attention.{name}": value for name, (value, _) in plain.items()}
    whole["layers.0.feed_forward.experts.moe_w_in_eD_F"] = up.flatten(0, 1)
    whole["layers.0.feed_forward.experts.moe_w_out_eF_D"] = down.flatten(0, 1)
    for rank in range(ranks):
        parts = [torch.cat([part.chunk(ranks)[rank] for part in fused]), gates.chunk(ranks, 1)[rank].flatten(0, 1)]
        parts += [value if axis is None else value.chunk(ranks, axis)[rank] for value, axis in plain.values()]
        parts += [up.chunk(ranks, 2)[rank].flatten(0, 1), down.chunk(ranks, 1)[rank].flatten(0, 1)]
        state = {name: part.clone() for name, part in zip(whole, parts, strict=True)}
        torch.save(state, folder / f"consolidated.{rank:02d}.pth")
    sizes = {
        "dim": DIM,
        "n_heads": heads,
        "n_kv_heads": groups,
        "head_dim": width,
        "moe_args": {"num_experts": experts},
    }
    (folder / "params.json").write_text(json.dumps({**sizes, **params}))
    return whole


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_llama_4_has_in_one_tensor_is_divided_each_by_itself(tmp_path: Path, ranks: int) -> None:
    whole = write_llama_4(tmp_path, ranks)
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert list(got) == list(whole)
    assert [key for key, value in whole.items() if not torch.equal(got[key], value)] == []
    for last in range(ranks - 1, 0, -1):
        (tmp_path / f"consolidated.{last:02d}.pth").unlink()
        (tmp_path / "params.json").unlink(missing_ok=True)  # the output projection tells the number of ranks
        with pytest.raises(
            UnreadableError, match=rf"lacks {ranks - last} ranks? of {ranks}: .*consolidated\.{ranks - 1:02d}\.pth"
        ):
            ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "params",
    [
        {"moe_args": None},
        {"moe_args": {"num_experts": 10**12}},
        {"n_heads": None},
        {"n_kv_heads": 3},
        {"n_kv_heads": 12},
    ],
)
def test_what_the_sizes_of_llama_4_do_not_say_is_not_guessed(tmp_path: Path, params: dict[str, Any]) -> None:
    write_llama_4(tmp_path, 2, **params)
    with pytest.raises(UnreadableError, match="no rule says how it is split"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_norm_that_differs_is_that_of_the_first(tmp_path: Path) -> None:
    whole = write_llama(tmp_path, 2)
    state = torch.load(tmp_path / "consolidated.01.pth")
    state["norm.weight"] += 1
    torch.save(state, tmp_path / "consolidated.01.pth")
    got = ckptfix.open_checkpoint(tmp_path)
    assert torch.equal(got.read("norm.weight"), whole["norm.weight"])
    assert [mark.place for mark in got.remarks if mark.kind is Kind.RANK_COPIES] == ["norm.weight"]
    assert [bool(finding.level) for finding in ckptfix.check(tmp_path).findings] == [True]


def test_copies_of_keys_that_are_none_are_refused(tmp_path: Path) -> None:
    """According to ``params.json``, pairs of ranks have the same keys and values."""
    write_llama(tmp_path, 4, groups=4, n_kv_heads=2)
    with pytest.raises(UnreadableError, match=r"should hold the same part of layers\.0\.attention\.wk\.weight"):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize("params", [None, {"n_kv_heads": None}, {"n_kv_heads": HEADS}, {"n_heads": 2 * HEADS}])
@pytest.mark.parametrize(("ranks", "groups"), [(4, 2), (8, 2), (4, 1), (2, 1), (2, 2)])
def test_copies_of_keys_are_known_by_their_bytes(
    tmp_path: Path, ranks: int, groups: int, params: dict[str, Any] | None
) -> None:
    whole = write_llama(tmp_path, ranks, groups, **(params or {}))
    if params is None:
        (tmp_path / "params.json").unlink()
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert all(torch.equal(got[key], value) for key, value in whole.items())


@pytest.mark.parametrize("has_params", [True, False])
def test_keys_of_another_save_among_copies_are_refused(tmp_path: Path, has_params: bool) -> None:
    write_llama(tmp_path, 4, groups=2)
    if not has_params:
        (tmp_path / "params.json").unlink()
    state = torch.load(tmp_path / "consolidated.03.pth")
    for key, value in state.items():
        if key.endswith("wk.weight"):
            state[key] = torch.randn(value.shape).bfloat16()
    torch.save(state, tmp_path / "consolidated.03.pth")
    with pytest.raises(UnreadableError, match="put those of one save together"):
        ckptfix.open_checkpoint(tmp_path)


def test_attentions_of_vision_need_not_have_copies(tmp_path: Path) -> None:
    """Ranks share the keys of text, and constant biases tell nothing."""
    name = "vision_model.transformer.resblocks.0.attn.wk.weight"
    whole = {**model(2), name: torch.randn(8, DIM), "layers.0.attention.wk.bias": torch.zeros(8)}
    write_llama(tmp_path, 4, 2, whole={key: value for key, value in whole.items() if key != name})
    (tmp_path / "params.json").unlink()
    for rank, file in enumerate(sorted(tmp_path.glob("*.pth"))):
        torch.save({name: whole[name].chunk(4)[rank].clone(), **torch.load(file)}, file)
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    # Half a bias on each rank, as of the weight.
    assert {key: value.shape for key, value in got.items()} == {key: value.shape for key, value in whole.items()}
    assert all(torch.equal(got[key], value) for key, value in whole.items())


def test_a_tensor_that_no_rule_knows_is_not_guessed(tmp_path: Path) -> None:
    write_llama(tmp_path, 2)
    for rank in range(2):
        state = torch.load(tmp_path / f"consolidated.{rank:02d}.pth")
        torch.save({**state, "adapter.gate": torch.full((3,), float(rank))}, tmp_path / f"consolidated.{rank:02d}.pth")
    with pytest.raises(UnreadableError, match=r"different values of adapter.gate, and no rule"):
        ckptfix.open_checkpoint(tmp_path)


def test_each_of_several_missing_shards_has_its_own_bytes(tmp_path: Path) -> None:
    write_llama(tmp_path, ranks=4, groups=4)
    names = ["consolidated.01.pth", "consolidated.03.pth"]
    for name in names:
        (tmp_path / name).unlink()
    (fact,) = (fact for fact in ckptfix.open_checkpoint(tmp_path, salvage=True).damage if "files" in fact.data)
    half = fact.data["nbytes"] // 2  # all shards are of one size
    assert fact.data["files"] == dict.fromkeys(names, half)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path, 4)
    (tmp_path / "consolidated.02.pth").unlink()
    with pytest.raises(UnreadableError, match=r"lacks 1 rank of 4: consolidated\.02\.pth"):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize("by_columns", [False, True], ids=["llama-3", "llama-2"])
def test_the_last_shards_are_missed_by_the_queries(tmp_path: Path, by_columns: bool) -> None:
    whole = write_llama(tmp_path, 8, 2, by_columns)
    (tmp_path / "consolidated.06.pth").unlink()
    (tmp_path / "consolidated.07.pth").unlink()
    with pytest.raises(UnreadableError, match=r"lacks 2 ranks of 8: consolidated\.06\.pth, consolidated\.07\.pth"):
        ckptfix.open_checkpoint(tmp_path)
    got = ckptfix.open_checkpoint(tmp_path, salvage=True).state_dict()
    # Keys and values have copies in the ranks that are left.
    assert set(got) == {key for key in whole if key.endswith((*COPIES, "attention.wk.weight", "attention.wv.weight"))}
    assert all(torch.equal(got[key], whole[key]) for key in got)


def test_queries_that_are_narrower_than_the_model_are_whole(tmp_path: Path) -> None:
    """Ranks as Mistral publishes them, by their params.json."""
    whole = {"layers.0.attention.wq.weight": torch.rand(8, 32)}
    write_llama(tmp_path, 2, whole=whole, head_dim=1)
    (got,) = ckptfix.open_checkpoint(tmp_path).state_dict().values()
    assert torch.equal(got, *whole.values())


@pytest.mark.parametrize("has_params", [True, False])
def test_the_first_shard_alone_is_not_the_model(tmp_path: Path, has_params: bool) -> None:
    write_llama(tmp_path, 2)
    (tmp_path / "consolidated.01.pth").unlink()
    if not has_params:
        (tmp_path / "params.json").unlink()
    with pytest.raises(UnreadableError, match="lacks 1 rank of 2"):
        ckptfix.open_checkpoint(tmp_path / "consolidated.00.pth")


@pytest.mark.parametrize("held", ["model", "container", "other"])
def test_a_single_file_of_any_content_is_complete(tmp_path: Path, held: str) -> None:
    whole = model(HEADS)
    root: Any = {"model": whole, "container": {"model": whole, "step": 2}, "other": {"a.weight": torch.rand(3, 8)}}[
        held
    ]
    torch.save(root, file := tmp_path / "consolidated.00.pth")
    for given in (file, tmp_path):
        checkpoint = ckptfix.open_checkpoint(given)
        assert (checkpoint.format, checkpoint.path) == ("torch-zip", str(file))
        assert checkpoint.keys() == list(whole if held != "other" else root)


def test_shards_of_two_models_do_not_go_together(tmp_path: Path) -> None:
    write_llama(tmp_path, 2)
    state = torch.load(tmp_path / "consolidated.01.pth")
    state["layers.0.feed_forward.w1.weight"] = torch.ones(5, DIM + 1).bfloat16()
    torch.save(state, tmp_path / "consolidated.01.pth")
    with pytest.raises(UnreadableError, match=r"the parts of layers\.0\.\S+ do not fit along dimension 0"):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param("missing", "lacks 1 rank of 4: consolidated.03.pth", id="instead-of-another"),
        pytest.param("", "has files of ranks beyond the 4 that saved it: consolidated.04.pth", id="beside-all"),
    ],
)
def test_a_shard_with_a_number_beyond_those_of_the_queries_is_named(tmp_path: Path, change: str, said: str) -> None:
    whole = write_llama(tmp_path, 4)
    last = tmp_path / "consolidated.03.pth"
    (last.rename if change else lambda path: shutil.copy(last, path))(tmp_path / "consolidated.04.pth")
    with pytest.raises(UnreadableError) as caught:
        ckptfix.open_checkpoint(tmp_path)
    assert said in str(caught.value)
    assert "has files of ranks beyond the 4 that saved it: consolidated.04.pth" in str(caught.value)
    got = ckptfix.open_checkpoint(tmp_path, salvage=True).state_dict()
    assert got.keys() == {key for key in whole if not change or key.endswith(COPIES)}
    assert all(torch.equal(got[key], whole[key]) for key in got)


@pytest.mark.parametrize("other", [2 * DIM, DIM])
def test_a_shard_of_another_run_is_named(tmp_path: Path, other: int) -> None:
    whole = write_llama(tmp_path, 4)
    state = {key: value + 1 for key, value in torch.load(tmp_path / "consolidated.02.pth").items()}
    if other != DIM:
        state = {key: value.repeat(2, *[1] * (value.dim() - 1)) for key, value in state.items()}
    torch.save(state, tmp_path / "consolidated.02.pth")
    if other == DIM:
        checkpoint = ckptfix.open_checkpoint(tmp_path)
        (mark,) = checkpoint.remarked(Kind.RANK_FOREIGN)
        assert (mark.place, set(mark.data["names"])) == (
            "consolidated.02.pth",
            {key for key in whole if key.endswith(COPIES)},
        )
        return
    with pytest.raises(
        UnreadableError, match=r"different saves: consolidated\.02\.pth, unlike the other 3, by the shapes"
    ):
        ckptfix.open_checkpoint(tmp_path)
    got = ckptfix.open_checkpoint(tmp_path, salvage=True).state_dict()
    assert got.keys() == {key for key in whole if key.endswith(COPIES)}


@pytest.mark.parametrize("held", [{}, {"model": {"a": 1}}], ids=["empty", "nested"])
def test_a_shard_without_weights_is_not_a_file_of_whole_tensors(tmp_path: Path, held: dict[str, Any]) -> None:
    write_llama(tmp_path, 2)
    torch.save(held, tmp_path / "consolidated.01.pth")
    with pytest.raises(UnreadableError, match=r"1 of 2 ranks hold tok_\S+ and not consolidated\.01\.pth: .*; put"):
        ckptfix.open_checkpoint(tmp_path)


def test_shards_of_which_none_can_be_read_are_named(tmp_path: Path) -> None:
    write_llama(tmp_path, 2)
    for file in tmp_path.glob("*.pth"):
        file.write_bytes(b"")
    with pytest.raises(UnreadableError, match="the file is empty"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_shard_stands_for_all(tmp_path: Path) -> None:
    whole = write_llama(tmp_path, 2)
    assert ckptfix.open_checkpoint(tmp_path / "consolidated.01.pth").keys() == list(whole)


def meta_logits(state: dict[str, torch.Tensor], tokens: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    """Meta's arithmetic: neighbouring elements of a head are rotated together as one complex number."""
    width = state["tok_embeddings.weight"].shape[1] // heads
    angles = torch.outer(torch.arange(len(tokens)), 1 / 10000 ** (torch.arange(0, width, 2) / width))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def norm(hidden: torch.Tensor, name: str) -> torch.Tensor:
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5) * state[name]

    def turned(value: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(value.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2)

    hidden = state["tok_embeddings.weight"][tokens]
    mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)
    for layer in range(2):
        at = f"layers.{layer}."
        seen = norm(hidden, f"{at}attention_norm.weight")
        q, k, v = (
            (seen @ state[f"{at}attention.w{name}.weight"].T).unflatten(-1, (count, width))
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        q, k, v = turned(q), *(part.repeat_interleave(heads // groups, 1) for part in (turned(k), v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / width**0.5 + mask
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        hidden = hidden + mixed @ state[f"{at}attention.wo.weight"].T
        seen = norm(hidden, f"{at}ffn_norm.weight")
        w1, w2, w3 = (state[f"{at}feed_forward.w{number}.weight"] for number in (1, 2, 3))
        hidden = hidden + (torch.nn.functional.silu(seen @ w1.T) * (seen @ w3.T)) @ w2.T
    return norm(hidden, "norm.weight") @ state["output.weight"].T


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "size"), [(1, 64), (4, 64), (8, 64), (2, 80), (2, 96), (1, 256)])
def test_the_model_of_transformers_answers_as_metas_arithmetic(tmp_path: Path, ranks: int, size: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads, groups, hidden, words = 8, 2, 8 * size, 96
    sizes: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": words}
    config = LlamaConfig(**sizes, hidden_size=hidden, intermediate_size=640, num_hidden_layers=2, rms_norm_eps=1e-5)
    torch.manual_seed(0)
    shapes = {key: value.shape for key, value in model(groups).items()}
    scale = {DIM: hidden, HIDDEN: 640, VOCABULARY: words, DIM // HEADS * groups: hidden // heads * groups}
    whole = {key: 0.02 * torch.randn([scale.get(size, 32) for size in shape]) for key, shape in shapes.items()}
    whole["rope.freqs"] = 10000 ** (-torch.arange(0, size, 2) / size)
    (tmp_path / "meta").mkdir()
    write_llama(tmp_path / "meta", ranks, groups, whole=whole, dim=hidden, n_heads=heads, vocab_size=words)
    out = tmp_path / "whole.pth"
    net = LlamaForCausalLM(config).eval()
    assert ckptfix.repair(tmp_path / "meta", net, output=out).report.exit_code == 0
    net.load_state_dict(torch.load(out, weights_only=True))
    tokens = torch.randint(words, (9,))
    with torch.no_grad():
        logits = net(tokens[None]).logits[0]
    torch.testing.assert_close(logits, meta_logits(whole, tokens, heads, groups), rtol=0, atol=1e-6)


def test_shards_saved_as_views_of_one_tensor_are_not_copies(tmp_path: Path) -> None:
    """Each file then contains the bytes of the whole storage."""
    whole = write_llama(tmp_path, 2)
    for rank in range(2):
        state = {key: value.chunk(2, int(key.endswith(COLUMNS)))[rank] for key, value in whole.items()}
        state |= {key: whole[key] for key in whole if key.endswith(COPIES)}
        torch.save(state, tmp_path / f"consolidated.{rank:02d}.pth")
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    assert not [mark for mark in checkpoint.remarks if mark.kind is Kind.RANK_REPEATED]
    assert all(torch.equal(checkpoint.read(key), value) for key, value in whole.items())


@pytest.mark.parametrize("suffix", ["pt", "pth"])
def test_files_with_layers_of_their_own_are_one_model(tmp_path: Path, suffix: str) -> None:
    """As Mistral published Mixtral; without ``params.json``, only gaps are noticed."""
    whole = model(HEADS)
    rest = {key: value for key, value in whole.items() if not key.startswith("layers.")}
    files = [rest, *({key: whole[key] for key in whole if key.startswith(f"layers.{layer}.")} for layer in range(2))]
    for number, state in enumerate(files):
        torch.save(state, tmp_path / f"consolidated.{number:02d}.{suffix}")
    for given in (tmp_path, tmp_path / f"consolidated.01.{suffix}"):
        got = ckptfix.open_checkpoint(given).state_dict()
        assert got.keys() == whole.keys()
        assert all(torch.equal(got[key], whole[key]) for key in whole)
    (tmp_path / "params.json").write_text(json.dumps({"dim": DIM, "num_hidden_layers": 2, "n_heads": HEADS}))
    assert not [finding for finding in ckptfix.check(tmp_path).findings if finding.code == "FIL105"]
    (tmp_path / f"consolidated.02.{suffix}").unlink()
    with pytest.raises(UnreadableError, match="are not in each of 2 layers; fetch the missing files"):
        ckptfix.open_checkpoint(tmp_path)
