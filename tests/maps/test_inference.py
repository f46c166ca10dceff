"""The map between the layers of two implementations; the traps come first."""

import re

import pytest

from ckptfix.core.parts import check_bijection
from ckptfix.maps.inference import infer, infer_tied
from ckptfix.maps.trees import Label

Specs = dict[str, tuple[int, ...]]


def linear(name: str, rows: int, columns: int) -> Specs:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def norm(name: str, width: int = 8) -> Specs:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def stack(name: str, layers: list[Specs]) -> Specs:
    return {f"{name}.{at}.{key}": shape for at, layer in enumerate(layers) for key, shape in layer.items()}


def timm_block(width: int = 8) -> Specs:
    return {
        **norm("norm1", width),
        **linear("attn.qkv", 3 * width, width),
        **linear("attn.proj", width, width),
        **norm("norm2", width),
        **linear("mlp.fc1", 4 * width, width),
        **linear("mlp.fc2", width, 4 * width),
    }


def hf_block(width: int = 8) -> Specs:
    return {
        **linear("attention.attention.query", width, width),
        **linear("attention.attention.key", width, width),
        **linear("attention.attention.value", width, width),
        **linear("attention.output.dense", width, width),
        **linear("intermediate.dense", 4 * width, width),
        **linear("output.dense", width, 4 * width),
        **norm("layernorm_before", width),
        **norm("layernorm_after", width),
    }


VIT_TIMM = {
    "cls_token": (1, 1, 8),
    **linear("patch_embed.proj", 8, 48),
    **stack("blocks", [timm_block()] * 12),
    **norm("norm"),
    **linear("head", 10, 8),
}
VIT_HF = {
    "vit.embeddings.cls_token": (1, 1, 8),
    **linear("vit.embeddings.patch_embeddings.projection", 8, 48),
    **{f"vit.encoder.{key}": shape for key, shape in stack("layer", [hf_block()] * 12).items()},
    **norm("vit.layernorm"),
    **linear("classifier", 10, 8),
}


def sources(source: Specs, target: Specs) -> dict[str, list[str]]:
    inference = infer(source, target)
    parts = {key: match.parts for key, match in inference.matches.items()}
    check_bijection(parts, inference.source, inference.target)
    return {key: [part.source for part in match.parts] for key, match in inference.matches.items()}


@pytest.mark.parametrize("is_sorted", [False, True], ids=["in the order of definition", "sorted by name"])
@pytest.mark.parametrize("is_timm", [True, False], ids=["split", "fused"])
def test_vision_transformers(is_timm, is_sorted):
    source, target = (VIT_TIMM, VIT_HF) if is_timm else (VIT_HF, VIT_TIMM)
    found = sources(dict(sorted(source.items())) if is_sorted else source, target)
    assert found.keys() == target.keys()
    for at in range(12):
        layer, block = f"vit.encoder.layer.{at}", f"blocks.{at}"
        wanted = {
            f"{layer}.layernorm_before.weight": f"{block}.norm1.weight",
            f"{layer}.layernorm_after.weight": f"{block}.norm2.weight",
            f"{layer}.attention.output.dense.bias": f"{block}.attn.proj.bias",
            f"{layer}.attention.attention.key.weight": f"{block}.attn.qkv.weight",
        }
        for theirs, ours in wanted.items():
            assert (ours in found[theirs]) if is_timm else (theirs in found[ours])


def test_the_parts_of_a_fused_layer_are_in_order():
    match = infer(VIT_TIMM, VIT_HF).matches["vit.encoder.layer.3.attention.attention.key.weight"]
    assert [part.box for part in match.parts] == [((8, 16), (0, 8))]
    assert match.label is Label.LIKELY, "the rows of the heads could be interleaved"


def test_grouped_queries():
    """The sizes of query, key and value come from the side that has them separately."""
    target = stack("layers", [{"q_proj.weight": (8, 8), "k_proj.weight": (2, 8), "v_proj.weight": (2, 8)}] * 3)
    found = infer(stack("h", [{"qkv_proj.weight": (12, 8)}] * 3), target).matches
    assert [part.box for part in found["layers.1.v_proj.weight"].parts] == [((10, 12), (0, 8))]


def test_experts_are_stacked():
    expert: Specs = {"w1.weight": (4, 8), "w2.weight": (8, 4), "w3.weight": (4, 8)}
    layer = stack("moe.experts", [expert] * 3)
    stacked: Specs = {"mlp.experts.gate_up_proj": (3, 8, 8), "mlp.experts.down_proj": (3, 8, 4)}
    target = stack("layers", [stacked] * 2)
    found = sources(stack("layers", [layer] * 2), target)
    names = [f"layers.1.moe.experts.{at}.{w}.weight" for at in range(3) for w in ("w1", "w3")]
    assert found["layers.1.mlp.experts.gate_up_proj"] == names
    assert found["layers.0.mlp.experts.down_proj"] == [f"layers.0.moe.experts.{at}.w2.weight" for at in range(3)]


def test_a_layer_with_as_many_rows_as_there_are_blocks_is_not_a_stack_of_them():
    found = sources(stack("blocks", [timm_block()] * 24), stack("layer", [hf_block()] * 24))
    assert found["layer.7.attention.attention.key.weight"] == ["blocks.7.attn.qkv.weight"]


def test_twin_towers_are_distinguished_by_their_names():
    source = {
        **stack("transformer.blocks", [timm_block()] * 3),
        **stack("visual.transformer.blocks", [timm_block()] * 3),
    }
    target = {**stack("vision_model.layers", [timm_block()] * 3), **stack("text_model.layers", [timm_block()] * 3)}
    inference = infer(source, target)
    for key, match in inference.matches.items():
        assert match.parts[0].source.startswith("visual") == key.startswith("vision"), key
        assert match.label is not Label.CERTAIN, key


def test_equal_twins_without_a_name_are_ambiguous():
    towers = {**stack("a", [norm("x")] * 2), **stack("b", [norm("x")] * 2)}
    others = {**stack("c", [norm("x")] * 2), **stack("d", [norm("x")] * 2)}
    inference = infer(dict(sorted(towers.items(), reverse=True)), others)
    assert all(match.label < Label.CERTAIN for match in inference.matches.values())


def test_a_downsampling_norm_that_moved_to_the_next_stage():
    """Swin: up to timm 0.6 a stage ends with it; since then, the next one begins with it."""
    widths = (8, 16, 32)
    old: Specs = {}
    new: Specs = {}
    for at, width in enumerate(widths):
        old |= {f"layers.{at}.{key}": shape for key, shape in stack("blocks", [timm_block(width)] * 2).items()}
        new |= {f"layers.{at}.{key}": shape for key, shape in stack("blocks", [timm_block(width)] * 2).items()}
        for specs, stage in ((old, at), (new, at + 1)):
            if width != widths[-1]:
                specs |= norm(f"layers.{stage}.downsample.norm", 4 * width)
                specs[f"layers.{stage}.downsample.reduction.weight"] = (2 * width, 4 * width)
    found = sources(old, new)
    for stage in (1, 2):
        assert found[f"layers.{stage}.downsample.norm.weight"] == [f"layers.{stage - 1}.downsample.norm.weight"]


def test_a_shortcut_that_only_one_side_lists_first():
    """What blocks without a shortcut show about conv1 holds for those with one."""
    convs: Specs = {f"f.{name}.weight": (8, 8, 1, 1) for name in "abc"}
    named: Specs = {f"conv{at}.weight": (8, 8, 1, 1) for at in (1, 2, 3)}
    source = stack("blocks", [{"proj.weight": (8, 8, 1, 1), **convs}, convs, convs])
    target = stack("layers", [{**named, "downsample.weight": (8, 8, 1, 1)}, named, named])
    found = sources(source, target)
    assert found["layers.0.downsample.weight"] == ["blocks.0.proj.weight"]
    assert found["layers.0.conv1.weight"] == ["blocks.0.f.a.weight"]


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_other_blocks_outvote_one_block(lacking):
    """A block that lacks a layer is matched separately: its shortcut could be its first convolution."""

    def layer(name: str, conv: str, norm_: str, rows: int, columns: int, size: int = 1) -> Specs:
        return {f"{name}.{conv}.weight": (rows, columns, size, size), **norm(f"{name}.{norm_}", rows)}

    source: Specs = {}
    target: Specs = {}
    for stage, (inputs, width) in enumerate([(4, 8), (8, 16), (16, 32)]):
        for block in range(2):
            own, at = f"trunk.{stage}.{block}", f"s{stage}.b{block}"
            if block == 0:
                source |= layer(f"{own}.proj", "0", "1", width, inputs)
            for number, sizes in enumerate([(width if block else inputs, 1), (width, 3), (width, 1)]):
                source |= layer(f"{own}.f.{'abc'[number]}", "0", "1", width, *sizes)
                target |= layer(f"{at}.conv{number + 1}", "conv", "bn", width, *sizes)
            if block == 0:
                target |= layer(f"{at}.downsample", "conv", "bn", width, inputs)
    del target[f"s{lacking}.b0.conv3.conv.weight"]
    found = applied(source, target)
    assert [name for key in found if ".downsample." in key for name in found[key] if ".proj." not in name] == []
    assert sum(".downsample." in key for key in found) == 9


