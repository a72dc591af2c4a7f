"""The networks of the coverage table: small configurations of real class definitions, with random weights.

A configuration is built by ``build(name)``; ``names()`` lists them as ``group/name``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import own_networks
import torch
import transformers_networks
from torch import Tensor, nn
from transformers_networks import list_words

SEED = 0
Inputs = Tensor | dict[str, Any]
Draw = Callable[[int, int], Inputs]  # (batch size, length: of a text or a wave) -> inputs
LENGTH = 12


@dataclass(frozen=True)
class Network:
    """A model and how to draw inputs for it."""

    model: nn.Module
    draw: Draw


def names() -> list[str]:
    """``group/name`` of all configurations."""
    return [f"{group}/{name}" for group, (table, _) in GROUPS.items() for name in table]


def build(name: str) -> Network:
    """The network of that name, without dropout and with no parameter or statistic that is a constant."""
    declare_torchvision_ops()
    group, _, key = name.partition("/")
    table, builder = GROUPS[group]
    torch.manual_seed(SEED)
    network = builder(key, table[key])
    remove_dropout(network.model)
    perturb(network.model)
    return Network(network.model.eval(), network.draw)


def import_packages() -> None:
    """Import what every network of a package needs, once for all processes that are forked."""
    declare_torchvision_ops()
    for module in (
        "timm",
        "torchvision.models",
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
    ):
        importlib.import_module(module)
    with suppress(ModuleNotFoundError):  # its networks are then broken, by that name
        importlib.import_module("diffusers").UNet2DModel  # noqa: B018  # loads what the others need


def declare_torchvision_ops() -> None:
    """Let torchvision be imported next to a torch that it was not built for: no network here needs its compiled ops."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        declare_torchvision_ops.library = library  # type: ignore[attr-defined]  # the ops live as long as it does


def remove_dropout(model: nn.Module) -> None:
    """Nothing random in train mode: dropout and stochastic depth with probability 0."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]
        for key, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in key or key == "p"):
                setattr(module, key, 0.0)


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Biases, scales, running statistics and everything else that starts as a constant becomes random."""
    for p in model.parameters():
        if p.is_floating_point() and (p.dim() < 2 or bool((p == p.reshape(-1)[:1]).all())):
            p.add_(0.1 * torch.randn_like(p))
    for name, b in model.named_buffers():
        if name.endswith("running_mean"):
            b.add_(0.1 * torch.randn_like(b))
        elif name.endswith("running_var"):
            b.mul_(0.5 + torch.rand_like(b))


# Inputs ---------------------------------------------------------------------------------------------------------------


def draw_images(batch: int, length: int, px: int = 64, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, px, px)


# torchvision and timm -------------------------------------------------------------------------------------------------

