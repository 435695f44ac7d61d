"""Convert a Transformer to Hugging Face's transformers: MarianMTModel for post-norm, Pegasus for pre-norm.

Both store the sines of the positions in the first half of d_model and the cosines in the second; qkv alternates them.
All weights that read or write the residual stream are therefore permuted. Biases that qkv does not have are zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor, nn

from qkv.core.errors import UsageError
from qkv.core.tokenizer import BOS, EOS, PAD, SPECIALS, Tokenizer, TokenizerPair
from qkv.core.transformer import Transformer, TransformerLayer
from qkv.data.subwords import unique_names
from qkv.interop import (
    LinearWeights,
    attention_projections,
    check_supported,
    import_optional,
    length_penalty_exponent,
    max_output_length,
)
from qkv.options import Config, TransformerConfig

UNUSED_SCORE = -1e6  # unigram score of special tokens: no text is split into them
POSITIONS = 1024  # smallest table of positions; transformers computes it when the weights are loaded
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "positions": ("sinusoidal",),  # transformers does not save a position table with the weights
    "activation": ("relu", "gelu"),
    "attention": ("scaled", "dot", "general"),
    "rms_norm": (False,),
    "window": (0,),
    "kind": ("transformer",),
    "norm": ("post", "pre"),
    "bias": (False, True),
}
PROGRAM = """\
import transformers