def test_the_downsampling_of_a_block_is_its_shortcut():
    """The first stage keeps the resolution: its shortcut has the shape of the last convolution, without pooling."""

    def conv(conv: str, norm_: str, rows: int, columns: int, size: int = 1) -> Specs:
        return {f"{conv}.weight": (rows, columns, size, size), **norm(norm_, rows)}

    source, target = conv("conv1", "bn1", 4, 3, 7), conv("embedder.convolution", "embedder.normalization", 4, 3, 7)
    for stage, (inputs, width) in enumerate([(4, 4), (16, 8)]):
        for block in range(2):
            own, at = f"layer{stage + 1}.{block}", f"stages.{stage}.layers.{block}"
            before = inputs if block == 0 else 4 * width
            sizes = [(width, before, 1), (width, width, 3), (4 * width, width, 1)]
            if block == 0:
                short = f"{at}.shortcut.1" if stage else f"{at}.shortcut"
                target |= conv(f"{short}.convolution", f"{short}.normalization", 4 * width, inputs)
            for number, size in enumerate(sizes):
                source |= conv(f"{own}.conv{number + 1}", f"{own}.bn{number + 1}", *size)
                layer = f"{at}.layer.{number}"
                target |= conv(f"{layer}.convolution", f"{layer}.normalization", *size)
            if block == 0:
                source |= conv(f"{own}.downsample.1", f"{own}.downsample.2", 4 * width, inputs)
    found = sources(source, target)
    assert found["stages.0.layers.0.shortcut.convolution.weight"] == ["layer1.0.downsample.1.weight"]
    assert found["stages.0.layers.0.layer.2.convolution.weight"] == ["layer1.0.conv3.weight"]


def test_axes_of_one_element_and_counters_follow():
    source = {
        **norm("bn"),
        "bn.running_mean": (8,),
        "bn.running_var": (8,),
        "bn.num_batches_tracked": (),
        "scale": (8,),
    }
    target = {key.replace("bn", "norm"): shape for key, shape in source.items()} | {"scale": (8, 1, 1)}
    found = sources(source, target)
    assert found["norm.num_batches_tracked"] == ["bn.num_batches_tracked"]
    assert found["norm.running_mean"] == ["bn.running_mean"]


def test_a_part_of_a_fused_layer_is_not_used_without_the_rest():
    source = stack("h", [{"qkv.weight": (24, 8)}] * 2)
    target = stack("l", [{"query.weight": (8, 8), "key.weight": (8, 8), "other.weight": (3, 3)}] * 2)
    assert sources(source, target) == {}


def test_an_interleaved_layer_is_never_certain():
    source = stack("h", [{"experts.w13_weight": (4, 8, 8), "norm.weight": (8,)}] * 2)
    target = stack("h", [{"experts.gate_up_proj": (4, 8, 8), "norm.weight": (8,)}] * 2)
    assert infer(source, target).matches["h.1.experts.gate_up_proj"].label is Label.LIKELY


@pytest.mark.parametrize(("source", "target"), [({}, {}), (VIT_TIMM, {}), ({}, VIT_TIMM), ({"a": (0,)}, {"b": (0,)})])
def test_nothing_to_match(source, target):
    assert set(sources(source, target)) <= {"b"}


def test_the_norms_of_a_decoder_are_counted_by_three():
    """``norm2`` belongs to the MLP in an encoder, and to cross-attention in a decoder."""
    attention = ("self_attn", "multihead_attn")
    ours = {f"{name}.{key}": shape for name in attention for key, shape in linear("out_proj", 8, 8).items()}
    theirs = {key.replace("multihead_attn", "encoder_attn"): shape for key, shape in ours.items()}
    mlp = [linear(one, 32, 8) | linear(two, 8, 32) for one, two in (("linear1", "linear2"), ("fc1", "fc2"))]
    names = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
    torch_layer = {**ours, **mlp[0], **norm("norm1"), **norm("norm2"), **norm("norm3")}
    bart_layer = {**theirs, **mlp[1], **norm(names[0]), **norm(names[1]), **norm(names[2])}
    found = sources(stack("decoder.layers", [torch_layer] * 3), stack("layers", [bart_layer] * 3))
    for at, name in enumerate(names, 1):
        assert found[f"layers.1.{name}.weight"] == [f"decoder.layers.1.norm{at}.weight"]


@pytest.mark.parametrize("is_torch", [True, False], ids=["the target has kernels", "the file has kernels"])
def test_a_kernel_is_a_weight_transposed(is_torch):
    """JAX and TensorFlow store the inputs first, which the shape of a square matrix does not show."""
    layer: Specs = {f"attn.{name}.weight": (8, 8) for name in "qkvo"}
    kernels: Specs = {f"layers_{at}.attention.{name}.kernel": (8, 8) for at in (0, 1) for name in "qkvo"}
    sides = [stack("blocks", [layer] * 2), kernels]
    source, target = sides if is_torch else sides[::-1]
    inference = infer(source, target)
    assert inference.matches.keys() == target.keys()
    assert {part.axes for match in inference.matches.values() for part in match.parts} == {(1, 0)}


def test_a_convolution_of_keras_is_transposed_too():
    source: Specs = {"conv.kernel": (3, 3, 4, 8), "line.kernel": (5, 8, 8), "dense.kernel": (8, 8)}
    target: Specs = {"conv.weight": (8, 4, 3, 3), "line.weight": (8, 8, 5), "fc.weight": (8, 8)}
    axes = {key: match.parts[0].axes for key, match in infer(source, target).matches.items()}
    assert axes == {"conv.weight": (3, 2, 0, 1), "line.weight": (2, 1, 0), "fc.weight": (1, 0)}
    assert infer(target, source).matches["conv.kernel"].parts[0].axes == (2, 3, 1, 0)


@pytest.mark.parametrize(("name", "label"), [
    ("final.adaLN_modulation.1", Label.AMBIGUOUS), ("final.zq.1", Label.LIKELY), ("final.norm.zq", Label.CERTAIN),
])  # fmt: skip
def test_shift_and_scale_may_be_exchanged_in_a_norm(name, label):
    source = {**linear(name, 16, 8), **linear("blocks.0.adaLN_modulation.1", 48, 8)}
    target = {**linear("norm_out.linear", 16, 8), **linear("blocks.0.norm1.linear", 48, 8)}
    labels = {key: match.label for key, match in infer(source, target).matches.items()}
    assert labels["norm_out.linear.weight"] is labels["norm_out.linear.bias"] is label
    assert labels["blocks.0.norm1.linear.weight"] > Label.AMBIGUOUS


def test_the_blocks_of_two_streams_are_distinguished():
    block = stack("joint", [{f"{side}_block.attn.{x}.weight": (8, 8) for side in ("context", "x") for x in "qkv"}] * 2)
    target = stack(
        "layers",
        [{f"attn.{x}.weight": (8, 8) for x in ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "add_q_proj")}] * 2,
    )
    found = sources(block, target)
    assert found["layers.1.attn.add_k_proj.weight"] == ["joint.1.context_block.attn.k.weight"]
    assert found["layers.1.attn.to_q.weight"] == ["joint.1.x_block.attn.q.weight"]


def test_a_filter_called_kernel_transposes_no_other_layer():
    source = {**linear("to_rgb.conv", 8, 8), "blur.kernel": (4, 4)}
    target = {**linear("rgb.conv", 8, 8), "resample_filter": (4, 4)}
    assert infer(source, target).matches["rgb.conv.weight"].parts[0].axes == ()


def test_a_first_block_with_a_layer_more_moves_no_other():
    """T5 keeps the relative positions in its first block, so its second block is not the other library's first."""
    attention: Specs = {f"attn.{name}.weight": (8, 8) for name in "qkvo"}
    layer = attention | linear("mlp.fc1", 32, 8) | linear("mlp.fc2", 8, 32)
    first = {**layer, "attn.relative.weight": (4, 2)}
    found = sources(stack("decoder.block", [first, layer, layer]), stack("layers", [layer] * 3))
    assert found["layers.1.attn.q.weight"] == ["decoder.block.1.attn.q.weight"]
    assert {key.split(".")[1]: value[0].split(".")[2] for key, value in found.items()} == {"0": "0", "1": "1", "2": "2"}


def test_names_that_contradict_each_other_are_ambiguous():
    """``w1`` and ``w2`` are the gate and the output in Llama; both lead into the MLP in the first Qwen."""
    mlp: Specs = {"mlp.w1.weight": (32, 8), "mlp.w2.weight": (32, 8), "mlp.c_proj.weight": (8, 32)}
    theirs: Specs = {"mlp.gate_proj.weight": (32, 8), "mlp.up_proj.weight": (32, 8), "mlp.down_proj.weight": (8, 32)}
    matches = infer(stack("h", [mlp] * 2), stack("layers", [theirs] * 2)).matches
    labels = {key.split(".")[3]: match.label for key, match in matches.items()}
    assert labels["gate_proj"] == labels["up_proj"] == Label.AMBIGUOUS
    assert labels["down_proj"] > Label.AMBIGUOUS