TORCHVISION: dict[str, Any] = {
    **dict.fromkeys(["resnet18", "resnet34", "resnet50", "resnext50_32x4d", "wide_resnet50_2"], 64),
    **dict.fromkeys(["mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet0_5", "mnasnet1_0"], 64),
    **dict.fromkeys(["shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "squeezenet1_0", "squeezenet1_1"], 64),
    **dict.fromkeys(["regnet_x_400mf", "regnet_y_400mf", "regnet_y_800mf", "efficientnet_b0", "densenet121"], 64),
    **dict.fromkeys(["convnext_tiny", "googlenet"], 64),
    "inception_v3": 96, "swin_t": 64, "swin_v2_t": 64,
    **dict.fromkeys(["fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"], 64),
    **dict.fromkeys(["fasterrcnn_mobilenet_v3_large_320_fpn", "fcos_resnet50_fpn", "retinanet_resnet50_fpn"], 64),
    "ssdlite320_mobilenet_v3_large": 320,
    **dict.fromkeys(["r3d_18", "mc3_18", "r2plus1d_18"], 32),
}  # fmt: skip
VIDEOS = ("r3d_18", "mc3_18", "r2plus1d_18")


def build_torchvision(name: str, px: int) -> Network:
    from torchvision import models

    classes = {} if "320" in name or name.startswith(("fcos", "retina")) else {"num_classes": 10}
    none = {"weights": None} | ({"weights_backbone": None} if "weights_backbone" in _parameters(models, name) else {})
    if name in ("googlenet", "inception_v3"):
        classes |= {"init_weights": False, "aux_logits": False}
    model = models.get_model(name, **none, **classes)
    if name in VIDEOS:
        return Network(model, lambda batch, length: torch.randn(batch, 3, 4, px, px))
    if not classes:
        model = own_networks.DetectorHeads(model)
    return Network(model, partial(draw_images, px=px))


def _parameters(models: Any, name: str) -> Any:
    from inspect import signature

    return signature(models.get_model_builder(name)).parameters


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}
PLAIN = """
lcnet_050 tinynet_e mobilenetv4_conv_small regnetx_002 regnety_002 regnetz_b16 convnext_atto convnextv2_atto
ghostnet_100 ghostnetv2_100 ghostnetv3_100 mobilevitv2_050 edgenext_xx_small hardcorenas_a efficientnet_lite0
mixnet_s rexnet_100 starnet_s1 repvit_m0_9 repghostnet_050 pvt_v2_b0 mobileone_s0 skresnet18 seresnet18
legacy_seresnet18 poolformer_s12 poolformerv2_s12 hrnet_w18_small hgnet_tiny hgnetv2_b0 dla34 dla46_c dpn48b
ese_vovnet19b_slim selecsls42 resnest14d ecaresnet26t resnet10t resnet14t resnet26d gcresnext26ts nf_resnet26
nf_regnet_b0 nfnet_l0 cspdarknet53 cspresnet50 darknetaa53 res2net50_14w_8s resnetv2_50 seresnext26d_32x4d
tresnet_m efficientnetv2_rw_t efficientvit_b0 efficientvit_m0 inception_next_atto mobilenet_edgetpu_v2_xs
mobilenetv3_small_050 mobilenetv2_050 mnasnet_small semnasnet_050 spnasnet_100 fbnetv3_b fbnetc_100
lambda_resnet26t caformer_s18 convformer_s18 tf_efficientnetv2_b0 focalnet_tiny_srf xcit_nano_12_p16_224
fasternet_t0 shvit_s1 swiftformer_xs mambaout_femto rdnet_tiny nextvit_small repvgg_a0 xception41 vovnet39a
cs3darknet_s gernet_s resnetblur18 resnetaa34d mobilevit_xxs fastvit_t8 starnet_s050 csatv2"""
TRANSFORMERS = """
vit_tiny_patch16_224 deit_tiny_patch16_224 vit_base_patch16_clip_224 vit_base_patch16_siglip_224
deit3_small_patch16_224 beit_base_patch16_224 beitv2_base_patch16_224 cait_xxs24_224 eva02_tiny_patch14_224
vit_base_patch14_dinov2 vit_small_patch16_dinov3 flexivit_small convit_tiny vit_relpos_small_patch16_224
vit_srelpos_small_patch16_224 naflexvit_base_patch16_gap"""
TIMM: dict[str, Any] = {
    **{name: dict[str, Any]() for name in list_words(PLAIN)},
    **dict.fromkeys(list_words(TRANSFORMERS), VIT),
    **{name: {"img_size": 64} for name in list_words("mixer_s32_224 gmlp_s16_224 resmlp_12_224")},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "embed_dim": 24, "depths": (1, 1, 2, 1), "window_size": 2},
    "swinv2_tiny_window8_256": {"img_size": 64, "embed_dim": 24, "depths": (1, 1, 2, 1), "window_size": 2},
    "swin_s3_tiny_224": {"img_size": 64, "embed_dim": 24, "depths": (1, 1, 2, 1), "window_size": (2, 2, 2, 2)},
    "twins_svt_small": {"img_size": 64, "depths": (1, 1, 2, 1)},
    "twins_pcpvt_small": {"img_size": 64, "depths": (1, 1, 2, 1)},
    "pit_ti_224": {"img_size": 64, "depth": (1, 1, 1)},
    "coat_lite_tiny": {"img_size": 64},
    "crossvit_tiny_240": {"depth": ((1, 2, 0), (1, 2, 0), (1, 2, 0))},
    "nest_tiny": {"img_size": 64},
    "mvitv2_tiny": {"img_size": 64},
    "tiny_vit_5m_224": {},
    "davit_tiny": {"depths": (1, 1, 1, 1)},
    "efficientformerv2_s0": {"img_size": 64},
    "gcvit_xxtiny": {"img_size": 64},
    "hiera_tiny_224": {"img_size": 64, "stages": (1, 1, 1, 1)},
    "coatnet_nano_rw_224": {"img_size": 64},
    "maxvit_rmlp_pico_rw_256": {"img_size": 64},
    "sequencer2d_s": {"img_size": 64, "layers": (1, 1, 1, 1)},
    "volo_d1_224": {"img_size": 64},
}  # fmt: skip


def build_timm(name: str, options: Mapping[str, Any]) -> Network:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=10, **options)
    fixed = model.default_cfg["input_size"][-1] if name.startswith(("crossvit",)) else 64
    return Network(model, partial(draw_images, px=options.get("img_size", fixed)))


# diffusers ------------------------------------------------------------------------------------------------------------

SMALL_UNET = {
    "sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4,
}  # fmt: skip
CROSS = {"cross_attention_dim": 16, "attention_head_dim": 4, "in_channels": 4, "out_channels": 4} | SMALL_UNET
TRANSFORMER = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
PATCHES = {"sample_size": 8, "patch_size": 2}
LATENT_TRANSFORMER = TRANSFORMER | PATCHES | {"in_channels": 4, "norm_num_groups": 4}


