"""Transformers for language, and those of the library transformers: their configuration, read off the shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from re import escape
from textwrap import wrap
from typing import Any

from ckptfix.zoo.drafting.known import Shapes
from ckptfix.zoo.drafting.likeness import Confidence, Likeness
from ckptfix.zoo.drafting.shapes import find, matrix

_HEAD_WIDTH = 64
"""The width of one attention head in nearly all models of these families; shapes do not tell it."""


def _at(shapes: Shapes, ending: str) -> tuple[str, tuple[int, int]] | None:
    """The path in front of a matrix whose name ends so, and its shape."""
    found = (key for key in shapes if key == ending or key.endswith(f".{ending}"))
    matrices = ((key.removesuffix(ending), matrix(shapes, key)) for key in found)
    return next(((path, shape) for path, shape in matrices if shape is not None), None)


def _built(
    title: str, evidence: Sequence[str], model: str, config: str, settings: Mapping[str, Any], guessed: str = ""
) -> Likeness:
    """A model of transformers, whose factory takes a configuration: a function of one's own makes both."""
    arguments = wrap(", ".join(f"{name}={value!r}" for name, value in settings.items()), 80)
    code = (
        f"from transformers import {', '.join(sorted((config, model)))}",
        "",
        "def build():",
        f"    config = {config}(",
        *(f"        {line}" for line in arguments),
        "    )",
        f"    return {model}(config)",
    )
    lines = (*evidence, *((f"shapes do not tell {guessed}",) if guessed else ()))
    return Likeness(title, Confidence.LIKELY, lines, "zoo_models:build", code=code, needs="transformers")


def _bert(shapes: Shapes) -> Likeness | None:
    words = _at(shapes, "embeddings.word_embeddings.weight")
    if words is None:
        return None
    path, (vocabulary, width) = words[0], words[1]
    layers = len(find(shapes, rf"{escape(path)}encoder\.layer\.(\d+)\.attention\.self\.query\.weight"))
    inner = matrix(shapes, f"{path}encoder.layer.0.intermediate.dense.weight")
    positions = matrix(shapes, f"{path}embeddings.position_embeddings.weight")
    kinds = matrix(shapes, f"{path}embeddings.token_type_embeddings.weight")
    if not layers or inner is None or positions is None or kinds is None or inner[1] != width:
        return _distilbert(shapes, path, vocabulary, width, positions)
    family = "Roberta" if kinds[0] == 1 or path.startswith("roberta") else "Bert"
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(width // _HEAD_WIDTH, 1),
        "intermediate_size": inner[0],
        "max_position_embeddings": positions[0],
        "type_vocab_size": kinds[0],
    }
    if family == "Bert" and "cls.seq_relationship.weight" in shapes:
        model = "BertForPreTraining"
    else:
        model, settings = _task(shapes, family, settings)
    size = {(768, 12): "-base", (1024, 24): "-large"}.get((width, layers), "")
    evidence = [f"{layers} layers of width {width}, a vocabulary of {vocabulary}, {positions[0]} positions"]
    return _built(f"{family}{size}", evidence, model, f"{family}Config", settings, _heads(width))