def test_most_blocks_outvote_one():
    """The first block of EfficientNet has no expansion: its first norm is the second one of other blocks."""

    def bn(name: str, width: int) -> Specs:
        return {f"{name}.{leaf}": (width,) for leaf in ("weight", "bias", "running_mean", "running_var")}

    def block(names: tuple[str, ...], inputs: int, width: int) -> Specs:
        convs = (("pw", (width, inputs, 1, 1)), ("dw", (width, 1, 3, 3)), ("out", (inputs, width, 1, 1)))
        layers = zip(convs[3 - len(names) :], names, (width, width, inputs)[3 - len(names) :], strict=True)
        return {key: shape for (name, conv), norm, size in layers
                for key, shape in {f"conv_{name}.weight": conv, **bn(norm, size)}.items()}  # fmt: skip

    ours, theirs = ("bn1", "bn2", "bn3"), ("expand_bn", "depthwise_norm", "project_bn")
    widths = [(16, 96), (24, 144), (40, 240)]
    sides = [
        stack("blocks", [block(short, 32, 32), *(block(names, *width) for width in widths)])
        for names, short in ((ours, ours[:2]), (theirs, theirs[1:]))
    ]
    found = sources(*sides)
    assert found["blocks.0.depthwise_norm.weight"] == ["blocks.0.bn1.weight"]
    for at in (1, 2, 3):
        assert found[f"blocks.{at}.expand_bn.weight"] == [f"blocks.{at}.bn1.weight"]
        assert found[f"blocks.{at}.depthwise_norm.weight"] == [f"blocks.{at}.bn2.weight"]


def test_square_matrices_are_certain_only_next_to_one_that_shows_how_they_lie():
    """Another library's layer may compute ``x @ w``, which a square matrix does not show."""
    ours = {f"l{n}.{name}": shape for n in range(4) for name, shape in (("weight", (6, 6)), ("bias", (6,)))}
    theirs = {key.replace("l", "m", 1): shape for key, shape in ours.items()}
    assert infer(ours, theirs).matches["m0.weight"].label is Label.LIKELY
    assert infer(ours, theirs).matches["m0.bias"].label is Label.CERTAIN
    assert infer({**ours, "out.weight": (3, 6)}, {**theirs, "out.weight": (3, 6)}).matches["m0.weight"].label is (
        Label.CERTAIN
    )


def test_a_square_matrix_is_transposed_as_its_siblings_are():
    """The graph convolutions of PyG hold ``weight`` in the order of ``x @ w``, and since 2.0 a linear layer."""
    inputs, classes = (30, 8), (8, 4)

    def nets(*shapes: tuple[int, int]) -> tuple[Specs, Specs]:
        old: Specs = {}
        new: Specs = {}
        for at, (rows, columns) in enumerate(shapes, 1):
            old |= {f"conv{at}.weight": (rows, columns), f"conv{at}.bias": (columns,)}
            new |= {f"conv{at}.lin.weight": (columns, rows), f"conv{at}.bias": (columns,)}
        return old, new

    for sides in (nets(inputs, (8, 8), classes), nets(inputs, (8, 8), classes)[::-1]):
        inference = infer(*sides)
        for key, match in inference.matches.items():
            assert match.parts[0].axes == ((1, 0) if key.endswith("weight") else ())
            assert match.label is Label.LIKELY or key.endswith("bias")
    alone = infer(*nets((8, 8), (8, 8)))
    assert {alone.matches[f"conv{at}.lin.weight"].label for at in (1, 2)} == {Label.AMBIGUOUS}
    plain, wrapped = ({**linear(name, 8, 8), **linear("out", 3, 8)} for name in ("proj", "proj.base"))
    assert infer(plain, wrapped).matches["proj.base.weight"].label is Label.CERTAIN


def test_vectors_are_no_evidence_for_transposed_matrices():
    """A head with as many outputs as there are layers has rows with the shape of the leftover vectors."""
    layers = [linear("fc1", 32, 8) | linear("fc2", 8, 32)] * 2
    head: Specs = {"head.layers.0.weight": (8, 8), "head.layers.1.weight": (2, 8)}
    found = sources(stack("a.layers", layers) | head | {"x": (8,), "y": (8,)}, stack("b.layers", layers) | head)
    assert found["b.layers.1.fc1.weight"] == ["a.layers.1.fc1.weight"]


def test_a_bias_does_not_go_where_its_matrix_does_not():
    """The stages of PVT and SegFormer are equal except for the width of some layers."""
    source = stack("a", [{**linear("fc1", 16, 8), **linear("fc2", 8, 16)}, {**linear("fc1", 64, 8)}])
    target = stack("b", [{**linear("fc1", 16, 4), **linear("fc2", 8, 16)}, {**linear("fc1", 64, 8)}])
    matches = infer(source, target).matches
    assert "b.0.fc1.bias" not in matches
    assert matches["b.1.fc1.bias"].parts[0].source == "a.1.fc1.bias"


def test_heads_of_levels_follow_the_numbers_that_shapes_show():
    levels = [(5, 512), (4, 256), (3, 128), (2, 64)]
    source = {key: shape for at, wide in levels for key, shape in linear(f"p{at}.skip", 16, wide).items()}
    source |= {key: shape for at, _ in levels for key, shape in linear(f"p{at}.head", 16, 16).items()}
    target = {key: shape for at, wide in levels for key, shape in linear(f"skip.{5 - at}", 16, wide).items()}
    target |= {key: shape for at, _ in levels for key, shape in linear(f"heads.{5 - at}.conv", 16, 16).items()}
    inference = infer(source, target)
    for at, _ in levels:
        match = inference.matches[f"heads.{5 - at}.conv.weight"]
        assert match.parts[0].source == f"p{at}.head.weight"
        assert match.label is Label.LIKELY


def test_equal_layers_counted_from_the_other_end_are_not_certain():
    source = {f"p{at}.{key}": shape for at in (5, 4, 3) for key, shape in linear("head", 16, 8).items()}
    target = {f"heads.{at}.{key}": shape for at in range(3) for key, shape in linear("out", 16, 8).items()}
    assert {match.label for match in infer(source, target).matches.values()} == {Label.LIKELY}


def test_sorted_layers_of_the_way_back_up_may_be_counted_from_the_other_end():
    source = dict(sorted(stack("up", [linear("conv", 8, 8)] * 4).items()))
    target = stack("decoder", [linear("conv", 8, 8)] * 4)
    assert {match.label for match in infer(source, target).matches.values()} == {Label.LIKELY}


def test_layers_of_a_sequence_are_numbered_anew_in_their_order():
    layers = [linear(f"net.{at}", 8, 8) for at in (0, 2, 4)], [linear(f"net.{at}", 8, 8) for at in (0, 3, 6)]
    source, target = ({key: shape for layer in side for key, shape in layer.items()} for side in layers)
    assert sources(source, target)["net.6.weight"] == ["net.4.weight"]
    shifted = {f"net.{at}.weight": (8, 8) for at in range(4)}, {f"net.{at}.weight": (8, 8) for at in range(1, 5)}
    assert infer(*shifted).matches["net.1.weight"].label is Label.AMBIGUOUS, "the first or the last may be another one"


def test_a_sorted_file_with_some_new_names_says_nothing_of_the_order():
    """What is ambiguous in the sorted file is also ambiguous in the repaired one."""
    shapes = {"Ua": (8, 8), "Wa": (8, 8), **linear("fc", 16, 8), **norm("bn"), **linear("out", 3, 16)}
    target = {"W_query": (8, 8), "W_key": (8, 8), **norm("bn"), **linear("fc", 16, 8), **linear("out", 3, 16)}
    for source in (dict(sorted(shapes.items())), {"Ua": (8, 8), "Wa": (8, 8), **dict(sorted(target.items())[2:])}):
        assert infer(source, target).matches["W_key"].label is Label.AMBIGUOUS


def test_a_number_that_all_names_share_is_ignored():
    """``xyz.{n}.0`` is ``pts.{n}``, also next to another layer with their shape."""
    source: Specs = {"feature.weight": (8, 8), **{f"pts.{at}.weight": (8, 3 if at == 0 else 8) for at in range(4)}}
    target: Specs = {**{f"xyz.{at}.0.weight": (8, 3 if at == 0 else 8) for at in range(4)}, "last.weight": (8, 8)}
    assert sources(source, target)["xyz.1.0.weight"] == ["pts.1.weight"]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(
            {**linear("actor.0", 8, 4), **linear("critic.0", 8, 4), **linear("actor.4", 2, 8)},
            {**linear("vf.0", 8, 4), **linear("pi.0", 8, 4), **linear("action", 2, 8)},
            id="the name is that of both",
        ),
        pytest.param(
            {**linear("final.linear", 16, 8), **linear("final.modulation.1", 16, 8)},
            {**linear("norm_out.linear", 16, 8), **linear("proj_out", 16, 8)},
            id="only one of two has the name",
        ),
    ],
)
def test_a_common_last_name_is_not_certain(source, target):
    inference = infer(source, target)
    assert all(match.label < Label.CERTAIN for key, match in inference.matches.items() if not key.startswith("action"))


@pytest.mark.parametrize("is_back", [False, True], ids=["the file lacks it", "the target lacks it"])
def test_the_head_is_not_the_embedding_that_is_gone(is_back):
    """Without its embedding, the whole file has the shapes of the target without its head."""
    layers = stack("layers", [linear("attn", 8, 8) | linear("mlp", 16, 8)] * 4)
    whole = {"tok_embeddings.weight": (32, 8), **layers, **norm("norm"), "output.weight": (32, 8)}
    other = {f"model.{key}": shape for key, shape in ({"embed_tokens.weight": (32, 8)} | layers | norm("norm")).items()}
    other["lm_head.weight"] = (32, 8)
    lacking = {key: shape for key, shape in whole.items() if key != "tok_embeddings.weight"}
    matches = infer(*((other, lacking) if is_back else (lacking, other))).matches
    given = [key for key, match in matches.items() if len(match.parts[0].place) > 1 and match.label > Label.AMBIGUOUS]
    assert not {"model.embed_tokens.weight", "lm_head.weight", "output.weight"}.intersection(given)
    assert len([key for key in given if "layers" in key]) == 8


