"""Small configurations of transformers families: sizes are set by the names of the configurations' attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]
Draw = Callable[[int, int], Inputs]


def list_words(text: str) -> list[str]:
    """Return the words of a table that is written as text."""
    return text.split()


VOCABULARY = 50
WIDTHS = """hidden_size d_model n_embd dim embed_dim emb_dim embedding_size word_embed_proj_dim encoder_hidden_size
projection_dim embedding_dim d_embed decoder_hidden_size lru_width hidden_dim d_decoder"""
INNER = """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size dim_feedforward
d_inner moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size dff mlp_hidden_size ff_dim"""
DEPTHS = """num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers num_decoder_layers
num_encoder_layers"""
HEADS = """num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads
num_decoder_attention_heads linear_num_value_heads"""
LENGTHS = """n_positions max_position_embeddings n_ctx max_seq_len max_sequence_length max_target_positions
max_encoder_position_embeddings max_decoder_position_embeddings"""
HEAD_SIZES = """head_dim d_kv attention_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim
linear_value_head_dim"""
FOURS = "num_local_experts num_experts n_routed_experts moe_num_experts num_frames rotary_dim"
TWOS = "num_key_value_heads linear_num_key_heads num_experts_per_tok type_vocab_size mamba_expand"
RANKS = "q_lora_rank kv_lora_rank classifier_proj_size num_mel_bins feature_projection_input_dim"
SMALL: dict[str, Any] = {
    **dict.fromkeys(list_words(WIDTHS), 32), **dict.fromkeys(list_words(INNER), 48),
    **dict.fromkeys(list_words(DEPTHS), 2), **dict.fromkeys(list_words(HEADS), 4),
    **dict.fromkeys(list_words(LENGTHS), 64), **dict.fromkeys(list_words(HEAD_SIZES), 8),
    **dict.fromkeys(list_words("vocab_size src_vocab_size tgt_vocab_size num_hash_buckets"), VOCABULARY),
    **dict.fromkeys(list_words("entity_vocab_size pronunciation_vocab_size shape_vocab_size"), 20),
    **dict.fromkeys(list_words(FOURS), 4),
    **dict.fromkeys(list_words("n_group topk_group n_shared_experts first_k_dense_replace mamba_n_groups n_groups"), 1),
    **dict.fromkeys(list_words(RANKS), 16),
    **dict.fromkeys(list_words("patch_size state_size mamba_d_state mamba_n_heads mamba_d_head attention_window"), 8),
    **dict.fromkeys(list_words(TWOS), 2),
    "num_labels": 5, "image_size": 32, "max_source_positions": 60, "tubelet_size": [2, 8, 8],
    "num_feat_extract_layers": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "mask_time_prob": 0.0,
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "apply_spec_augment": False,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
MAMBA2 = {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8}
PYRAMID = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "image_size": 32, "patch_size": 4}
STAGES = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]}
BACKBONE = {
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 5,
    "backbone_config": {
        "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1],
        "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"],
    },
}  # fmt: skip


def _table(head: str, kinds: str, **options: Mapping[str, Any]) -> dict[str, Any]:
    """Configurations of one task: name -> (task, options)."""
    return {kind: (head, options.get(kind.replace("-", "_"), {})) for kind in kinds.split()}


CLASSIFY = _table(
    "SequenceClassification",
    """albert bert big_bird bloom canine convbert ctrl data2vec-text deberta deberta-v2 diffllama
    distilbert doge electra ernie esm eurobert exaone4 falcon flaubert fnet funnel gemma gemma2 gemma3_text glm glm4
    gpt_bigcode gpt_neo gpt_neox gpt_oss gptj helium ibert jamba jetmoe layoutlm llama longformer luke
    megatron-bert minimax mistral mixtral mobilebert modernbert mpnet mpt nemotron nomic_bert nystromformer olmo
    olmo2 opt openai-gpt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next rembert
    roberta-prelayernorm roc_bert roformer seed_oss smollm3 squeezebert stablelm starcoder2 xlm xlm-roberta-xl xlnet
    yoso""",
    gpt_neo={"attention_types": [[["global", "local"], 1]]},
    mobilebert={"true_hidden_size": 32, "intra_bottleneck_size": 32},
    funnel={"block_sizes": [1, 1], "num_decoder_layers": 1}, modernbert={"global_attn_every_n_layers": 2},
    big_bird={"attention_type": "original_full"}, squeezebert={}, jamba={"use_mamba_kernels": False},
)  # fmt: skip
CAUSAL = _table(
    "CausalLM",
    """gpt2 mamba mamba2 falcon_mamba rwkv bamba biogpt cohere cohere2 codegen ernie4_5 granite granitemoe
    lfm2 marian nanochat nemotron_h olmo3 olmoe pegasus recurrent_gemma solar_open xglm xlstm apertus arcee bitnet
    hunyuan_v1_dense""",
    mamba2=MAMBA2,
    rwkv={"attention_hidden_size": 32},
)
MASKED = _table("MaskedLM", "roberta camembert bart mbart")
ENCODERS = _table("", "dpr clip_text_model dinov3_vit clip_vision_model")
SEQ2SEQ = _table(
    "Seq2SeqLM",
    "blenderbot led longt5 m2m_100 mt5 switch_transformers t5gemma prophetnet pegasus_x fsmt t5 umt5 mvp plbart",
)
LARGE = {"image_size": 64}
STAGES |= LARGE
IMAGES = _table(
    "ImageClassification",
    """beit bit convnext convnextv2 cvt dinov2 dinov2_with_registers donut-swin focalnet hgnet_v2 ijepa
    mobilenet_v1 mobilenet_v2 mobilevit poolformer pvt pvt_v2 regnet resnet segformer swiftformer swin
    swinv2 textnet vit vit_msn siglip clip pp_lcnet data2vec-vision""",
    convnext=STAGES, convnextv2=STAGES, regnet=STAGES, resnet=STAGES | {"embedding_size": 16, "layer_type": "basic"},
    swin=PYRAMID, swinv2=PYRAMID, donut_swin=PYRAMID, focalnet={"embed_dim": 16, "depths": [1, 1], "image_size": 32},
    bit=STAGES | {"embedding_size": 16, "num_groups": 4}, poolformer=STAGES,
    segformer=STAGES | {"decoder_hidden_size": 16},
    mobilevit=LARGE, cvt=LARGE, hgnet_v2=LARGE, mobilenet_v1=LARGE, mobilenet_v2=LARGE,
    swiftformer=LARGE, textnet=LARGE, pp_lcnet=LARGE,
)  # fmt: skip
SEGMENT = _table(
    "SemanticSegmentation", "segformer-seg mobilevit-seg", segformer_seg=STAGES | {"decoder_hidden_size": 16}
)
DETECT = _table(
    "ObjectDetection",
    "detr conditional_detr deformable_detr yolos table-transformer",
    **dict.fromkeys(["detr", "conditional_detr", "deformable_detr", "table_transformer"], BACKBONE),
)
VIDEO = _table("VideoClassification", "timesformer videomae vivit")
SPEECH = _table(
    "AudioClassification",
    "wav2vec2 hubert wavlm unispeech unispeech-sat sew sew-d data2vec-audio wav2vec2-conformer wav2vec2-bert whisper"
    " audio-spectrogram-transformer",
    audio_spectrogram_transformer={"max_length": 24, "num_mel_bins": 16},
)


def _draw_tokens(batch: int, length: int) -> Inputs:
    """Texts, the last of which is padded in front."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, :2] = 0
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, length)), "attention_mask": mask}


