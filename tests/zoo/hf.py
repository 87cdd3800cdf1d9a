"""Transformers models with random weights, dropout on, labels given so that they return a loss.

Nothing is downloaded: a config in numbers, no tokenizer. `transformers` is imported when a case is
made. Where a model skips layers or masks frames by a Python random draw, that is switched off (the
shape of the step would change from call to call).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, Sample, Scale

Inputs = Callable[[Any, Scale], dict[str, Tensor]]
Shape = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A transformers model by class name, with its config in two sizes and its inputs."""

    model: str
    inputs: Inputs
    tiny: Shape
    small: Shape
    config: str = ""
    call: Shape = field(default_factory=dict)
    prepare: Callable[[Any], object] = bool

    def build(self, scale: Scale) -> Sample:
        import transformers

        transformers.logging.set_verbosity_error()
        model_class = getattr(transformers, self.model)
        config_class = (
            getattr(transformers, self.config) if self.config else model_class.config_class
        )
        shape = self.tiny if scale == "tiny" else {**self.tiny, **self.small}
        model: nn.Module = model_class(config_class(**shape))
        self.prepare(model)
        return model, ModelLoss(self.call), self.inputs(model.config, scale)


class ModelLoss:
    """The loss that the model computes from its labels; `call` holds arguments that are no data."""

    def __init__(self, call: Shape) -> None:
        self.call = dict(call)

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch, **self.call).loss
        return loss


# --- inputs ---------------------------------------------------------------------------------------

_NO_CACHE = {"use_cache": False}


def _ids(config: Any, scale: Scale) -> Tensor:
    count, length = (2, 16) if scale == "tiny" else (8, 128)
    return torch.randint(3, config.vocab_size, (count, length))


def _causal(config: Any, scale: Scale) -> dict[str, Tensor]:
    ids = _ids(config, scale)
    return {"input_ids": ids, "labels": ids.clone()}


def _padded_causal(config: Any, scale: Scale) -> dict[str, Tensor]:
    batch = _causal(config, scale)
    mask = _padding(batch["input_ids"])
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels}