folder = "."  # the folder of this file
source = transformers.AutoTokenizer.from_pretrained(folder)
target = {target}
model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
texts = source(["First sentence.", "And another."], return_tensors="pt", padding=True)
print(*target.batch_decode(model.generate(**texts), skip_special_tokens=True), sep="\\n")
"""


def to_huggingface(model: Transformer, *, max_positions: int = POSITIONS) -> Any:
    """Return a transformers model with a copy of these weights, on the CPU.

    Its generation config has the rules of qkv's search: never <pad> or <s>, and </s> at the length limit.
    """
    spec = model.config
    tie = {"tie": ("all",)} if spec.norm == "pre" else {}  # Pegasus has one matrix
    check_supported(spec, "transformers", SUPPORTED | tie)
    for name, width in (("d_k", spec.key_width), ("d_v", spec.value_width)):
        if width * spec.heads != spec.d_model:
            raise UsageError(f"model.{name} = {width}: transformers supports only d_model / heads")
    target = _empty_model(spec, len(model.source.tokens.weight), len(model.target.tokens.weight), max_positions)
    initial = target.state_dict()
    kept = {name: tensor for name, tensor in initial.items() if name.endswith(("positions.weight", "_bias"))}
    target.load_state_dict(kept | dict(_renamed_weights(model)))
    target.generation_config.update(suppress_tokens=[PAD, BOS], forced_eos_token_id=EOS)
    return target.eval()


def write_folder(model: Transformer, tokenizers: TokenizerPair, config: Config, folder: Path, tag: str) -> str:
    """Write model and tokenizers for `from_pretrained`, with the run's search options; return the README's program."""
    search, longest = config.decode, max_output_length(config)
    positions = max(POSITIONS, longest + 1)  # sources are not longer than outputs
    target_model = to_huggingface(model, max_positions=positions)
    penalty = {"length_penalty": length_penalty_exponent(search)} if search.beam > 1 else {}
    target_model.generation_config.update(num_beams=search.beam, max_new_tokens=longest, **penalty)
    logging = import_optional("transformers").utils.logging
    bar_was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    target_model.save_pretrained(folder)
    if bar_was_enabled:
        logging.enable_progress_bar()
    write_tokenizer(tokenizers.src, folder, positions, tag)
    target = "source"
    if not tokenizers.shared:
        write_tokenizer(tokenizers.tgt, folder / "target", positions)
        target = 'transformers.AutoTokenizer.from_pretrained(folder, subfolder="target")'
    return PROGRAM.format(target=target)


def library_tokenizer(tokenizer: Tokenizer, tag: str = "") -> tokenizers.Tokenizer:
    """Convert a tokenizer to the `tokenizers` library: the same ids and the same text.

    Encoding adds the language tag, if one is named, before the ids and </s> after them.
    """
    model: tokenizers.models.Model
    special = tokenizer.special_names
    if tokenizer.kind == "unigram":
        unused = [(name, UNUSED_SCORE) for name in special]
        model = tokenizers.models.Unigram([*unused, *zip(tokenizer.index, tokenizer.scores, strict=True)])
    else:  # without merges, a word that is not in the vocabulary is written in bytes
        ids = {name: number for number, name in enumerate(unique_names(tokenizer))}
        model = tokenizers.models.BPE(ids, list(tokenizer.merges), ignore_merges=tokenizer.kind != "bpe")
    library = tokenizers.Tokenizer(model)
    library.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFC(), tokenizers.normalizers.Prepend(" ")]
    )
    library.pre_tokenizer = tokenizer.library.pre_tokenizer
    library.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteLevel(), tokenizers.decoders.Strip(" ", 1, 0)]
    )
    before = [special[tokenizer.tag(tag)]] if tag else []
    around = [(name, special.index(name)) for name in (*before, SPECIALS[EOS])]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=" ".join([*before, "$A", SPECIALS[EOS]]), special_tokens=around
    )
    return library


def write_tokenizer(tokenizer: Tokenizer, folder: Path, positions: int, tag: str = "") -> None:
    """Write one side's tokenizer for AutoTokenizer; the name of a special token in a text is encoded as text."""
    pad, bos, eos = SPECIALS
    target = import_optional("transformers").PreTrainedTokenizerFast(
        tokenizer_object=library_tokenizer(tokenizer, tag),
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        model_max_length=positions,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    target.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that versions 4 and 5 both accept
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _empty_model(spec: TransformerConfig, src_vocab: int, tgt_vocab: int, max_positions: int) -> Any:
    transformers = import_optional("transformers")
    shape = {
        "vocab_size": src_vocab,
        "d_model": spec.d_model,
        "encoder_layers": spec.encoder_layers,
        "decoder_layers": spec.decoder_layers,
        "encoder_ffn_dim": spec.d_ff,
        "decoder_ffn_dim": spec.d_ff,
        "encoder_attention_heads": spec.heads,
        "decoder_attention_heads": spec.heads,
        "activation_function": spec.activation,
        "dropout": spec.dropout,
        "max_position_embeddings": max_positions,
        "scale_embedding": True,
        "tie_word_embeddings": spec.tie != "none",
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "decoder_start_token_id": BOS,
        "eos_token_id": EOS,
        "forced_eos_token_id": EOS,
    }
    if spec.norm == "pre":
        return transformers.PegasusForConditionalGeneration(transformers.PegasusConfig(**shape))
    vocabularies = {"share_encoder_decoder_embeddings": spec.tie == "all", "decoder_vocab_size": tgt_vocab}
    return transformers.MarianMTModel(transformers.MarianConfig(**shape, **vocabularies))


def _renamed_weights(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights, permuted, under the names of transformers."""
    d_model = model.config.d_model
    order = torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])  # sines, then cosines
    source, target = (side.tokens.weight.detach().cpu()[:, order] for side in (model.source, model.target))
    if model.config.tie == "all":
        yield "model.shared.weight", target
    yield "model.encoder.embed_tokens.weight", source
    yield "model.decoder.embed_tokens.weight", target
    yield "lm_head.weight", model.output.weight.detach().cpu()[:, order]
    for stack in ("encoder", "decoder"):
        for i, layer in enumerate(getattr(model, stack)):
            for name, tensor in _layer(layer, order):
                yield f"model.{stack}.layers.{i}.{name}", tensor
        final = getattr(model, f"{stack}_norm")
        if isinstance(final, nn.LayerNorm):
            yield from _norm(f"model.{stack}.layer_norm", final, order)


def _layer(layer: TransformerLayer, order: Tensor) -> Iterator[tuple[str, Tensor]]:
    attentions = {"self_attn": layer.attention}
    if layer.cross_attention is not None:
        attentions["encoder_attn"] = layer.cross_attention
    for name, attention in attentions.items():
        *inputs, output = attention_projections(attention)
        for part, linear in zip("qkv", inputs, strict=True):
            yield from _linear(f"{name}.{part}_proj", linear, order, reads=True)
        yield from _linear(f"{name}.out_proj", output, order, reads=False)
    yield from _linear("fc1", LinearWeights.of(layer.feed_forward.inner), order, reads=True)
    yield from _linear("fc2", LinearWeights.of(layer.feed_forward.outer), order, reads=False)
    for name, residual in zip([*attentions, "final"], layer.residuals, strict=True):
        yield from _norm(f"{name}_layer_norm", residual.norm, order)  # type: ignore[arg-type]


def _linear(name: str, linear: LinearWeights, order: Tensor, *, reads: bool) -> Iterator[tuple[str, Tensor]]:
    """Permute the columns of a layer that reads the residual stream, the rows of a layer that writes it."""
    weight = linear.weight.cpu()
    bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.cpu()
    yield f"{name}.weight", weight[:, order] if reads else weight[order]
    yield f"{name}.bias", bias if reads else bias[order]


def _norm(name: str, norm: nn.LayerNorm, order: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", norm.weight.detach().cpu()[order]
    yield f"{name}.bias", norm.bias.detach().cpu()[order]