def test_a_missing_norm_is_not_replaced_by_another_one():
    block = {"conv1.weight": (8, 8, 1, 1), **norm("bn1"), "conv2.weight": (8, 8, 3, 3), **norm("bn2")}
    renamed = {"first.conv.weight": (8, 8, 1, 1), "second.conv.weight": (8, 8, 3, 3), **norm("second.normalization")}
    blocks = [linear("fc", 4, 8) | {f"body.{key}": shape for key, shape in block.items()}] * 3
    target = stack("stages", [linear("out", 4, 8) | {f"x.{key}": shape for key, shape in renamed.items()}] * 3)
    matches = infer(stack("layer", blocks), target).matches
    taken = {match.parts[0].source for match in matches.values() if match.label > Label.AMBIGUOUS}
    assert not any("bn1" in key for key in taken)


def test_keras_names_of_a_normalisation():
    words = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
    source: Specs = {f"bn{at}.{word}": (8,) for at in range(3) for word in words}
    target: Specs = {f"norms.{at}.{word}": (8,) for at in range(3) for word in words.values()}
    found = sources(source, target)
    assert found == {f"norms.{at}.{new}": [f"bn{at}.{old}"] for at in range(3) for old, new in words.items()}


def test_the_second_norm_next_to_attention_across_is_its_own():
    attention = [*linear("q", 8, 8).items(), *linear("k", 8, 8).items()]
    layer = {f"{name}.{key}": shape for name in ("self_attn", "context_attn") for key, shape in attention}
    source = {**layer, **linear("feed_forward.w_1", 16, 8), **linear("feed_forward.w_2", 8, 16)}
    source |= {**norm("feed_forward.layer_norm"), **norm("layer_norm_1"), **norm("layer_norm_2")}
    target = {key.replace("context", "cross"): shape for key, shape in layer.items()}
    target |= {
        **linear("linear1", 16, 8),
        **linear("linear2", 8, 16),
        **norm("norm1"),
        **norm("norm2"),
        **norm("norm3"),
    }
    found = sources(stack("layers", [source] * 2), stack("layers", [target] * 2))
    assert found["layers.0.norm2.weight"] == ["layers.0.layer_norm_2.weight"]
    assert found["layers.1.norm3.weight"] == ["layers.1.feed_forward.layer_norm.weight"]


def test_the_second_norm_next_to_a_norm_of_attention_across_is_not_its_own():
    """MONAI's blocks have ``norm_cross_attn`` in any case."""
    block = {**norm("norm1"), **linear("attn.out_proj", 8, 8), **linear("attn.qkv", 24, 8), **norm("norm2")}
    source = {**linear("mlp.linear1", 32, 8), **linear("mlp.linear2", 8, 32), **block, **norm("norm_cross_attn")}
    found = sources(stack("blocks", [source] * 3), stack("layers", [timm_block()] * 3))
    assert all(found[f"layers.{at}.norm2.weight"] == [f"blocks.{at}.norm2.weight"] for at in range(3))


def crossing(*attentions: str, norms: tuple[str, ...]) -> Specs:
    """A decoder layer defined as in DETR: each norm comes after its own layer."""
    layer: Specs = {}
    for attention, name in zip(attentions, norms, strict=False):
        for each in ("q", "k") if "self" in attention else ("q", "k", "v"):
            layer |= linear(f"{attention}.{each}_proj", 8, 8)
        layer |= norm(name)
    return {**layer, **linear("linear1", 16, 8), **linear("linear2", 8, 16), **norm(norms[2])}


NUMBERED, NAMED = ("norm1", "norm2", "norm3"), ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")


@pytest.mark.parametrize("is_sorted", [False, True], ids=["in the order of definition", "sorted by name"])
@pytest.mark.parametrize("is_back", [False, True], ids=["from numbers", "to numbers"])
@pytest.mark.parametrize(
    ("attentions", "own"),
    [
        pytest.param(("self_attn", "multihead_attn"), "norm1", id="DETR"),
        pytest.param(("self_attn", "cross_attn"), "norm1", id="RT-DETR"),
        pytest.param(("cross_attn", "self_attn"), "norm2", id="Deformable DETR"),
    ],
)
def test_numbered_norms_belong_to_the_attentions_in_the_order_of_the_model(attentions, own, is_back, is_sorted):
    numbered = stack("layers", [crossing(*attentions, norms=NUMBERED)] * 3)
    named = stack("decoder", [crossing("self_attn", "encoder_attn", norms=NAMED)] * 3)
    numbered = dict(sorted(numbered.items())) if is_sorted else numbered
    names = "decoder.1.self_attn_layer_norm.bias", f"layers.1.{own}.bias"
    source, target = (named, numbered) if is_back else (numbered, named)
    match = infer(source, target).matches[names[is_back]]
    if is_sorted and "cross_attn" in attentions:
        assert match.label is Label.AMBIGUOUS
    else:
        assert (match.parts[0].source, match.label > Label.AMBIGUOUS) == (names[not is_back], True)


def test_the_bias_of_a_fused_layer_is_taken_apart_like_its_weight():
    """Both sides have equally many other vectors of its length."""
    apart = {key: shape for each in "qkv" for key, shape in linear(f"attn.{each}_proj", 8, 8).items()}
    source = {**stack("layers", [linear("attn.qkv", 24, 8)] * 2), **norm("old", 24)}
    target = {**stack("layer", [apart] * 2), **norm("new", 24), **norm("more", 24)}
    assert sources(source, target)["layer.1.attn.k_proj.bias"] == ["layers.1.attn.qkv.bias"]


@pytest.mark.parametrize("is_source", [True, False], ids=["the file is sorted", "the target is sorted"])
def test_a_norm_of_a_sorted_file_goes_nowhere_else_than_after_its_layer(is_source):
    ours = {**linear("expansion.expand", 24, 8), **norm("expansion.bn_of_it", 24), "depth.conv.weight": (24, 1, 3)}
    ours |= {**norm("depth.bn_there", 24), **linear("reduce", 8, 24)}
    theirs = {**linear("conv_pw", 24, 8), **norm("bn1", 24), "conv_dw.weight": (24, 1, 3)}
    theirs |= {**norm("bn2", 24), **linear("conv_pwl", 8, 24)}
    sides = stack("layer", [ours] * 3), stack("blocks", [theirs] * 3)
    source, target = (dict(sorted(side.items())) if at != is_source else side for at, side in enumerate(sides))
    match = infer(source, target).matches["blocks.2.bn1.weight"]
    assert match.parts[0].source == "layer.2.expansion.bn_of_it.weight" or match.label is Label.AMBIGUOUS


def test_a_list_is_the_list_of_its_length_and_not_a_module_next_to_it():
    """As in YOLOv3: a block of the neck has the shapes of the backbone's, and the neck is flat on one side."""
    block = {**linear("cv1", 4, 8), **linear("cv2", 8, 4)}
    source = {**stack("model.8", [block] * 8), **linear("model.9", 4, 8)}
    source |= {f"model.10.{key}": shape for key, shape in block.items()}
    blocks = {f"res{at}.conv{each[2:]}": shape for at in range(8) for each, shape in block.items()}
    target = {f"backbone.stage.{key}": shape for key, shape in blocks.items()}
    target |= {**linear("neck.in", 4, 8), **linear("neck.detect.conv1", 4, 8), **linear("neck.detect.conv2", 8, 4)}
    found = sources(source, target)
    assert [found[f"backbone.stage.res{at}.conv2.bias"] for at in range(8)] == [
        [f"model.8.{at}.cv2.bias"] for at in range(8)
    ]


@pytest.mark.parametrize("is_sorted", [(True, False), (False, True), (True, True), (False, False)], ids=str)
def test_only_the_order_of_the_model_tells_a_module_from_those_of_a_list(is_sorted):
    """As in StyleGAN2: the first of four equal layers is not in a list on one side, so its number means nothing."""
    source = {**linear("to_rgb1", 3, 8), **stack("to_rgbs", [linear("conv", 3, 8)] * 3)}
    target = {f"b{size}.torgb.{key[2:]}": shape for size in (4, 8, 16, 32) for key, shape in linear("x", 3, 8).items()}
    ours, theirs = (
        dict(sorted(side.items())) if each else side for side, each in zip((source, target), is_sorted, strict=True)
    )
    inference = infer(ours, theirs)
    given = {key: match.parts[0].source for key, match in inference.matches.items() if match.label > Label.AMBIGUOUS}
    assert given == ({} if any(is_sorted) else dict(zip(target, source, strict=True)))


def test_numbers_order_the_layers_of_a_sorted_file():
    ours = {**norm("bn1", 24), **norm("bn2", 24), **norm("bn3"), "conv_dw.weight": (24, 1, 3)}
    ours |= {**linear("conv_pw", 24, 8), **linear("conv_pwl", 8, 24)}
    theirs = {**linear("expansion.conv", 24, 8), **norm("expansion.bn_in", 24), "depthwise.conv.weight": (24, 1, 3)}
    theirs |= {**norm("depthwise.norm", 24), **linear("projection.conv", 8, 24), **norm("projection.bn_out")}
    found = infer(dict(sorted(stack("blocks", [ours] * 3).items())), stack("layer", [theirs] * 3))
    match = found.matches["layer.1.expansion.bn_in.weight"]
    assert match.label > Label.AMBIGUOUS
    assert match.parts[0].source == "blocks.1.bn1.weight"