def _masked_by_ones(config: Any, scale: Scale) -> dict[str, Tensor]:
    batch = _causal(config, scale)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def _padding(ids: Tensor) -> Tensor:
    """Return padding: row i ends i places early (never more than half the row)."""
    count, length = ids.shape
    ends = length - torch.arange(count).clamp(max=length // 2)
    return (torch.arange(length) < ends[:, None]).long()


def _masked(config: Any, scale: Scale) -> dict[str, Tensor]:
    ids = _ids(config, scale)
    hidden = torch.rand(ids.shape) < 0.15
    hidden[:, 1] = True
    return {
        "input_ids": ids.masked_fill(hidden, 2),
        "attention_mask": _padding(ids),
        "labels": ids.masked_fill(~hidden, -100),
    }


def _replaced(config: Any, scale: Scale) -> dict[str, Tensor]:
    """Return Electra's labels: for every token, whether it is a replacement."""
    ids = _ids(config, scale)
    return {"input_ids": ids, "labels": torch.randint(0, 2, ids.shape)}


def _text_class(config: Any, scale: Scale) -> dict[str, Tensor]:
    ids = _ids(config, scale)
    return {
        "input_ids": ids,
        "attention_mask": _padding(ids),
        "labels": torch.randint(0, config.num_labels, (len(ids),)),
    }


def _span(config: Any, scale: Scale) -> dict[str, Tensor]:
    ids = _ids(config, scale)
    ends = torch.randint(0, ids.shape[1], (2, len(ids)))
    return {"input_ids": ids, "start_positions": ends[0], "end_positions": ends[1]}


def _seq2seq(config: Any, scale: Scale) -> dict[str, Tensor]:
    ids = _ids(config, scale)
    labels = torch.randint(3, config.vocab_size, (len(ids), ids.shape[1] // 2))
    return {"input_ids": ids, "attention_mask": _padding(ids), "labels": labels}


def _pictures(tiny: int, small: int, *, many: int = 8) -> Inputs:
    """Return square pictures with a side for each scale, `many` of them at "small", and a class
    for each."""

    def inputs(config: Any, scale: Scale) -> dict[str, Tensor]:
        count, size = (2, tiny) if scale == "tiny" else (many, small)
        return {
            "pixel_values": torch.randn(count, 3, size, size),
            "labels": torch.randint(0, config.num_labels, (count,)),
        }

    return inputs


def _segments(config: Any, scale: Scale) -> dict[str, Tensor]:
    count, size = (2, 32) if scale == "tiny" else (8, 128)
    return {
        "pixel_values": torch.randn(count, 3, size, size),
        "labels": torch.randint(0, config.num_labels, (count, size, size)),
    }


def _speech_text(config: Any, scale: Scale) -> dict[str, Tensor]:
    count, length = (2, 8) if scale == "tiny" else (4, 64)
    frames = 2 * config.max_source_positions
    return {
        "input_features": torch.randn(count, config.num_mel_bins, frames),
        "labels": torch.randint(3, config.vocab_size, (count, length)),
    }


def _speech_class(config: Any, scale: Scale) -> dict[str, Tensor]:
    count, length = (2, 400) if scale == "tiny" else (4, 2000)
    return {
        "input_values": torch.randn(count, length),
        "labels": torch.randint(0, config.num_labels, (count,)),
    }


def _spectrogram_class(config: Any, scale: Scale) -> dict[str, Tensor]:
    count = 2 if scale == "tiny" else 4
    return {
        "input_values": torch.randn(count, config.max_length, config.num_mel_bins),
        "labels": torch.randint(0, config.num_labels, (count,)),
    }


def _pairs(config: Any, scale: Scale) -> dict[str, Tensor]:
    count = 2 if scale == "tiny" else 8
    size, length = config.vision_config.image_size, config.text_config.max_position_embeddings
    ids = torch.randint(3, config.text_config.vocab_size - 1, (count, length))
    ids[:, -1] = config.text_config.eos_token_id
    return {"input_ids": ids, "pixel_values": torch.randn(count, 3, size, size)}


# --- configurations -------------------------------------------------------------------------------

_VOCABULARY = {"vocab_size": 64}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_TEXT = {
    **_VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 160,
}
_TEXT_SMALL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
}
_DECODER = {**_TEXT, **_TOKENS, "num_key_value_heads": 2, "attention_dropout": 0.1}
_DECODER_SMALL = {**_TEXT_SMALL, "num_key_value_heads": 4}
_ENCODER = {**_TEXT, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_PATCHES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "num_labels": 10,
}
_PATCHES_SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "image_size": 64,
    "patch_size": 4,
}
_SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "decoder_start_token_id": 0,
    **_TOKENS,
}
_SEQ2SEQ_SMALL = {
    "vocab_size": 2048,
    "d_model": 256,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 1024,
    "decoder_ffn_dim": 1024,
}
_STAGES = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_labels": 10}
_STAGES_SMALL = {"depths": [2, 2, 2], "hidden_sizes": [64, 128, 256]}
_GPT2 = {
    **_VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 160,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    **_TOKENS,
}
_GPT2_SMALL = {"vocab_size": 2048, "n_embd": 256, "n_layer": 4, "n_head": 8}
_T5 = {
    **_VOCABULARY,
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.1,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_T5_SMALL = {
    "vocab_size": 2048,
    "d_model": 256,
    "d_ff": 1024,
    "d_kv": 32,
    "num_layers": 3,
    "num_heads": 8,
}
_WAVES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 32,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "feat_proj_dropout": 0.1,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "classifier_proj_size": 16,
    "num_labels": 5,
}
_WAVES_SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "conv_dim": [128, 128],
}


def _waves_without_input_gradient(model: Any) -> None:
    """Clear the encoder's flag that asks for a gradient of the sound itself.

    It is set by writing `requires_grad` in the forward pass, which no capture follows, and serves
    the model's own checkpointing only: the parameters' gradients are the same without.
    """
    model.base_model.feature_extractor._requires_grad = False


def _text_model(model: str, inputs: Inputs, **more: Any) -> Recipe:
    return Recipe(model=model, inputs=inputs, tiny={**_ENCODER, **more}, small=_TEXT_SMALL)


def _decoder(model: str, inputs: Inputs = _causal, **more: Any) -> Recipe:
    return Recipe(
        model=model, inputs=inputs, tiny={**_DECODER, **more}, small=_DECODER_SMALL, call=_NO_CACHE
    )


def _patch_model(model: str, **more: Any) -> Recipe:
    tiny = {**_PATCHES, **more}
    return Recipe(model=model, inputs=_pictures(16, 64), tiny=tiny, small=_PATCHES_SMALL)


