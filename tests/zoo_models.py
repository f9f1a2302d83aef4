"""The models of the zoo (``zoo.py``): every language model of transformers, tiny, with random weights, and its inputs.

A configuration is made tiny by rules on the names of its fields (``_RULES``); ``_FIELDS`` mends what they leave wrong.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ")
# A prime number, so that its multiples tell a vocabulary.
VOCAB, HIDDEN, HEADS, LAYERS, LENGTH, BATCH = 1031, 64, 4, 2, 16, 2


def classes() -> dict[str, str]:
    """The names of the classes, each with the model type that is mapped to it."""
    found: dict[str, str] = {}
    for task in TASKS:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, model_type)
    return found


# --- a tiny configuration -------------------------------------------------------------------------------------

# The first pattern that a field's whole name matches says what becomes of its value.
_RULES: tuple[tuple[str, Any], ...] = (
    (r".*(drop|jitter|mask_time_prob|mask_feature_prob).*", lambda v: 0.0 if isinstance(v, float) else v),
    (r".*vocab(ulary)?_size.*|.*_vocab|codebook_size", lambda v: VOCAB if v else v),
    (r".*layer_period|attn_every_n_layers", lambda v: 2),
    (r".*layer_offset", lambda v: 1),
    (r"n_group|topk_group|num_expert_group|.*n_?groups|n_shared_experts|first_k_dense_replace", lambda v: min(v, 1)),
    (r"num_experts_per.*|.*top_?k.*|moe_k|num_selected_experts", lambda v: min(v, 2)),
    (r".*num_.*experts|.*n_.*experts|num_local_experts|zero_expert_num", lambda v: min(v, 4)),
    (r"(num_)?(hidden_layers|n_layers?|layers)|n_layer|.*depth|.*_layers|num_blocks", lambda v: min(v, LAYERS)),
    (r".*kv_(n_)?heads.*|.*key_value_heads|n_head_kv|num_query_groups|multi_query_group_num", lambda v: min(v, 2)),
    (r".*(num|n)_.*heads?|n_heads?|num_heads|.*attention_heads", lambda v: min(v, HEADS)),
    (r"(.*_)?head_dim|head_size|d_kv|d_head|.*headdim|attention_head_size", lambda v: HIDDEN // HEADS),
    (r"rotary_dim", lambda v: 8),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|dim_ff|dff|n_inner|d_inner|_inner_dim).*",
     lambda v: 2 * HIDDEN),
    (r"(.*_)?(hidden_size|d_model|n_embd|n_embed|embedding_size|dim|width)", lambda v: HIDDEN),
    (r".*lora_rank|.*rank", lambda v: min(v, 16)),
    (r"base_channels|num_filters", lambda v: min(v, 32)),
    (r"image_size", lambda v: 32),
    (r"patch_size", lambda v: 8),
)  # fmt: skip

# What the rules leave wrong, by the name of a configuration's class; a dot goes down into a dictionary. None of a
# field that the model needs is what a checkpoint's own file would say.
_MROPE = {"rope_parameters.mrope_section": [2, 3, 3]}
_QUERIES = {"num_query_tokens": 4, "image_token_index": 7, "video_token_index": 7}
_FIELDS: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "Blip2Config": _QUERIES,
    "BltConfig": {"encoder_hash_byte_group_vocab": 64, "use_cache": False},
    "BltGlobalTransformerConfig": {"hidden_size": 2 * HIDDEN, "head_dim": 32},
    "BltLocalDecoderConfig": {"hidden_size_global": 2 * HIDDEN},
    "BltLocalEncoderConfig": {"hidden_size_global": 2 * HIDDEN},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 5}},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0},
    "DeepseekOcr2TextConfig": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
                               "mlp_layer_types": ["dense", "sparse"]},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "DiffusionGemmaConfig": {"canvas_length": LENGTH},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Emu3Config": {"vocabulary_map": {"<image>": 5}},
    "Ernie4_5_VLMoeTextConfig": {"rope_parameters.mrope_section": [3, 3, 2]},
    "EsmConfig": {"vocab_size": VOCAB, "pad_token_id": 1},
    "FalconH1Config": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "FunnelConfig": {"block_sizes": (1, 1), "block_repeats": [1, 1]},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0, "intermediate_size": [2 * HIDDEN] * 2},
    "Glm4vMoeTextConfig": {"rope_parameters.mrope_section": [1, 1, 2]},
    "Glm4vTextConfig": _MROPE,
    "GlmOcrTextConfig": _MROPE,
    "Granite4VisionConfig": {"deepstack_layer_map": [], "spatial_target_layers": [], "downsample_rate": "1/2"},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8,
                               "mamba_d_head": 16},
    "HrmTextConfig": {"num_hidden_layers": 16, "use_cache": False},
    "HunYuanVLTextConfig": {"rope_parameters.mrope_section": [2, 2, 2, 2]},
    "InstructBlipConfig": _QUERIES,
    "InstructBlipVideoConfig": _QUERIES,
    "Kosmos2Config": {"latent_query_num": 4},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"num_heads": 8, "n_groups": 1},
    "MimiConfig": {"codebook_size": 64, "num_semantic_quantizers": 1, "upsample_groups": HIDDEN},
    "MobileBertConfig": {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "MoonshineConfig": {"encoder_num_key_value_heads": HEADS, "decoder_num_key_value_heads": HEADS},
    "MoonshineStreamingConfig": {"num_key_value_heads": HEADS},
    "PaddleOCRTextConfig": _MROPE,
    "PerceiverConfig": {"num_latents": 8, "d_latents": HIDDEN, "num_self_attends_per_block": 2,
                        "max_position_embeddings": LENGTH},
    "Qwen2_5_VLTextConfig": _MROPE,
    "Qwen2_5OmniTextConfig": _MROPE,
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 8},
    "Qwen2VLTextConfig": _MROPE,
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": HIDDEN},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 8},
    "Qwen4ExpTextConfig": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
                           "indexer_compress_ratio": 4},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3, "lru_width": HIDDEN},
    "ReformerConfig": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (4, 4)},
    "ReformerModelWithLMHead": {"is_decoder": True},
    "Step3p7TextConfig": {"sliding_window": 8},
    "VibeVoiceAcousticTokenizerConfig": {"num_filters": 4, "depths": (1,) * 7},
    "VibeVoiceAcousticTokenizerEncoderConfig": {"num_filters": 4, "depths": (1,) * 7},
    "WhisperConfig": {"max_source_positions": 32},
    "xLSTMConfig": {"qk_dim_factor": 1.0},
    "XmodConfig": {"default_language": "en_XX"},
    "Zamba2Config": {"mamba_headdim": 32, "attention_hidden_size": 128, "attention_head_dim": 32,
                     "hybrid_layer_ids": [1]},
    "ZambaConfig": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
                    "attention_hidden_size": 128, "attention_head_dim": 32},
}  # fmt: skip


def shrink(config: PreTrainedConfig, ids: Iterator[int] | None = None) -> PreTrainedConfig:
    """``config`` and the configurations in it, made tiny in place."""
    ids = ids or iter(range(VOCAB - 1, 0, -1))
    layers = getattr(config, "num_hidden_layers", None)
    per_layer = {k: v for k, v in vars(config).items() if isinstance(v, list) and len(v) == layers}
    # One layer of each kind.
    picks = sorted({v.index(kind) for v in per_layer.values() for kind in v if isinstance(kind, str)})
    picks = picks if len(picks) >= LAYERS else range(LAYERS)
    latent = "qk_rope_head_dim" in vars(config)
    many = vars(config).get("num_attention_heads", 0)
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrink(value, ids)
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            if value >= VOCAB:
                put(config, name, next(ids))
        elif name.endswith("token_id") and isinstance(value, list):
            put(config, name, [v if v < VOCAB else next(ids) for v in value])
        elif name in per_layer:
            if layers > len(picks):
                put(config, name, [value[i] for i in picks])
        elif name == "num_hidden_layers":
            put(config, name, min(value, len(picks)))
        elif name.endswith("key_value_heads") and value in (None, many):
            put(config, name, HEADS)
        elif name == "head_dim" and value is None:
            put(config, name, HIDDEN // HEADS)
        elif latent and name.endswith("head_dim"):
            put(config, name, value // 4)  # some are sums of others
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            for pattern, rule in _RULES:
                if re.fullmatch(pattern, name):
                    put(config, name, rule(value))
                    break
    override(config, type(config).__name__)
    return config


def override(config: PreTrainedConfig, name: str) -> None:
    """Set what ``_FIELDS`` says for ``name``."""
    for field_name, value in _FIELDS.get(name, {}).items():
        if "." in field_name:
            outer, inner = field_name.split(".")
            getattr(config, outer)[inner] = value
        else:
            setattr(config, field_name, copy.deepcopy(value))


def put(config: PreTrainedConfig, name: str, value: Any) -> None:
    """Set a field, unless it is a property."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        setattr(config, name, value)