def test_equal_layers_that_one_side_lists_from_the_other_end_follow_the_order():
    source = {f"up{at}.{key}": shape for at in (3, 2, 1) for key, shape in linear("conv", 16, 8).items()}
    target = {f"decoder.{at}.{key}": shape for at in range(3) for key, shape in linear("proj", 16, 8).items()}
    match = infer(source, target).matches["decoder.0.proj.weight"]
    assert match.parts[0].source == "up3.conv.weight"
    assert match.label is Label.LIKELY


def moved_between_stages(number: int) -> tuple[Specs, Specs]:
    """Stage 1 ends on one side where stage 2 begins on the other, whose stage 3 has the shapes of stage 1."""
    source: Specs = {}
    target: Specs = {}
    for at, depth in enumerate((4, 3, 8, 3)):
        width = 8 if at else 4
        block = {key: shape for each in range(number) for key, shape in linear(f"fc{each}", width, width).items()}
        source |= stack(f"blocks.{at}", [block] * depth)
        source |= linear(f"blocks.{at}.{depth}.down", 8, width) if at < 3 else {}
        target |= linear(f"stages.{at}.down", 8, 8 if at > 1 else 4) if at else {}
        target |= {f"stages.{at}.{key}": shape for key, shape in stack("blocks", [block] * depth).items()}
    return source, target


def test_a_moved_layer_between_stages_does_not_change_their_order():
    found = sources(*moved_between_stages(1))
    assert found["stages.1.blocks.0.fc0.weight"] == ["blocks.1.0.fc0.weight"]
    assert found["stages.3.blocks.2.fc0.bias"] == ["blocks.3.2.fc0.bias"]
    assert [found[f"stages.{at}.down.weight"] for at in (1, 2, 3)] == [
        ["blocks.0.4.down.weight"],
        ["blocks.1.3.down.weight"],
        ["blocks.2.8.down.weight"],
    ]


@pytest.mark.parametrize(
    "lacking", [r"stages\.3\.blocks\.2\.fc0\.", r"stages\.3\.", r"stages\.1\.blocks\.0\.", r"stages\.0\."]
)
def test_a_layer_between_stages_that_moved_next_to_one_that_the_target_lacks(lacking):
    source, target = moved_between_stages(4)
    matches = infer(source, {key: shape for key, shape in target.items() if not re.match(lacking, key)}).matches
    for key, match in matches.items():
        own = re.sub(r"^stages\.(\d)\.blocks\.", r"blocks.\1.", key)
        assert ".down." in key or match.label is Label.AMBIGUOUS or match.parts[0].source == own


def test_the_norm_after_attention_is_that_of_the_mlp_next_to_one_before_attention():
    """Also if the other side lists it first, as gpt-fast does."""
    source = stack("layers", [{f"{name}.weight": (8,) for name in ("ffn_norm", "attention_norm")}] * 3)
    target = stack("h", [{f"{name}.weight": (8,) for name in ("input_layernorm", "post_attention_layernorm")}] * 3)
    assert sources(source, target)["h.1.input_layernorm.weight"] == ["layers.1.attention_norm.weight"]


def test_the_last_of_three_norms_is_that_of_the_mlp():
    """The decoder of Moonshine and one that numbers its norms in another order."""
    numbered: Specs = {f"layer_norm_{at}.weight": (8,) for at in (3, 1, 2)}
    named: Specs = {
        f"{name}.weight": (8,) for name in ("input_layernorm", "post_attention_layernorm", "final_layernorm")
    }
    found = sources(stack("h", [numbered] * 3), stack("layers", [named] * 3))
    assert found["layers.1.post_attention_layernorm.weight"] == ["h.1.layer_norm_2.weight"]
    assert found["layers.1.final_layernorm.weight"] == ["h.1.layer_norm_3.weight"]


def test_three_numbered_layers_of_a_gated_mlp_have_the_order_of_llama():
    numbered: Specs = {"fc1.weight": (32, 8), "fc2.weight": (8, 32), "fc3.weight": (32, 8)}
    named: Specs = {"up_proj.weight": (32, 8), "gate_proj.weight": (32, 8), "down_proj.weight": (8, 32)}
    found = sources(stack("h", [numbered] * 3), stack("layers", [named] * 3))
    assert found["layers.1.gate_proj.weight"] == ["h.1.fc1.weight"]
    assert found["layers.1.up_proj.weight"] == ["h.1.fc3.weight"]


def test_a_single_number_next_to_a_matrix_follows_its_name():
    """``noise.weight`` of StyleGAN2 is ``noise_strength`` next to the convolution's weight."""
    source = stack("convs", [{"conv.weight": (1, 8, 8, 3, 3), "noise.weight": (1,), "activate.bias": (8,)}] * 3)
    target = stack("b", [{"weight": (8, 8, 3, 3), "noise_strength": (1,), "bias": (8,)}] * 3)
    assert sources(source, target)["b.1.noise_strength"] == ["convs.1.noise.weight"]


def test_equal_towers_of_a_sorted_file_are_distinguished_by_names_only():
    tower = stack("layers", [{**linear("fc1", 8, 8), **linear("fc2", 8, 8), **norm("ln")}] * 3)
    for names, label in (("zenith", "aleph"), Label.AMBIGUOUS), (("query_encoder", "ctx_encoder"), Label.LIKELY):
        source = {f"{name}.{key}": shape for name in names for key, shape in tower.items()}
        target = {
            f"{name}.{key}": shape for name in ("question_tower", "passage_tower") for key, shape in tower.items()
        }
        match = infer(dict(sorted(source.items())), target).matches["passage_tower.layers.1.fc1.weight"]
        assert match.label is label
        assert label is Label.AMBIGUOUS or match.parts[0].source == "ctx_encoder.layers.1.fc1.weight"


def test_a_projection_next_to_a_fused_layer_is_the_output_of_attention():
    ours: Specs = {"attn.qkv.weight": (24, 8), **linear("attn.proj", 8, 8)}
    theirs: Specs = {f"attention.{name}_proj.weight": (8, 8) for name in "koqv"}
    theirs |= {f"attention.{name}_proj.bias": (8,) for name in "oqv"}
    found = sources(dict(sorted(stack("blocks", [ours] * 3).items())), stack("layer", [theirs] * 3))
    assert found["layer.2.attention.o_proj.weight"] == ["blocks.2.attn.proj.weight"]
    assert found["layer.2.attention.q_proj.weight"] == ["blocks.2.attn.qkv.weight"]


def test_the_order_of_names_decides_nothing_if_both_sides_are_sorted():
    ours = {**linear("conv_pw", 24, 8), **norm("bn1", 24), **norm("bn2", 24), "conv_dw.weight": (24, 1, 3)}
    theirs = {**linear("expansion.conv", 24, 8), **norm("expansion.bn", 24), **norm("depthwise.bn", 24)}
    theirs["depthwise.conv.weight"] = (24, 1, 3)
    source, target = stack("blocks", [ours] * 3), stack("layer", [theirs] * 3)
    found = infer(dict(sorted(source.items())), dict(sorted(target.items()))).matches
    assert found["layer.1.expansion.bn.weight"].label is Label.AMBIGUOUS
    assert found["layer.1.depthwise.conv.weight"].label is Label.CERTAIN


def test_rows_of_metas_llama_are_ambiguous():
    ours: Specs = {f"attention.{name}.weight": (8, 8) for name in ("wq", "wk", "wv", "wo")}
    theirs: Specs = {f"self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"}
    found = infer(stack("layers", [ours] * 2), stack("model.layers", [theirs] * 2)).matches
    labels = {key.split(".")[4]: match.label for key, match in found.items()}
    assert labels["q_proj"] is labels["k_proj"] is Label.AMBIGUOUS
    assert labels["v_proj"] is labels["o_proj"] is Label.LIKELY


@pytest.mark.parametrize(
    "tables", [("tok_embeddings", "embed"), ("embed", "tok_embeddings"), ("embed", "words")], ids=str
)
@pytest.mark.parametrize("is_fused", [False, True], ids=["apart", "fused"])
def test_rows_of_an_implementation_that_rotates_as_metas_llama_does_are_ambiguous(tables, is_fused):
    """torchtune calls these layers as transformers does; litgpt fuses them."""
    apart: Specs = {"q_proj.weight": (24, 8), "k_proj.weight": (16, 8), "v_proj.weight": (16, 8)}
    sides: list[Specs] = [{f"{table}.weight": (99, 8)} for table in tables]
    sides[0] |= stack("layers", [{f"attn.{key}": shape for key, shape in {**apart, "o.weight": (8, 24)}.items()}] * 2)
    apart = {"qkv.weight": (56, 8)} if is_fused else apart
    sides[1] |= stack("h", [{f"self.{key}": shape for key, shape in {**apart, "proj.weight": (8, 24)}.items()}] * 2)
    found = infer(sides[0], sides[1]).matches
    doubtful = {key.partition("self.")[2] for key, match in found.items() if match.label is Label.AMBIGUOUS}
    expected = {"qkv.weight"} if is_fused else {"q_proj.weight", "k_proj.weight"}
    assert doubtful - {"tok_embeddings.weight", ""} == (expected if "tok_embeddings" in tables else set())
    assert len(found) == len(sides[1])