_RECIPES: dict[str, Recipe] = {
    # These models are used in the tests of every trade.
    "gpt2": Recipe(
        model="GPT2LMHeadModel", inputs=_causal, tiny=_GPT2, small=_GPT2_SMALL, call=_NO_CACHE
    ),
    "llama": _decoder("LlamaForCausalLM"),
    "bert": _text_model("BertForMaskedLM", _masked),
    "t5": Recipe(
        model="T5ForConditionalGeneration",
        inputs=_seq2seq,
        tiny=_T5,
        small=_T5_SMALL,
        call=_NO_CACHE,
    ),
    "vit": _patch_model("ViTForImageClassification"),
    "resnet": Recipe(
        model="ResNetForImageClassification",
        inputs=_pictures(32, 64, many=64),
        tiny={**_STAGES, "embedding_size": 8, "layer_type": "basic"},
        small={**_STAGES_SMALL, "embedding_size": 64},
    ),
    "mixtral": Recipe(
        model="MixtralForCausalLM",
        inputs=_causal,
        tiny={
            **_DECODER,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
            "experts_implementation": "batched_mm",
        },
        # batched_mm copies an expert's weights for every token, so they are small here.
        small={"vocab_size": 1024, "hidden_size": 64, "num_key_value_heads": 4},
        call=_NO_CACHE,
    ),
    # The default: one call for the products of all experts, which torch can trace in bfloat16.
    "olmoe": Recipe(
        model="OlmoeForCausalLM",
        inputs=_causal,
        tiny={**_DECODER, "num_experts": 4, "num_experts_per_tok": 2},
        small={"vocab_size": 1024},
        call=_NO_CACHE,
    ),
    "roberta": _text_model("RobertaForMaskedLM", _masked, pad_token_id=1),
    "bart": Recipe(
        model="BartForConditionalGeneration",
        inputs=_seq2seq,
        tiny={**_SEQ2SEQ, "max_position_embeddings": 160},
        small=_SEQ2SEQ_SMALL,
        call=_NO_CACHE,
    ),
    "swin": Recipe(
        model="SwinForImageClassification",
        inputs=_pictures(32, 64),
        tiny={
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "drop_path_rate": 0.1,
            "num_labels": 10,
        },
        small={"image_size": 64, "embed_dim": 96, "num_heads": [4, 8]},
    ),
    "convnext": Recipe(
        model="ConvNextForImageClassification",
        inputs=_pictures(32, 64, many=48),
        tiny={**_STAGES, "num_stages": 2, "drop_path_rate": 0.1},
        small={**_STAGES_SMALL, "num_stages": 3},
    ),
    "whisper": Recipe(
        model="WhisperForConditionalGeneration",
        inputs=_speech_text,
        tiny={
            **_SEQ2SEQ,
            "num_mel_bins": 16,
            "max_source_positions": 20,
            "max_target_positions": 64,
            "apply_spec_augment": False,
        },
        small={**_SEQ2SEQ_SMALL, "num_mel_bins": 80, "max_source_positions": 200},
        call=_NO_CACHE,
    ),
    "clip": Recipe(
        model="CLIPModel",
        inputs=_pairs,
        tiny={
            "projection_dim": 16,
            "text_config": {
                **_TEXT,
                **_TOKENS,
                "max_position_embeddings": 16,
                "attention_dropout": 0.1,
                "eos_token_id": 63,
            },
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 64,
                "image_size": 16,
                "patch_size": 4,
                "attention_dropout": 0.1,
            },
        },
        small={
            "projection_dim": 128,
            "text_config": {
                **_TEXT,
                **_TEXT_SMALL,
                **_TOKENS,
                "max_position_embeddings": 64,
                "attention_dropout": 0.1,
                "eos_token_id": 2047,
            },
            "vision_config": {
                "hidden_size": 256,
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "intermediate_size": 1024,
                "image_size": 64,
                "patch_size": 4,
                "attention_dropout": 0.1,
            },
        },
        call={"return_loss": True},
    ),
    "mamba": Recipe(
        model="MambaForCausalLM",
        inputs=_causal,
        tiny={
            **_VOCABULARY,
            **_TOKENS,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "state_size": 4,
            "expand": 2,
            "conv_kernel": 4,
            "time_step_rank": 2,
        },
        small={"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 8},
        call=_NO_CACHE,
    ),
    # The same models with other options.
    "gpt2_eager_attention": Recipe(
        model="GPT2LMHeadModel",
        inputs=_padded_causal,
        tiny={**_GPT2, "attn_implementation": "eager"},
        small=_GPT2_SMALL,
        call=_NO_CACHE,
    ),
    "llama_padded": _decoder("LlamaForCausalLM", _padded_causal),
    # The default configuration: several heads share one key, and there is no dropout.
    "llama_default": replace(_decoder("LlamaForCausalLM", attention_dropout=0.0), call={}),
    "llama_mask_of_ones": _decoder("LlamaForCausalLM", _masked_by_ones, attention_dropout=0.0),
    "bert_class": _text_model("BertForSequenceClassification", _text_class, num_labels=3),
    "bert_span": _text_model("BertForQuestionAnswering", _span),
    "resnet_bottleneck": Recipe(
        model="ResNetForImageClassification",
        inputs=_pictures(32, 64, many=128),
        tiny={**_STAGES, "embedding_size": 8, "layer_type": "bottleneck"},
        small={**_STAGES_SMALL, "embedding_size": 64},
    ),
    # Further, less common models.
    "gemma2": _decoder("Gemma2ForCausalLM", head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "gemma3": Recipe(
        model="Gemma3ForCausalLM",
        config="Gemma3TextConfig",
        inputs=_causal,
        tiny={
            **_DECODER,
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        small={
            **_DECODER_SMALL,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        call=_NO_CACHE,
    ),
    "qwen2": _decoder("Qwen2ForCausalLM"),
    "qwen3": _decoder("Qwen3ForCausalLM", head_dim=8),
    "mistral": _decoder("MistralForCausalLM", sliding_window=8),
    "olmo2": _decoder("Olmo2ForCausalLM"),
    "phi": _decoder("PhiForCausalLM", resid_pdrop=0.1, embd_pdrop=0.1),
    "phi3": _decoder("Phi3ForCausalLM", resid_pdrop=0.1, embd_pdrop=0.1),
    "stablelm": _decoder("StableLmForCausalLM"),
    "starcoder2": _decoder("Starcoder2ForCausalLM", residual_dropout=0.1, embedding_dropout=0.1),
    "gpt_neox": _decoder("GPTNeoXForCausalLM", hidden_dropout=0.1),
    "falcon": Recipe(
        model="FalconForCausalLM",
        inputs=_causal,
        tiny={
            **_VOCABULARY,
            **_TOKENS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
        },
        small={
            "vocab_size": 2048,
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
        },
        call=_NO_CACHE,
    ),
    "bloom": Recipe(
        model="BloomForCausalLM",
        inputs=_causal,
        tiny={
            **_VOCABULARY,
            **_TOKENS,
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 4,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
        },
        small={"vocab_size": 2048, "hidden_size": 256, "n_layer": 4, "n_head": 8},
        call=_NO_CACHE,
    ),
    "opt": Recipe(
        model="OPTForCausalLM",
        inputs=_causal,
        tiny={
            **_VOCABULARY,
            **_TOKENS,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 160,
            "dropout": 0.1,
            "attention_dropout": 0.1,
            "layerdrop": 0.0,
        },
        small={
            "vocab_size": 2048,
            "hidden_size": 256,
            "word_embed_proj_dim": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "ffn_dim": 1024,
        },
        call=_NO_CACHE,
    ),
    "qwen3_moe": Recipe(
        model="Qwen3MoeForCausalLM",
        inputs=_causal,
        tiny={
            **_DECODER,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "output_router_logits": True,
            "experts_implementation": "batched_mm",
        },
        small={"vocab_size": 1024, "hidden_size": 64, "num_key_value_heads": 4},
        call=_NO_CACHE,
    ),
    "mamba2": Recipe(
        model="Mamba2ForCausalLM",
        inputs=_causal,
        tiny={
            **_VOCABULARY,
            **_TOKENS,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "state_size": 8,
            "expand": 2,
            "head_dim": 8,
            "num_heads": 4,
            "n_groups": 1,
            "chunk_size": 8,
        },
        small={
            "vocab_size": 1024,
            "hidden_size": 128,
            "num_hidden_layers": 6,
            "state_size": 16,
            "head_dim": 32,
            "num_heads": 8,
            "chunk_size": 32,
        },
        call=_NO_CACHE,
    ),
    "distilbert": Recipe(
        model="DistilBertForMaskedLM",
        inputs=_masked,
        tiny={
            **_VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 160,
            "dropout": 0.1,
            "attention_dropout": 0.1,
        },
        small={"vocab_size": 2048, "dim": 256, "n_layers": 4, "n_heads": 8, "hidden_dim": 1024},
    ),
    "deberta_v2": _text_model(
        "DebertaV2ForMaskedLM",
        _masked,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        legacy=False,
    ),
    "electra": _text_model("ElectraForPreTraining", _replaced, embedding_size=16),
    "albert": _text_model("AlbertForMaskedLM", _masked, embedding_size=16),
    "mpnet": _text_model("MPNetForMaskedLM", _masked, pad_token_id=1),
    "modernbert": _text_model(
        "ModernBertForMaskedLM",
        _masked,
        mlp_dropout=0.1,
        attention_dropout=0.1,
        embedding_dropout=0.1,
        local_attention=8,
        global_attn_every_n_layers=2,
        **_TOKENS,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "fnet": _text_model("FNetForMaskedLM", _causal),
    "pegasus": Recipe(
        model="PegasusForConditionalGeneration",
        inputs=_seq2seq,
        tiny={**_SEQ2SEQ, "max_position_embeddings": 160},
        small=_SEQ2SEQ_SMALL,
        call=_NO_CACHE,
    ),
    "beit": _patch_model(
        "BeitForImageClassification",
        use_relative_position_bias=True,
        layer_scale_init_value=0.1,
        drop_path_rate=0.1,
    ),
    "deit": _patch_model("DeiTForImageClassification"),
    "dinov2": Recipe(
        model="Dinov2ForImageClassification",
        inputs=_pictures(16, 64),
        tiny={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "mlp_ratio": 2,
            "image_size": 16,
            "patch_size": 4,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "drop_path_rate": 0.1,
            "num_labels": 10,
        },
        small={
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "mlp_ratio": 4,
            "image_size": 64,
        },
    ),
    "swinv2": Recipe(
        model="Swinv2ForImageClassification",
        inputs=_pictures(32, 64),
        tiny={
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "drop_path_rate": 0.1,
            "num_labels": 10,
        },
        small={"image_size": 64, "embed_dim": 96, "num_heads": [4, 8]},
    ),
    "segformer": Recipe(
        model="SegformerForSemanticSegmentation",
        inputs=_segments,
        tiny={
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "num_labels": 4,
        },
        small={"hidden_sizes": [64, 128], "depths": [2, 2], "decoder_hidden_size": 128},
    ),
    "mobilenet_v2": Recipe(
        model="MobileNetV2ForImageClassification",
        inputs=_pictures(32, 64, many=40),
        tiny={
            "depth_multiplier": 0.25,
            "image_size": 32,
            "classifier_dropout_prob": 0.1,
            "num_labels": 10,
        },
        small={"depth_multiplier": 1.0, "image_size": 64},
    ),
    "efficientnet": Recipe(
        model="EfficientNetForImageClassification",
        inputs=_pictures(32, 64, many=16),
        tiny={
            "image_size": 32,
            "width_coefficient": 0.25,
            "depth_coefficient": 0.5,
            "hidden_dim": 320,
            "dropout_rate": 0.1,
            "num_labels": 10,
        },
        small={
            "image_size": 64,
            "width_coefficient": 1.0,
            "depth_coefficient": 1.0,
            "hidden_dim": 1280,
        },
    ),
    "regnet": Recipe(
        model="RegNetForImageClassification",
        inputs=_pictures(32, 64, many=80),
        tiny={**_STAGES, "embedding_size": 8, "groups_width": 4, "layer_type": "y"},
        small={**_STAGES_SMALL, "embedding_size": 32, "groups_width": 16},
    ),
    "poolformer": Recipe(
        model="PoolFormerForImageClassification",
        inputs=_pictures(32, 64, many=64),
        tiny={
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "num_encoder_blocks": 2,
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "padding": [2, 1],
            "drop_path_rate": 0.1,
            "num_labels": 10,
        },
        small={"depths": [2, 2], "hidden_sizes": [64, 128]},
    ),
    "wav2vec2_class": Recipe(
        model="Wav2Vec2ForSequenceClassification",
        inputs=_speech_class,
        tiny=_WAVES,
        small=_WAVES_SMALL,
        prepare=_waves_without_input_gradient,
    ),
    "hubert_class": Recipe(
        model="HubertForSequenceClassification",
        inputs=_speech_class,
        tiny=_WAVES,
        small=_WAVES_SMALL,
        prepare=_waves_without_input_gradient,
    ),
    "audio_spectrogram": Recipe(
        model="ASTForAudioClassification",
        inputs=_spectrogram_class,
        tiny={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 16,
            "num_mel_bins": 16,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "num_labels": 5,
        },
        small={
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "intermediate_size": 1024,
            "max_length": 64,
            "num_mel_bins": 64,
        },
    ),
}

CASES = tuple(Case(name=f"hf_{name}", build=recipe.build) for name, recipe in _RECIPES.items())

REFUSED = (
    Case(
        name="refused_hf_wav2vec2_as_it_comes",
        build=replace(_RECIPES["wav2vec2_class"], prepare=bool).build,
        note="the forward pass writes requires_grad of a tensor",
        scales=("tiny",),
    ),
)