def build(name: str) -> nn.Module:
    """A tiny model of the class ``name`` with random weights."""
    cls = getattr(transformers, name)
    config = shrink(cls.config_class())
    override(config, name)
    if config.is_encoder_decoder:
        for key in ("decoder_start_token_id", "pad_token_id", "bos_token_id"):
            if getattr(config, key, None) is None:
                setattr(config, key, 1)
    torch.manual_seed(0)
    model = cls(config).float().train()
    with torch.no_grad():
        for parameter in model.parameters():  # some classes leave memory as it is
            if parameter.numel() and (not parameter.isfinite().all() or parameter.abs().max() > 1e3):
                parameter.normal_(0, 0.02)
    return model


# --- inputs ---------------------------------------------------------------------------------------------------


def noise(*shape: int) -> Tensor:
    """Numbers from 0 to 1, of shape ``[BATCH, *shape]``."""
    return torch.rand(BATCH, *shape, generator=torch.Generator().manual_seed(3))


def tokens(*shape: int) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(10, 900, shape, generator=torch.Generator().manual_seed(4))


def picture() -> Tensor:
    return noise(3, 32, 32)


def text() -> Tensor:
    return tokens(BATCH, LENGTH)


_NO_TEXT = {"attention_mask": lambda: None, "input_ids": lambda: None}
_CODEBOOKS = {
    "input_ids": lambda: tokens(BATCH * 4, LENGTH),
    "attention_mask": lambda: None,
    "labels": lambda: tokens(BATCH, LENGTH, 4),
}