def choose_blocks(*kinds: str) -> dict[str, Any]:
    """Two blocks on the way down and two on the way up."""
    return {"down_block_types": kinds[:2], "up_block_types": kinds[2:]}


CODER = {
    "block_out_channels": (16, 32), "norm_num_groups": 4,
    **choose_blocks(*["DownEncoderBlock2D"] * 2, *["UpDecoderBlock2D"] * 2),
}  # fmt: skip
IMAGE, LATENT = {"sample": (3, 16, 16)}, {"hidden_states": (4, 8, 8)}
TEXT = {"encoder_hidden_states": ("length", 16)}
DIFFUSERS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "unet": ("UNet2DModel", SMALL_UNET | choose_blocks("DownBlock2D", "DownBlock2D", "UpBlock2D", "UpBlock2D"), IMAGE),
    "unet-attention": (
        "UNet2DModel",
        SMALL_UNET | {"attention_head_dim": 8}
        | choose_blocks("DownBlock2D", "AttnDownBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        IMAGE,
    ),
    "unet-resnet": (
        "UNet2DModel",
        SMALL_UNET | choose_blocks("DownBlock2D", "ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D", "UpBlock2D"),
        IMAGE,
    ),
    "unet-conditional": (
        "UNet2DConditionModel",
        CROSS | choose_blocks("CrossAttnDownBlock2D", "DownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"),
        {"sample": (4, 16, 16), **TEXT},
    ),
    "unet-1d": (
        "UNet1DModel",
        {"block_out_channels": (16, 32), "extra_in_channels": 32, "sample_size": 32}
        | choose_blocks("DownBlock1DNoSkip", "DownBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
        {"sample": (2, 32)},
    ),
    "vae": ("AutoencoderKL", CODER, IMAGE),
    "vq": ("VQModel", CODER, IMAGE),
    "vae-tiny": (
        "AutoencoderTiny",
        {f"{half}_block_out_channels": (16, 16) for half in ("encoder", "decoder")}
        | {f"num_{half}_blocks": (1, 1) for half in ("encoder", "decoder")},
        IMAGE,
    ),
    "dit": ("DiTTransformer2DModel", LATENT_TRANSFORMER | {"num_embeds_ada_norm": 10}, LATENT),
    "pixart": (
        "PixArtTransformer2DModel",
        LATENT_TRANSFORMER | {"cross_attention_dim": 32, "caption_channels": 16},
        LATENT | TEXT,
    ),
    "transformer-2d": (
        "Transformer2DModel", TRANSFORMER | {"in_channels": 16, "norm_num_groups": 4}, {"hidden_states": (16, 8, 8)},
    ),
    "prior": (
        "PriorTransformer",
        TRANSFORMER | {"embedding_dim": 16, "num_embeddings": 5, "additional_embeddings": 4},
        {"hidden_states": (16,), "proj_embedding": (16,), "encoder_hidden_states": (5, 16)},
    ),
    "sd3": (
        "SD3Transformer2DModel",
        TRANSFORMER | PATCHES | dict.fromkeys(["joint_attention_dim", "pooled_projection_dim"], 16)
        | {"in_channels": 4, "out_channels": 4, "caption_projection_dim": 32, "pos_embed_max_size": 8},
        LATENT | TEXT | {"pooled_projections": (16,)},
    ),
}  # fmt: skip
STEPPED = {"AutoencoderKL", "AutoencoderTiny", "VQModel", "Transformer2DModel"}  # take no time step


def build_diffusers(name: str, entry: Any) -> Network:
    import diffusers

    kind, options, inputs = entry
    if kind.startswith(("UNet2DModel", "Autoencoder", "VQ")):
        options = {"in_channels": 3, "out_channels": 3} | options
    model = getattr(diffusers, kind)(**options)

    def draw(batch: int, length: int) -> dict[str, Any]:
        shapes = {key: [length if n == "length" else n for n in shape] for key, shape in inputs.items()}
        found: dict[str, Any] = {key: torch.randn(batch, *shape) for key, shape in shapes.items()}
        if kind not in STEPPED:
            found["timestep"] = torch.full((batch,), 5)
        if kind == "DiTTransformer2DModel":
            found["class_labels"] = torch.arange(batch) % 10
        if kind == "PixArtTransformer2DModel":
            found["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
        return found

    return Network(model, draw)


def build_own(name: str, entry: tuple[Callable[[], nn.Module], Draw]) -> Network:
    return Network(entry[0](), entry[1])


def build_transformer(name: str, entry: Any) -> Network:
    return Network(*transformers_networks.build_transformer(name, entry))


GROUPS: dict[str, tuple[dict[str, Any], Callable[[str, Any], Network]]] = {
    "own": (own_networks.TABLE, build_own),
    "torchvision": (TORCHVISION, build_torchvision),
    "timm": (TIMM, build_timm),
    "transformers": (transformers_networks.TABLE, build_transformer),
    "diffusers": (DIFFUSERS, build_diffusers),
}