def _draw_pairs(batch: int, length: int) -> Inputs:
    return _draw_tokens(batch, length) | {"decoder_input_ids": torch.randint(3, VOCABULARY, (batch, length - 3))}


def _draw_pixels(batch: int, length: int, px: int = 32) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, px, px)}


def _draw_frames(batch: int, length: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 4, 3, 32, 32)}


def _draw_wave(batch: int, length: int) -> Inputs:
    return {"input_values": torch.randn(batch, 100 * length)}


def _draw_spectrogram(batch: int, length: int) -> Inputs:
    return {"input_features": torch.randn(batch, 4 * length, 16)}


def _draw_mels(batch: int, length: int) -> Inputs:
    return {"input_features": torch.randn(batch, 16, 120)}


def _draw_fixed_spectrogram(batch: int, length: int) -> Inputs:
    return {"input_values": torch.randn(batch, 24, 16)}


TASKS: dict[str, tuple[dict[str, Any], Draw]] = {
    "SequenceClassification": (CLASSIFY, _draw_tokens),
    "CausalLM": (CAUSAL, _draw_tokens),
    "MaskedLM": (MASKED, _draw_tokens),
    "Seq2SeqLM": (SEQ2SEQ, _draw_pairs),
    "ImageClassification": (IMAGES, _draw_pixels),
    "SemanticSegmentation": (SEGMENT, partial(_draw_pixels, px=64)),
    "ObjectDetection": (DETECT, partial(_draw_pixels, px=64)),
    "VideoClassification": (VIDEO, _draw_frames),
    "AudioClassification": (SPEECH, _draw_wave),
    "": (ENCODERS, _draw_tokens),
}


def build_transformer(name: str, entry: tuple[str, Mapping[str, Any]]) -> tuple[nn.Module, Draw]:
    """The small network of a family, and how to draw its inputs."""
    import transformers

    task, options = entry
    kind = name.removesuffix("-seg")
    config = _shrink_config(type(transformers.AutoConfig.for_model(kind)), options)
    config._attn_implementation = "eager"
    auto = getattr(transformers, f"AutoModelFor{task}" if task else "AutoModel")
    model = auto.from_config(config)
    draw = TASKS[task][1]
    if model.main_input_name == "input_features":
        draw = _draw_mels if kind == "whisper" else _draw_spectrogram
    elif kind == "audio-spectrogram-transformer":
        draw = _draw_fixed_spectrogram
    elif model.main_input_name == "pixel_values" and task in ("", "ImageClassification"):
        px = getattr(getattr(config, "vision_config", config), "image_size", 64)
        draw = partial(_draw_pixels, px=px if isinstance(px, int) else px[0])
    return model, draw


def _shrink_config(kind: Any, options: Mapping[str, Any]) -> Any:
    """A configuration of this class with small sizes, also in the configurations it is made of."""
    from transformers import AutoConfig

    default = kind()
    given: dict[str, Any] = {}
    for key, value in vars(default).items():
        if key in default.sub_configs and value is not None and not isinstance(value, dict):
            given[key] = _shrink_config(type(value), options.get(key, {}))
        elif key in SMALL and isinstance(value, (list, tuple)) == isinstance(SMALL[key], (list, tuple)):
            given[key] = SMALL[key]
        elif isinstance(value, float) and ("drop" in key or key.endswith("_prob")):
            given[key] = 0.0
    for key, value in options.items():
        if isinstance(value, dict) and "model_type" in value:
            given[key] = AutoConfig.for_model(**value)
        elif key not in default.sub_configs or key not in given:
            given[key] = value
    return kind(**given)


TABLE = {name: entry for table, _ in TASKS.values() for name, entry in table.items()}