# What a class needs besides tokens, or instead of them. A model that also takes pictures or sound gets text alone.
_INPUTS: dict[str, dict[str, Any]] = {
    "Blip2ForConditionalGeneration": {"pixel_values": picture},
    "BlipForConditionalGeneration": {"pixel_values": picture},
    "CanaryForConditionalGeneration": {**_NO_TEXT, "input_features": lambda: noise(64, 128)},
    "CohereAsrForConditionalGeneration": {**_NO_TEXT, "input_features": lambda: noise(64, 128)},
    "DiaForConditionalGeneration": {"decoder_input_ids": lambda: tokens(BATCH, LENGTH, 9),
                                    "labels": lambda: tokens(BATCH * 9, LENGTH)},
    "GitForCausalLM": {"pixel_values": picture},
    "IdeficsForVisionText2Text": {"pixel_values": lambda: noise(1, 3, 32, 32),
                                  "image_attention_mask": lambda: torch.ones(BATCH, LENGTH, 1, dtype=torch.long)},
    "InstructBlipForConditionalGeneration": {"pixel_values": picture, "qformer_input_ids": text},
    "InstructBlipVideoForConditionalGeneration": {"pixel_values": lambda: noise(1, 3, 32, 32),
                                                  "qformer_input_ids": text},
    "Kosmos2ForConditionalGeneration": {"pixel_values": picture, "image_embeds_position_mask":
                                        lambda: (torch.arange(LENGTH) < 4).long().expand(BATCH, -1)},
    "KyutaiSpeechToTextForConditionalGeneration": {"input_ids": lambda: tokens(BATCH, LENGTH, 33)},
    "Molmo2ForConditionalGeneration": {"mm_token_type_ids": lambda: torch.zeros(BATCH, LENGTH, dtype=torch.long)},
    "MoonshineForConditionalGeneration": {**_NO_TEXT, "input_values": lambda: noise(3200)},
    "MoonshineStreamingForConditionalGeneration": {**_NO_TEXT, "input_values": lambda: noise(3200)},
    "MusicgenForCausalLM": _CODEBOOKS,
    "MusicgenMelodyForCausalLM": _CODEBOOKS,
    "PPFormulaNetForConditionalGeneration": {**_NO_TEXT, "pixel_values": picture, "decoder_input_ids": text},
    "PerceiverForMaskedLM": {"inputs": text, "input_ids": lambda: None},
    "Pix2StructForConditionalGeneration": {**_NO_TEXT, "flattened_patches": lambda: noise(12, HIDDEN + 2)},
    "SeamlessM4TForSpeechToText": {**_NO_TEXT, "input_features": lambda: noise(32, HIDDEN)},
    "SeamlessM4Tv2ForSpeechToText": {**_NO_TEXT, "input_features": lambda: noise(32, HIDDEN)},
    "Speech2TextForConditionalGeneration": {**_NO_TEXT, "input_features": lambda: noise(64, 80)},
    "SpeechEncoderDecoderModel": {**_NO_TEXT, "input_values": lambda: noise(3200)},
    "SpeechT5ForSpeechToText": {**_NO_TEXT, "input_values": lambda: noise(3200)},
    "UdopForConditionalGeneration": {"bbox": lambda: noise(LENGTH, 4)},
    "VisionEncoderDecoderModel": {**_NO_TEXT, "pixel_values": picture},
    "VoxtralRealtimeForConditionalGeneration": {"input_features": lambda: noise(128, 8 * LENGTH)},
    "WhisperForConditionalGeneration": {**_NO_TEXT, "input_features": lambda: noise(80, 64)},
}  # fmt: skip


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Tokens, a mask, labels, and what else the forward needs."""
    accepted = inspect.signature(model.forward).parameters
    ids = text()
    if getattr(model.config, "num_query_tokens", None):  # the places that the picture takes
        ids[:, :4] = 7
    mask, labels = torch.ones_like(ids), ids.clone()
    labels[:, :4] = -100  # a prompt
    mask[1, -2:] = 0  # padding
    labels[1, -2:] = -100
    made: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    made = {key: value for key, value in made.items() if key in accepted or "kwargs" in accepted}
    made |= {key: make() for key, make in _INPUTS.get(type(model).__name__, {}).items()}
    return {key: value for key, value in made.items() if value is not None}