def test_a_layer_of_a_sorted_list_keeps_its_place_between_others():
    """The blocks of a flat list are stages on the other side: their numbers give the order, sorted or not."""
    mlp = {**linear("a", 16, 8), **linear("b", 8, 16)}
    flat = [mlp, mlp, linear("down", 12, 8), mlp, mlp, linear("down", 20, 12), mlp]
    source = dict(sorted(stack("blocks", flat).items()))
    target = {f"stages.0.{key}": shape for key, shape in stack("layers", [mlp] * 2).items()}
    target |= linear("stages.1.first", 12, 8) | {f"stages.1.own.{key}": shape for key, shape in mlp.items()}
    target |= {f"stages.1.layers.0.{key}": shape for key, shape in mlp.items()} | linear("stages.2.first", 20, 12)
    target |= {f"stages.2.own.{key}": shape for key, shape in mlp.items()}
    found = sources(source, target)
    assert found["stages.1.own.a.weight"] == ["blocks.3.a.weight"]
    assert found["stages.2.own.b.bias"] == ["blocks.6.b.bias"]


def test_a_norm_of_a_sorted_file_goes_with_the_convolution_next_to_it():
    source = {"blocks.0.conv.weight": (32, 1, 3, 3), **norm("blocks.0.bn1", 32), **linear("blocks.1.fc", 8, 32)}
    source |= {**norm("bn1", 32), "conv_stem.weight": (32, 3, 3, 3), **linear("head", 5, 8)}
    target = {"stem.first.conv.weight": (32, 3, 3, 3), **norm("stem.first.norm", 32)}
    target |= {"stem.second.conv.weight": (32, 1, 3, 3), **norm("stem.second.norm", 32)}
    target |= {**linear("layer.fc", 8, 32), **linear("classifier", 5, 8)}
    assert sources(dict(sorted(source.items())), target)["stem.second.norm.weight"] == ["blocks.0.bn1.weight"]


def test_a_matrix_that_leaves_its_bias_behind_is_not_certain():
    """Matrices that are stored transposed, whose names do not show it, fit each other's places."""
    layers = [{"x.k": (8, 32), "x.bias": (32,), "y.k": (32, 8), "y.bias": (8,), "z": (8,)}] * 3
    target = [{**linear("intermediate", 32, 8), **linear("output", 8, 32), "scale": (8,)}] * 3
    found = infer(stack("a", layers), stack("layer", target)).matches
    assert {found[f"layer.{at}.output.weight"].label for at in range(3)} == {Label.AMBIGUOUS}


