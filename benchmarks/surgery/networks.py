"""The networks of the coverage table: real class definitions with random weights in which nothing is 0 or 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

SEED = 0
SMALL = 96  # px, for networks that take images of any size
MOST = 400_000_000  # parameters; beyond these the copies that are compared do not fit 24 GB in float64

# One or more of every family. Those of a fixed input size get it; the others take SMALL or what is said here.
TIMM = {
    "lcnet_050": 0, "mobilenetv4_conv_small": 0, "regnetx_002": 0, "convnext_atto": 0, "convnextv2_atto": 0,
    "ghostnet_100": 0, "ghostnetv2_100": 0, "mobilevit_xxs": 128, "mobilevitv2_050": 128, "edgenext_xx_small": 0,
    "hardcorenas_a": 0, "tf_efficientnet_b0": 0, "rexnet_100": 0, "regnety_004": 0, "starnet_s1": 0, "repvit_m0_9": 0,
    "fastvit_t8": 128, "pvt_v2_b0": 0, "repvgg_a0": 0, "mobileone_s0": 0, "skresnet18": 0, "seresnet18": 0,
    "legacy_seresnet18": 0, "poolformer_s12": 0, "hrnet_w18_small": 0, "dla34": 0, "dpn68": 0, "ese_vovnet19b_dw": 0,
    "vovnet39a": 0, "selecsls42": 0, "gernet_s": 0, "resnest14d": 0, "ecaresnet26t": 0, "gcresnet33ts": 0,
    "nf_resnet26": 0, "nfnet_l0": 0, "dm_nfnet_f0": 0, "cspresnet50": 0, "cspdarknet53": 0, "res2net50_26w_4s": 0,
    "resnetv2_50": 0, "seresnet50": 0, "tresnet_m": 0, "efficientnetv2_rw_t": 0, "inception_next_atto": 0,
    "mobilenetv4_hybrid_medium": 128, "xception41": 0, "inception_v4": 128, "inception_resnet_v2": 128,
    "lambda_resnet26t": 0, "botnet26t_256": 0, "halonet26t": 256, "focalnet_tiny_srf": 0, "tiny_vit_5m_224": 0,
    "davit_tiny": 0, "levit_128s": 0, "coatnet_nano_rw_224": 0, "maxxvit_rmlp_nano_rw_256": 0,
    "xcit_nano_12_p16_224": 0, "efficientformer_l1": 0, "visformer_tiny": 0, "vit_tiny_patch16_224": 0,
    "deit3_small_patch16_224": 0, "eva02_tiny_patch14_224": 0, "cait_xxs24_224": 0, "convit_tiny": 0,
    "swin_tiny_patch4_window7_224": 0, "twins_svt_small": 0, "mvitv2_tiny": 0, "crossvit_tiny_240": 0,
    "volo_d1_224": 0, "mixer_s32_224": 0, "gmlp_s16_224": 0, "resmlp_12_224": 0,
}  # fmt: skip

TEXT: dict[str, Any] = {"vocab_size": 37, "num_labels": 10, "max_position_embeddings": 32}
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CAUSAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GROUPED = {"num_key_value_heads": 2, **CAUSAL}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, **CAUSAL}
PYRAMID = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4}

# name -> (config class, model class, what the config is given, whether it reads images)
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "bert": ("BertConfig", "BertForSequenceClassification", TEXT | WIDTHS, False),
    "bert-eager": (
        "BertConfig", "BertForSequenceClassification", TEXT | WIDTHS | {"attn_implementation": "eager"}, False,
    ),
    "bert-mlm": ("BertConfig", "BertForMaskedLM", TEXT | WIDTHS, False),
    "distilbert": (
        "DistilBertConfig", "DistilBertForSequenceClassification",
        TEXT | {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}, False,
    ),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", TEXT | WIDTHS, False),
    "gpt2": ("GPT2Config", "GPT2ForSequenceClassification", TEXT | GPT, False),
    "gpt2-lm": ("GPT2Config", "GPT2LMHeadModel", TEXT | GPT, False),
    "llama": ("LlamaConfig", "LlamaForCausalLM", TEXT | WIDTHS | GROUPED, False),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", TEXT | WIDTHS | GROUPED, False),
    "vit": ("ViTConfig", "ViTForImageClassification", WIDTHS | {"image_size": 32, "patch_size": 8}, True),
    "swin": ("SwinConfig", "SwinForImageClassification", PYRAMID, True),
    "resnet": (
        "ResNetConfig", "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "basic"}, True,
    ),
    "segformer": (
        "SegformerConfig", "SegformerForImageClassification",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16}, True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Network:
    """A model, a batch for it, and how wide its output layer is."""

    model: nn.Module
    example: Any
    classes: int
    input: str  # "96 px", "6 tokens"


def names() -> list[str]:
    """``library/model``, in the order of the table."""
    ours = [f"timm/{n}" for n in TIMM] + [f"transformers/{n}" for n in TRANSFORMERS]
    return [f"torchvision/{n}" for n in _torchvision().list_models(module=_torchvision())] + ours


def build(name: str) -> Network:
    """The network of that name: random, without dropout, in float64 where it fits."""
    torch.manual_seed(SEED)
    _torchvision()  # timm and transformers import it too
    library, _, key = name.partition("/")
    network = BUILDERS[library](key)
    size = sum(p.numel() for p in network.model.parameters())
    dtype = torch.float32 if size > MOST else torch.float64
    network.model.to(dtype)
    without_dropout(network.model)
    perturb(network.model)
    example = tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, network.example)
    return Network(network.model, example, network.classes, network.input)


def without_dropout(model: nn.Module) -> None:
    """Nothing random in train mode: dropout and stochastic depth with probability 0."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]
        for key in ("drop_prob", "drop_rate", "dropout", "dropout_p", "attn_dropout", "attention_dropout"):
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.0)


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Biases, scales, running statistics and everything else that starts as a constant becomes random."""
    for p in model.parameters():
        if p.dim() < 2 or bool((p == p.reshape(-1)[0]).all()):
            p.add_(0.1 * torch.randn_like(p))
    for name, b in model.named_buffers():
        if name.endswith("running_mean"):
            b.add_(0.1 * torch.randn_like(b))
        elif name.endswith("running_var"):
            b.mul_(0.5 + torch.rand_like(b))


def images(px: int) -> Tensor:
    """(n, 3, px, px): four small ones, so that batch norms have something to average, or two large ones."""
    return torch.randn(4 if px <= 128 else 2, 3, px, px, generator=torch.Generator().manual_seed(SEED))


def _torchvision() -> Any:
    """torchvision.models, also where torchvision came without its compiled ops, which no classifier needs."""
    if not hasattr(torch.ops.torchvision, "nms"):
        try:
            import torchvision
        except RuntimeError:
            library = torch.library.Library("torchvision", "DEF")
            for op in ("nms", "qnms"):
                library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _torchvision.library = library  # type: ignore[attr-defined]  # the ops live as long as it does
    import torchvision.models

    return torchvision.models


def from_torchvision(name: str) -> Network:
    quick = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = _torchvision().get_model(name, weights=None, **quick)
    px = 299 if name == "inception_v3" else 224 if name.startswith(("vit", "swin", "maxvit")) else SMALL
    return Network(model, images(px), 1000, f"{px} px")


def from_timm(name: str) -> Network:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=1000)
    px = TIMM[name] or (model.default_cfg["input_size"][-1] if model.default_cfg["fixed_input_size"] else SMALL)
    return Network(model, images(px), 1000, f"{px} px")


def from_transformers(name: str) -> Network:
    import transformers

    config, model, given, sees = TRANSFORMERS[name]
    network = getattr(transformers, model)(getattr(transformers, config)(**{"num_labels": 10} | given))
    if sees:
        px = given.get("image_size", 64)
        return Network(network, {"pixel_values": images(px)}, 10, f"{px} px")
    return Network(network, tokens(6), 37 if "LM" in model else 10, "6 tokens")


def tokens(length: int) -> dict[str, Tensor]:
    """(4, length) tokens; the last two of one text are padding."""
    seen = torch.ones(4, length, dtype=torch.long)
    seen[1, -2:] = 0
    ids = torch.randint(3, TEXT["vocab_size"], (4, length), generator=torch.Generator().manual_seed(SEED))
    return {"input_ids": torch.where(seen.bool(), ids, 2), "attention_mask": seen}


BUILDERS: dict[str, Callable[[str], Network]] = {
    "torchvision": from_torchvision, "timm": from_timm, "transformers": from_transformers,
}  # fmt: skip