def _distilbert(
    shapes: Shapes, path: str, vocabulary: int, width: int, positions: tuple[int, int] | None
) -> Likeness | None:
    layers = len(find(shapes, rf"{escape(path)}transformer\.layer\.(\d+)\.attention\.q_lin\.weight"))
    inner = matrix(shapes, f"{path}transformer.layer.0.ffn.lin1.weight")
    if not layers or inner is None or positions is None:
        return None
    settings = {
        "vocab_size": vocabulary,
        "dim": width,
        "n_layers": layers,
        "n_heads": max(width // _HEAD_WIDTH, 1),
        "hidden_dim": inner[0],
        "max_position_embeddings": positions[0],
    }
    model, settings = _task(shapes, "DistilBert", settings)
    evidence = [f"{layers} layers of width {width}, a vocabulary of {vocabulary}"]
    return _built("DistilBert", evidence, model, "DistilBertConfig", settings, _heads(width))


def _task(shapes: Shapes, family: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The class of transformers for a head, and the settings with its number of labels."""
    if any(key.startswith(("cls.predictions", "lm_head.", "vocab_transform")) for key in shapes):
        return f"{family}ForMaskedLM", dict(settings)
    if "qa_outputs.weight" in shapes:
        return f"{family}ForQuestionAnswering", dict(settings)
    head = matrix(shapes, "classifier.weight") or matrix(shapes, "classifier.out_proj.weight")
    if head is not None:
        has_pooler = any(".pooler." in key or key.startswith("pooler.") for key in shapes)
        sentences = has_pooler or "pre_classifier.weight" in shapes or "classifier.out_proj.weight" in shapes
        task = "Sequence" if sentences else "Token"
        return f"{family}For{task}Classification", {**settings, "num_labels": head[0]}
    return f"{family}Model", dict(settings)


def _gpt2(shapes: Shapes) -> Likeness | None:
    words = _at(shapes, "wte.weight")
    if words is None:
        return None
    path, (vocabulary, width) = words[0], words[1]
    layers = len(find(shapes, rf"{escape(path)}h\.(\d+)\.attn\.c_attn\.weight"))
    positions, attention = matrix(shapes, f"{path}wpe.weight"), matrix(shapes, f"{path}h.0.attn.c_attn.weight")
    if not layers or positions is None or attention is None:
        return None
    size = {(768, 12): "", (1024, 24): " medium", (1280, 36): " large", (1600, 48): " xl"}.get((width, layers), "")
    evidence = [f"{layers} layers of width {width}, a vocabulary of {vocabulary}, {positions[0]} positions"]
    if attention == (3 * width, width):
        evidence.append("its matrices stand as nn.Linear has them: nanoGPT's model and not that of transformers")
        return Likeness(f"GPT-2{size} of nanoGPT", Confidence.LIKELY, tuple(evidence), "model:GPT")
    settings = {
        "vocab_size": vocabulary,
        "n_positions": positions[0],
        "n_embd": width,
        "n_layer": layers,
        "n_head": max(width // _HEAD_WIDTH, 1),
    }
    model = "GPT2LMHeadModel" if "lm_head.weight" in shapes or path else "GPT2Model"
    return _built(f"GPT-2{size}", evidence, model, "GPT2Config", settings, _heads(width))


def _llama(shapes: Shapes) -> Likeness | None:
    meta = matrix(shapes, "layers.0.attention.wq.weight")
    if meta is not None and "tok_embeddings.weight" in shapes:
        layers = len(find(shapes, r"layers\.(\d+)\.attention\.wq\.weight"))
        told = f"names of Meta's own release; {layers} layers of width {meta[1]}"
        return Likeness("LLaMA as Meta released it", Confidence.LIKELY, (told,))
    words = _at(shapes, "embed_tokens.weight")
    if words is None:
        return None
    path, (vocabulary, width) = words[0], words[1]
    first = f"{path}layers.0."
    query, key = matrix(shapes, f"{first}self_attn.q_proj.weight"), matrix(shapes, f"{first}self_attn.k_proj.weight")
    inner = matrix(shapes, f"{first}mlp.gate_proj.weight")
    layers = len(find(shapes, rf"{escape(path)}layers\.(\d+)\.self_attn\.q_proj\.weight"))
    if query is None or key is None or not layers:
        return None
    if inner is None:
        return _experts(shapes, path, layers, width)
    norm = shapes.get(f"{first}self_attn.q_norm.weight")
    has_bias = f"{first}self_attn.q_proj.bias" in shapes
    family = "Qwen3" if norm else "Qwen2" if has_bias else "Llama"
    head = norm[0] if norm else _HEAD_WIDTH if width < 2048 else 128
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(query[0] // head, 1),
        "num_key_value_heads": max(key[0] // head, 1),
        "intermediate_size": inner[0],
    }
    if norm:
        settings["head_dim"] = head
    if "lm_head.weight" not in shapes:
        settings["tie_word_embeddings"] = True
    evidence = [
        f"{layers} layers of width {width} (inner {inner[0]}), a vocabulary of {vocabulary}",
        f"keys and values of width {key[0]} against queries of {query[0]}",
    ]
    if family == "Llama":
        evidence.append("Mistral and others are built alike: only their configuration tells them apart")
    guessed = "" if norm else f"the number of heads (taken: {head} wide)"
    return _built(family, evidence, f"{family}ForCausalLM", f"{family}Config", settings, guessed)


def _experts(shapes: Shapes, path: str, layers: int, width: int) -> Likeness | None:
    """A mixture of experts, which every family builds in its own way."""
    if not any(f"{path}layers.0." in key and "experts" in key for key in shapes):
        return None
    evidence = (f"{layers} layers of width {width} with experts: config.json says of which family",)
    return Likeness("mixture of experts", Confidence.GUESS, evidence)


def _t5(shapes: Shapes) -> Likeness | None:
    shared = matrix(shapes, "shared.weight")
    query = matrix(shapes, "encoder.block.0.layer.0.SelfAttention.q.weight")
    bias = matrix(shapes, "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
    if shared is None or query is None or bias is None:
        return None
    inner = matrix(shapes, "encoder.block.0.layer.1.DenseReluDense.wi.weight")
    gated = matrix(shapes, "encoder.block.0.layer.1.DenseReluDense.wi_0.weight")
    layers = len(find(shapes, r"encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.q\.weight"))
    below = len(find(shapes, r"decoder\.block\.(\d+)\.layer\.0\.SelfAttention\.q\.weight"))
    settings: dict[str, Any] = {
        "vocab_size": shared[0],
        "d_model": shared[1],
        "d_kv": query[0] // max(bias[1], 1),
        "d_ff": (gated or inner or query)[0],
        "num_layers": layers,
        "num_heads": bias[1],
    }
    if below:
        settings["num_decoder_layers"] = below
    if gated:
        settings |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": "lm_head.weight" not in shapes}
    evidence = [f"{layers} and {below} layers of width {shared[1]}, {bias[1]} heads, a vocabulary of {shared[0]}"]
    model = "T5ForConditionalGeneration" if below else "T5EncoderModel"
    return _built("T5", evidence, model, "T5Config", settings)


def _gpt_neox(shapes: Shapes) -> Likeness | None:
    words = _at(shapes, "embed_in.weight")
    if words is None:
        return None
    path, (vocabulary, width) = words[0], words[1]
    layers = len(find(shapes, rf"{escape(path)}layers\.(\d+)\.attention\.query_key_value\.weight"))
    inner = matrix(shapes, f"{path}layers.0.mlp.dense_h_to_4h.weight")
    if not layers or inner is None:
        return None
    settings = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(width // _HEAD_WIDTH, 1),
        "intermediate_size": inner[0],
    }
    evidence = [f"{layers} layers of width {width}, a vocabulary of {vocabulary}: GPT-NeoX, as Pythia has it"]
    return _built("GPT-NeoX", evidence, "GPTNeoXForCausalLM", "GPTNeoXConfig", settings, _heads(width))


def _heads(width: int) -> str:
    return f"the number of heads (taken: {_HEAD_WIDTH} wide, so {max(width // _HEAD_WIDTH, 1)})"


LANGUAGE: tuple[Callable[[Shapes], Likeness | None], ...] = (_bert, _gpt2, _llama, _t5, _gpt_neox)