@pytest.mark.parametrize(("goes_on", "label"), [(False, Label.AMBIGUOUS), (True, Label.CERTAIN)])
def test_blocks_in_chunks_are_distinguished_by_a_number_that_continues(goes_on, label):
    """DINOv2 numbers its blocks across all chunks: `blocks.0.1`, `blocks.1.2`."""
    places = [(at // 2, at if goes_on else at % 2) for at in range(6)]
    source = {f"blocks.{n}.{m}.{key}": shape for n, m in places for key, shape in timm_block().items()}
    match = infer(source, stack("layer", [hf_block()] * 6)).matches["layer.3.intermediate.dense.weight"]
    assert (match.parts[0].source, match.label) == (f"blocks.1.{3 if goes_on else 1}.mlp.fc1.weight", label)


def test_blocks_counted_from_another_number_are_shifted():
    shifted = stack("layers", [timm_block()] * 4), stack("layers", [timm_block()] * 5)
    target = {key: shape for key, shape in shifted[1].items() if not key.startswith("layers.0.")}
    match = infer(shifted[0], target).matches["layers.1.mlp.fc1.weight"]
    assert (match.parts[0].source, match.label) == ("layers.0.mlp.fc1.weight", Label.LIKELY)


@pytest.mark.parametrize(("name", "first"), [("refinenet", "3"), ("fusion", "0"), ("zq", "0")])
def test_equal_blocks_on_the_way_back_up_are_not_certain(name, first):
    """MiDaS numbers them from the largest image down, and transformers from the smallest up."""
    unit = {**linear("conv1", 8, 8), **linear("conv2", 8, 8), **linear("out_conv", 4, 8)}
    source = {f"scratch.{name}{at + 1}.{key}": shape for at in range(4) for key, shape in unit.items()}
    found = infer(source, {f"neck.{key}": shape for key, shape in stack("fusion_stage.layers", [unit] * 4).items()})
    match = found.matches[f"neck.fusion_stage.layers.{first}.conv1.weight"]
    assert (match.parts[0].source, match.label) == (f"scratch.{name}1.conv1.weight", Label.LIKELY)


def test_a_gate_and_what_it_gates_fused_under_a_name_that_does_not_say_the_order():
    ours = stack("blocks", [{"ff_proj.weight": (64, 8), "ff_out.weight": (8, 32), "q_proj.weight": (8, 8)}] * 3)
    block = {"gate_proj.weight": (32, 8), "up_proj.weight": (32, 8), "down_proj.weight": (8, 32)}
    theirs = stack("layers", [{**block, "query.weight": (8, 8)}] * 3)
    labels = {key: match.label for key, match in infer(ours, theirs).matches.items()}
    assert labels["layers.1.up_proj.weight"] is Label.AMBIGUOUS
    assert labels["layers.1.down_proj.weight"] > Label.AMBIGUOUS


@pytest.mark.parametrize(("front", "name", "norm", "label"), [
    ("h", "qkv_proj", "norm1", Label.LIKELY), ("h", "Wqkv", "norm1", Label.LIKELY),
    ("h", "query_key_value", "norm1", Label.AMBIGUOUS), ("h", "wqkv", "norm1", Label.AMBIGUOUS),
    ("h", "linear_qkv", "norm1", Label.AMBIGUOUS), ("h", "qkv_proj", "self_attn_layer_norm", Label.AMBIGUOUS),
    ("transformer.encoder.layers", "query_key_value", "norm1", Label.LIKELY),
    ("language_model.encoder.layers", "query_key_value", "norm1", Label.AMBIGUOUS),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("is_back", [False, True], ids=["split", "fused"])
def test_queries_keys_and_values_that_some_libraries_fuse_in_another_order(front, name, norm, label, is_back):
    ours = {f"attn.{name}.weight": (16, 8), "attn.dense.weight": (8, 8), f"{norm}.weight": (8,)}
    ours = stack(front, [ours] * 3)
    block = {"q_proj.weight": (8, 8), "k_proj.weight": (4, 8), "v_proj.weight": (4, 8), "out_proj.weight": (8, 8)}
    theirs = stack("layers", [{f"self_attn.{key}": shape for key, shape in block.items()}] * 3)
    matches = infer(*((theirs, ours) if is_back else (ours, theirs))).matches
    assert {match.label for match in matches.values() if len(match.parts) > 1 or match.parts[0].numel < 64} == {label}


def _stages(name: str, last: str, at: range) -> Specs:
    return {key: shape for n in at for key, shape in linear(f"{name}.{n}.{last}", 12 << n, 4 << n).items()}


@pytest.mark.parametrize("lacking", ["", "file", "model"])
def test_nothing_is_certain_next_to_a_layer_that_is_left_over(lacking):
    """Shapes only allow one map if both sides are known to have the same layers."""
    source = _stages("a", "conv", range(4 - (lacking == "file"))) | {"embed.weight": (99, 5)}
    target = _stages("b", "proj", range(4 - (lacking == "model"))) | {"words.weight": (99, 5), "head.weight": (99, 5)}
    tied = dict.fromkeys(("words.weight", "head.weight"), ("words.weight", "head.weight"))
    found = infer_tied(source, target, tied).matches
    assert len(found) > 6
    assert {each.label for each in found.values()} == {Label.LIKELY if lacking else Label.CERTAIN}


def test_a_batch_norm_that_leaves_the_convolution_which_it_follows_is_ambiguous():
    """ShuffleNet's downsampling in pytorchcv, whose branches are in another order than torchvision's."""
    names = [f"conv{at}" for at in range(1, 6)]
    places = ["branch1.0", "branch1.2", "branch2.0", "branch2.3", "branch2.5"]
    truth = dict(zip(places, ["conv4", "conv5", "conv1", "conv2", "conv3"], strict=True))
    kernels = {
        "conv1": (8, 8, 1, 1),
        "conv2": (8, 1, 3, 3),
        "conv3": (8, 8, 1, 1),
        "conv4": (4, 1, 3, 3),
        "conv5": (8, 4),
    }

    def block(layers: dict[str, tuple[str, str]]) -> Specs:
        merged: Specs = {}
        for conv, (name, bn) in layers.items():
            merged[f"{conv}.weight"] = kernels[name]
            merged |= {f"{bn}.{end}": kernels[name][:1] for end in ("weight", "bias", "running_mean", "running_var")}
        return merged

    ours = block({name: (name, name.replace("conv", "bn")) for name in names})
    theirs = block({at: (truth[at], f"{at[:-1]}{int(at[-1]) + 1}") for at in places})
    matches = infer(stack("units", [ours] * 3), stack("stage", [theirs] * 3)).matches
    for place, name in truth.items():
        match = matches[f"stage.1.{place[:-1]}{int(place[-1]) + 1}.weight"]
        is_right = match.parts[0].source == f"units.1.{name.replace('conv', 'bn')}.weight"
        assert is_right or match.label is Label.AMBIGUOUS, place


@pytest.mark.parametrize("at", [0, 1])
def test_blocks_at_other_places_of_their_list_are_not_certain(at):
    """Each side lacks a layer of the same shape, in another block: nothing is left over."""
    block: Specs = {"a.weight": (8, 24), "b.weight": (8, 24), "c.weight": (8, 24), "d.weight": (24, 5)}
    source, target = stack("h", [block] * 3), stack("g", [block] * 3)
    del source["h.1.c.weight"], target[f"g.{2 * at}.c.weight"]
    found = infer_tied(source, target, {}).matches
    assert len(found) == 11
    assert max(each.label for each in found.values()) is Label.LIKELY


def test_the_norms_of_stages_are_a_list_though_there_are_three():
    """The backbone of Mask2Former: the last norm of the target has the shape of the norm of the last stage."""
    source: Specs = {}
    target = norm("model.encoder.layernorm", 16)
    for at in range(4):
        source |= norm(f"backbone.norm{at}", 2 << at)
        target |= norm(f"model.norms.stage{at + 1}", 2 << at)
    body: Specs = stack("layers", [linear("fc1", 32, 8) | linear("fc2", 8, 32)] * 3)
    source |= {f"backbone.{key}": shape for key, shape in body.items()}
    target |= {f"model.encoder.{key}": shape for key, shape in body.items()}
    matches = infer(source, target).matches
    for at in range(4):
        match = matches[f"model.norms.stage{at + 1}.weight"]
        assert match.parts[0].source == f"backbone.norm{at}.weight" or match.label is Label.AMBIGUOUS
    gone = matches.get("model.encoder.layernorm.weight")
    assert gone is None or gone.label is Label.AMBIGUOUS


def test_actors_and_critics_in_another_order():
    """CleanRL has the critic first, Stable-Baselines3 the policy."""
    net = {"0.weight": (64, 17), "0.bias": (64,), "2.weight": (64, 64), "2.bias": (64,)}
    source = {f"{name}.{key}": shape for name, end in (("critic", 1), ("actor_mean", 6)) for key, shape in
              {**net, "4.weight": (end, 64), "4.bias": (end,)}.items()}  # fmt: skip
    target = {f"mlp_extractor.{name}.{key}": shape for name in ("policy_net", "value_net") for key, shape in
              net.items()} | linear("action_net", 6, 64) | linear("value_net", 1, 64)  # fmt: skip
    found = sources(source, target)
    assert found["mlp_extractor.policy_net.0.weight"] == ["actor_mean.0.weight"]
    assert found["mlp_extractor.value_net.2.bias"] == ["critic.2.bias"]


@pytest.mark.parametrize("is_sorted", [False, True], ids=["in the order of definition", "sorted by name"])
def test_a_number_at_the_end_of_a_name_tells_two_attentions_apart(is_sorted):
    """The first block of Stable Diffusion 3.5 has a second attention for the image, ``attn2`` in diffusers, too."""
    mlp = linear("fc1", 32, 8) | linear("fc2", 8, 32)
    parts = {"context_block.attn": linear("qkv", 24, 8), "x_block.attn": linear("qkv", 24, 8)}
    parts |= {"x_block.attn2": linear("qkv", 24, 8), "context_block.mlp": mlp, "x_block.mlp": mlp}
    block = {f"{front}.{key}": shape for front, inner in parts.items() for key, shape in inner.items()}
    theirs: Specs = {f"{front}.{key}": shape for front in ("ff", "ff_context") for key, shape in mlp.items()}
    for name in ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "add_q_proj"):
        theirs |= linear(f"attn.{name}", 8, 8)
    for name in ("to_q", "to_k", "to_v"):
        theirs |= linear(f"attn2.{name}", 8, 8)
    source = stack("joint", [block] * 2)
    matches = infer(dict(sorted(source.items())) if is_sorted else source, stack("blocks", [theirs] * 2)).matches
    assert {key: ".attn2." in match.parts[0].source for key, match in matches.items()} == {
        key: ".attn2." in key for key in matches
    }
    assert len(matches) == 2 * len(theirs)


OF_TIMM = {
    "attention.attention.query": "attn.qkv",
    "attention.attention.key": "attn.qkv",
    "attention.attention.value": "attn.qkv",
    "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}


def towers(number: int) -> tuple[Specs, Specs, dict[str, str]]:
    """Return a model with one or two towers as both libraries have it, and which key is which."""
    truth = {}
    for tower in ("vision", "text")[:number]:
        front = "visual." if tower == "vision" else ""
        for at in range(4):
            for name, own in OF_TIMM.items():
                for leaf in ("weight", "bias"):
                    truth[f"{tower}_model.layer.{at}.{name}.{leaf}"] = f"{front}blocks.{at}.{own}.{leaf}"
        for leaf in ("weight", "bias"):
            truth[f"{tower}_model.final_norm.{leaf}"] = f"{front}norm.{leaf}"
    ours, theirs = timm_block() | norm("norm"), hf_block() | norm("final_norm")
    source = {key: next(shape for name, shape in ours.items() if key.endswith(name)) for key in truth.values()}
    target = {key: next(shape for name, shape in theirs.items() if key.endswith(name)) for key in truth}
    return source, target, truth


def counted_anew(key: str, gone: int) -> str:
    """Return the name of a key after a layer before it was removed."""
    return re.sub(r"\.(\d)\.", lambda found: f".{int(found[1]) - (int(found[1]) > gone)}.", key, count=1)


LACKING = {
    "the first layer": r"\.0\.",
    "a layer": r"\.2\.",
    "the last layer": r"\.3\.",
    "the first norm of a layer": r"\.1\.(norm1|layernorm_before)\.",
    "the first norms": r"\.\d\.(norm1|layernorm_before)\.",
    "a weight": r"\.2\.(mlp.fc1|intermediate.dense)\.weight",
    "all weights of a kind": r"\.\d\.(mlp.fc2|output.dense)\.weight",
    "a bias": r"\.1\.(attn.proj|attention.output.dense)\.bias",
    "the last norm": r"(visual.norm|vision_model.final_norm)\.",
    "the weight of the last norm": r"(visual.norm|vision_model.final_norm)\.weight",
    "attention in a layer": r"\.1\.att",
}


@pytest.mark.parametrize("is_sorted", [False, True], ids=["in the order of definition", "sorted by name"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("is_file", [True, False], ids=["the file lacks", "the target lacks"])
@pytest.mark.parametrize("lacking", LACKING.values(), ids=LACKING)
def test_missing_layers_are_not_replaced_by_others(lacking, is_file, number, is_sorted):
    """No shape shows which layer of a list is missing, whether the rest is renumbered or not."""
    source, target, truth = towers(number)
    tower = ("visual", "vision") if number == 2 else ("", "")
    sides = [source, target]
    side = sides[0 if is_file else 1]
    gone = {key for key in side if key.startswith(tower[not is_file]) and re.search(lacking, key)}
    assert gone
    kept = {key: shape for key, shape in side.items() if key not in gone}
    names = {key: key for key in (*source, *target)}
    if re.fullmatch(r"\\\.\d\\\.", lacking):
        names |= {key: counted_anew(key, int(lacking[2])) for key in kept if key.startswith(tower[not is_file])}
    sides[0 if is_file else 1] = {names[key]: shape for key, shape in kept.items()}
    old = {names[key]: key for key in kept}
    if is_sorted:
        sides[0] = dict(sorted(sides[0].items()))
    applied = {key: match for key, match in infer(sides[0], sides[1]).matches.items() if match.label > Label.AMBIGUOUS}
    for key, match in applied.items():
        wanted = truth[key if is_file else old[key]]
        assert {old[part.source] if is_file else part.source for part in match.parts} == {wanted}, key


def test_what_both_sides_have_is_still_found_next_to_a_weight_that_is_missing():
    source, target, _ = towers(1)
    del source["visual.blocks.2.mlp.fc1.weight"]
    matches = infer(source, target).matches
    assert sum(match.label > Label.AMBIGUOUS for match in matches.values()) == len(target) - 2


def test_attention_without_names_for_its_parts():
    """``attn1`` and ``attn2`` are equal and have different names on the other side: this list is not out of step."""
    inner = linear("q", 8, 8) | linear("out", 8, 8)
    ours = {f"attn{at}.{key}": shape for at in (1, 2) for key, shape in inner.items()}
    theirs = {f"{name}_attn.{key}": shape for name in ("self", "cross") for key, shape in inner.items()}
    matches = infer(stack("a", [ours] * 3), stack("b", [theirs] * 3)).matches
    assert all(match.label > Label.AMBIGUOUS for match in matches.values())


def applied(source: Specs, target: Specs) -> dict[str, list[str]]:
    matches = infer(source, target).matches.items()
    return {key: [part.source for part in match.parts] for key, match in matches if match.label > Label.AMBIGUOUS}


def test_a_layer_without_attention_changes_places_with_no_other():
    """The last layer is complete, but the target's third is not: lists of equal length keep their places."""
    attention: Specs = {f"self_attn.{name}.weight": (8, 8) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    ours = {**attention, "mlp.up_proj.weight": (32, 8), "mlp.down_proj.weight": (8, 32), "input_norm.weight": (8,)}
    theirs: Specs = {"attn.qkv.weight": (24, 8), "attn.proj.weight": (8, 8), "mlp.fc_1.weight": (32, 8)}
    theirs |= {"mlp.fc_2.weight": (8, 32), "norm_1.weight": (8,)}
    target = {key: shape for key, shape in stack("h", [theirs] * 4).items() if not key.startswith("h.2.attn")}
    for key, names in applied(stack("layers", [ours] * 4), target).items():
        assert {name.split(".")[1] for name in names} == {key.split(".")[1]}


def test_words_that_all_names_share_do_not_match_a_head_with_an_embedding():
    layers = stack("model.layers", [linear("mlp.up_proj", 32, 8) | linear("mlp.down_proj", 8, 32)] * 3)
    source = {f"model.{key}": shape for key, shape in stack("h", [linear("a", 32, 8) | linear("b", 8, 32)] * 3).items()}
    source["model.ff_out.weight"] = (50, 8)
    found = applied(source, {"model.embed_tokens.weight": (50, 8), **layers, "lm_head.weight": (50, 8)})
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & found.keys()
    assert found["model.layers.1.mlp.up_proj.weight"] == ["model.h.1.a.weight"]


def test_two_layers_of_which_one_could_be_either_of_two_others_do_not_decide_for_all():
    """Sorted keys do not show whether ``fc_1`` is the gate, and neither does a layer with only one of them."""
    split: Specs = {"mlp.gate_proj.weight": (32, 8), "mlp.up_proj.weight": (32, 8), "n.weight": (8,)}
    numbered: Specs = {"mlp.fc_1.weight": (32, 8), "mlp.fc_2.weight": (32, 8), "m.weight": (8,)}
    ours, theirs = stack("layers", [split] * 4), stack("h", [numbered] * 4)
    del ours["layers.1.mlp.up_proj.weight"]
    assert not any("fc" in key for key in applied(dict(sorted(ours.items())), theirs))


@pytest.mark.parametrize("is_sorted", [False, True], ids=["in the order of definition", "sorted by name"])
def test_a_kernel_of_attention_has_an_axis_for_the_heads(is_sorted):
    """Flax: ``(inputs, heads, size)`` into attention and ``(heads, size, outputs)`` out of it."""
    into: Specs = {"kernel": (32, 4, 8), "bias": (4, 8)}
    layer = {f"attn.{name}.{key}": shape for name in ("query", "key", "value") for key, shape in into.items()}
    layer |= {"attn.out.kernel": (4, 8, 32), "attn.out.bias": (32,), "mlp.Dense_0.kernel": (32, 128)}
    layer |= {"mlp.Dense_0.bias": (128,)}
    source = {f"layer_{at}.{key}": shape for at in range(12) for key, shape in layer.items()}
    attention = {key: shape for name in ("q_proj", "k_proj", "v_proj", "out_proj") for key, shape in
                 linear(f"self_attn.{name}", 32, 32).items()}  # fmt: skip
    target = stack("layers", [attention | linear("fc1", 128, 32)] * 12)
    matches = infer(dict(sorted(source.items())) if is_sorted else source, target).matches
    for at in range(12):
        parts = [matches[f"layers.{at}.self_attn.{name}.weight"].parts[0] for name in ("q_proj", "out_proj")]
        assert [part.source for part in parts] == [f"layer_{at}.attn.{name}.kernel" for name in ("query", "out")]
        assert {(part.view, part.axes) for part in parts} == {((32, 32), (1, 0))}
        assert matches[f"layers.{at}.self_attn.k_proj.bias"].parts[0].source == f"layer_{at}.attn.key.bias"
    back = infer(target, source).matches["layer_11.attn.out.kernel"]
    assert (back.parts[0].axes, back.label) == ((1, 0), Label.LIKELY)


def test_no_layer_moves_to_the_counterpart_of_another_block():
    """Without names, the second norm of a block may be the first norm of the next."""
    block: Specs = {"n.weight": (8,), "scale.weight": (8,), "m.weight": (8,)}
    other: Specs = {"norm1.weight": (8,), "scale1.lambda1": (8,), "norm2.weight": (8,), **linear("down", 8, 32)}
    source, target = stack("x", [block] * 2) | {"n.weight": (8,)}, stack("y", [other] * 2) | {"norm.weight": (8,)}
    for key, names in applied(source, target).items():
        assert [name.split(".")[1] for name in names] == [key.split(".")[1]]


def test_a_counter_is_as_doubtful_as_its_norm():
    statistics: Specs = {"running_mean": (8,), "running_var": (8,), "num_batches_tracked": ()}
    norms = [norm(name) | {f"{name}.{key}": shape for key, shape in statistics.items()} for name in ("bn1", "bn2")]
    source = stack("a", [norms[0] | norms[1]] * 3)
    target = {key.replace("bn", "norm"): shape for key, shape in source.items() if not key.startswith("a.1.bn1")}
    labels = {key: match.label for key, match in infer(source, target).matches.items()}
    assert labels["a.1.norm2.num_batches_tracked"] is labels["a.1.norm2.running_mean"] is Label.AMBIGUOUS


def test_names_that_both_sides_have_are_not_exchanged():
    """Two layers with the same shape in another order, one with an extra axis of size one."""
    layers: dict[str, Specs] = {
        "emb.attn0": {"weight": (3, 2)},
        "emb.conv1": {"weight": (2, 2), "bias": (2,)},
        "emb.attn2": {"weight": (3, 2)},
        "aux.conv0": {"weight": (2, 2), "bias": (2,)},
        "aux.ln1": {"weight": (3,), "bias": (3,)},
        "aux.attn2": {"weight": (4, 3), "bias": (4,)},
    }
    order = ["emb.conv1", "emb.attn2", "emb.attn0", "aux.conv0", "aux.ln1", "aux.attn2"]
    source = {f"{name}.{leaf}": shape for name in layers for leaf, shape in layers[name].items()}
    target = {f"{name}.{leaf}": shape for name in order for leaf, shape in layers[name].items()}
    target["emb.attn2.weight"] = (3, 2, 1)
    matches = infer(source, target).matches
    exchanged = {key for key, match in matches.items() if match.parts[0].source != key}
    assert all(matches[key].label is Label.AMBIGUOUS for key in exchanged)


def test_digits_that_are_not_decimal_ones_are_not_numbers_in_a_sorted_file():
    found = infer({"1²2": (4, 4), "a.10": (2, 2), "²": (3, 3)}, {"1²2": (4, 4), "a.10": (2, 2), "x": (3, 3)})
    assert found.matches["x"].parts[0].source == "²"


@pytest.mark.parametrize("is_fused", [True, False], ids=["the file has it fused", "the target has it fused"])
def test_a_fused_tensor_is_taken_apart_as_a_whole_or_not_at_all(is_fused):
    """Queries and keys of torchtune are ambiguous, and its values are not."""
    apart: Specs = {f"attn.{name}_proj.weight": (8, 8) for name in "qkv"}
    meta = {"tok_embeddings.weight": (50, 8), **stack("layers", [{**apart, **linear("mlp.w2", 8, 32)}] * 3)}
    fused: Specs = {"self_attn.qkv_proj.weight": (24, 8), **linear("mlp.down_proj", 8, 32)}
    other = {"embed_tokens.weight": (50, 8), **stack("layers", [fused] * 3)}
    matches = infer(*((other, meta) if is_fused else (meta, other))).matches
    unclear = {
        key.split(".")[2] for key, match in matches.items() if match.label is Label.AMBIGUOUS and "emb" not in key
    }
    assert unclear == {"attn" if is_fused else "self_attn"}
    assert "mlp" in {key.split(".")[2] for key, match in matches.items() if match.label > Label.AMBIGUOUS}


def test_a_fused_layer_of_the_old_litgpt_has_a_row_of_queries_keys_and_values_for_each_group():
    source = stack("transformer.h", [{"attn.attn.weight": (16, 8), "attn.proj.weight": (8, 8)}] * 3)
    apart: Specs = {"q_proj.weight": (8, 8), "k_proj.weight": (4, 8), "v_proj.weight": (4, 8), "o_proj.weight": (8, 8)}
    target = stack("model.layers", [{f"self_attn.{key}": shape for key, shape in apart.items()}] * 3)
    for sides in ((source, target), (target, source)):
        labels = {key: match.label for key, match in infer(*sides).matches.items()}
        sure = {key.split(".")[-2] for key, label in labels.items() if label > Label.AMBIGUOUS}
        assert sure == {"o_proj" if sides[0] is source else "proj"}
        assert labels.keys() == sides[1].keys()


def test_the_layers_that_merge_patches_have_their_columns_in_another_order_in_mmpretrain():
    merge: Specs = {"downsample.reduction.weight": (16, 32), **norm("downsample.norm", 32)}
    layers = [timm_block(8) | merge, timm_block(16)]
    source, target = stack("stages", layers), stack("layers", layers)
    for sides in ((source, target), (target, source)):
        for key, match in infer(*sides).matches.items():
            assert (match.label is Label.AMBIGUOUS) is ("downsample" in key), key


def test_the_fused_attention_of_codegen_is_not_that_of_others():
    source: Specs = {"attn.qkv_proj.weight": (24, 8), "attn.out_proj.weight": (8, 8), **linear("mlp.fc_in", 32, 8)}
    target = {key: shape for key, shape in source.items() if "qkv" not in key}
    target |= {f"attn.{name}_proj.weight": (8, 8) for name in "kvq"}
    for one, other in ((source, target), (target, source)):
        matches = infer(stack("transformer.h", [one] * 3), stack("transformer.h", [other] * 3)).matches
        fused = {key: match.label for key, match in matches.items() if "qkv" in key + match.parts[0].source}
        assert set(fused.values()) == {Label.AMBIGUOUS}
