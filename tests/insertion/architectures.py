"""Networks of several packages, as small as they can be built, and places in them."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torchvision
from torchvision.models.swin_transformer import (
    PatchMerging,
    PatchMergingV2,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerBlockV2,
)
from torchvision.models.video import MViT, swin_transformer
from torchvision.models.video.mvit import MSBlockConfig

from polynl.insertion.layouts import Layout

FIRST, LAST = Layout(), Layout("channels_last")


def tokens(prefix, *grid):
    return Layout("tokens", prefix, grid or None)


@dataclass
class Host:
    """How to build a network, a module in it, the layout there, and an input."""

    make: Any
    place: str
    layout: Layout
    input: Any
    options: dict = field(default_factory=dict)


def image(*size, channels=3):
    return torch.rand(2, channels, *(size or (64, 64)))


def timm(name, place, layout, size=64, options=None, **settings):
    def make():
        package = pytest.importorskip("timm", reason="timm is not installed")
        return package.create_model(name, pretrained=False, num_classes=5, **settings)

    return Host(make, place, layout, image(size, size), options or {})


def vision(name, place, layout, x=None, options=None, **settings):
    def make():
        return torchvision.models.get_model(name, weights=None, **settings)

    return Host(make, place, layout, image() if x is None else x, options or {})


def built(make, place, layout, x, **options):
    return Host(make, place, layout, x, options)


def vit():
    return torchvision.models.VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=5)


def swin(block=SwinTransformerBlock, merging=PatchMerging):
    return SwinTransformer(
        [4, 4], 16, [1, 2], [2, 2], [4, 4], num_classes=5, block=block, downsample_layer=merging
    )


def swin_v2():
    return swin(SwinTransformerBlockV2, PatchMergingV2)


def swin3d():
    return swin_transformer.SwinTransformer3d([2, 4, 4], 16, [1, 2], [2, 2], [2, 4, 4], num_classes=5)


def mvit():
    stage = MSBlockConfig(1, 8, 8, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2])
    return MViT((32, 32), 4, [stage] * 2, False, True, False, False, num_classes=5)


PLAIN = {"weights_backbone": None}
MOBILE_RCNN, DETECTOR = "fasterrcnn_mobilenet_v3_large_320_fpn", {**PLAIN, "min_size": 64, "max_size": 96}
IMAGES = [torch.rand(3, 64, 80), torch.rand(3, 80, 64)]
CLIP = torch.rand(1, 3, 4, 32, 32)
VIT = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 2}
VIT_56 = {**VIT, "img_size": 56}

FOUR = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
SECOND = {"argument": "x.1", "output": 1}

HOSTS = {
    # timm, classification
    "resnet18": timm("resnet18", "layer3.1", FIRST),
    "regnet": timm("regnetx_002", "s3.b2", FIRST),
    "mobilenet_v4": timm("mobilenetv4_conv_small", "blocks.2.1", FIRST),
    "repvit": timm("repvit_m0_9", "stages.2", FIRST, embed_dim=(8, 16, 24, 32), depth=(1, 1, 1, 1)),
    "poolformer": timm("poolformer_s12", "stages.2", FIRST, embed_dims=(8, 16, 24, 32), layers=(1, 1, 1, 1)),
    "maxvit": timm("maxvit_tiny_rw_224", "stages.1", FIRST, img_size=64, embed_dim=(32, 32, 64, 64)),
    "convnext": timm("convnext_tiny", "stages.2.blocks.0.mlp", LAST, **FOUR),
    "convnext_v2": timm("convnextv2_tiny", "stages.2.blocks.0", FIRST, **FOUR),
    "mambaout": timm("mambaout_femto", "stages.2", LAST, **FOUR),
    "swin": timm("swin_tiny_patch4_window7_224", "layers.1", LAST, img_size=64, window_size=4, embed_dim=12),
    "swin_v2": timm("swinv2_tiny_window8_256", "layers.1.blocks.1", LAST, img_size=64, embed_dim=12),
    "sam": timm("samvit_base_patch16", "blocks.1", LAST, **VIT),
    "vit": timm("vit_tiny_patch16_224", "blocks.1", tokens(1, 4, 4), **VIT),
    "vit_attention": timm("vit_tiny_patch16_224", "blocks.1.attn", tokens(1, 4, 4), **VIT),
    "vit_without_class": timm("vit_base_patch16_siglip_224", "blocks.1", tokens(0, 4, 4), **VIT),
    "vit_registers": timm("vit_small_patch14_reg4_dinov2", "blocks.1", tokens(5, 4, 4), 56, **VIT_56),
    "vit_hybrid": timm("vit_tiny_r_s16_p8_224", "blocks.1", tokens(1, 2, 2), **VIT),
    "deit": timm("deit_tiny_distilled_patch16_224", "blocks.1", tokens(2, 4, 4), **VIT),
    "beit": timm("beit_base_patch16_224", "blocks.1", tokens(1, 4, 4), **VIT),
    "eva": timm("eva02_tiny_patch14_224", "blocks.1", tokens(1, 4, 4), 56, **VIT_56),
    "xcit": timm("xcit_nano_12_p16_224", "blocks.1", tokens(0, 4, 4), **VIT),
    "xcit_class": timm("xcit_nano_12_p16_224", "cls_attn_blocks.1", tokens(1, 4, 4), **VIT),
    "cait": timm("cait_xxs24_224", "blocks.1", tokens(0, 4, 4), **VIT),
    "mixer": timm("mixer_s32_224", "blocks.1", tokens(0, 2, 2), img_size=64),
    "mvit_v2": timm("mvitv2_tiny", "stages.1.blocks.0", tokens(0, 16, 16), img_size=64),
    "pvt_v2": timm("pvt_v2_b0", "stages.2.blocks.0.attn", tokens(0, 4, 4), depths=(1, 1, 1, 1)),
    "hrnet": timm("hrnet_w18_small", "stage3.0", FIRST, options=SECOND),
    "crossvit": timm("crossvit_tiny_240", "blocks.0", tokens(1, 14, 14), 240, options=SECOND),
    # torchvision, classification
    "tv_convnext": vision("convnext_tiny", "features.1.0.block.3", LAST),
    "tv_efficientnet": vision("efficientnet_b0", "features.4.0", FIRST),
    "tv_densenet": vision("densenet121", "features.transition2", FIRST),
    "tv_shufflenet": vision("shufflenet_v2_x0_5", "stage3.1", FIRST),
    "tv_vit": built(vit, "encoder.layers.encoder_layer_1", tokens(1, 4, 4), image()),
    "tv_swin": built(swin, "features.3.1", LAST, image()),
    "tv_swin_v2": built(swin_v2, "features.3.1", LAST, image()),
    # torchvision, detection and segmentation
    "tv_faster_rcnn": vision(MOBILE_RCNN, "backbone.body.13", FIRST, IMAGES, **DETECTOR),
    "tv_fpn": vision(
        MOBILE_RCNN, "backbone.fpn", FIRST, IMAGES, {"argument": "x.0", "output": "0"}, **DETECTOR
    ),
    "tv_retinanet": vision("retinanet_resnet50_fpn", "backbone.body.layer2.1", FIRST, IMAGES, **DETECTOR),
    "tv_ssdlite": vision("ssdlite320_mobilenet_v3_large", "backbone.features.0.9", FIRST, IMAGES, **PLAIN),
    "tv_lraspp": vision("lraspp_mobilenet_v3_large", "backbone.13", FIRST, **PLAIN),
    "tv_deeplab": vision("deeplabv3_mobilenet_v3_large", "backbone.13", FIRST, **PLAIN),
    # torchvision, video
    "tv_r3d": vision("r3d_18", "layer2.1", FIRST, CLIP),
    "tv_swin3d": built(swin3d, "features.0.0", LAST, CLIP),
    "tv_mvit": built(mvit, "blocks.1", tokens(1, 2, 8, 8), CLIP, output=0),
}


def transformers_vit():
    package = pytest.importorskip("transformers", reason="transformers is not installed")
    config = package.ViTConfig(image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2,
                               num_attention_heads=2, intermediate_size=32)  # fmt: skip
    return package.ViTForImageClassification(config)


def smp_unet():
    package = pytest.importorskip(
        "segmentation_models_pytorch", reason="segmentation_models_pytorch is not installed"
    )
    return package.Unet("resnet18", encoder_weights=None, decoder_channels=(32, 16, 16, 8, 8))


def monai_unet():
    nets = pytest.importorskip("monai.networks.nets", reason="monai is not installed")
    return nets.UNet(3, 1, 2, (4, 8, 16), (2, 2))


HOSTS |= {
    "transformers_vit": built(transformers_vit, "vit.layers.1", tokens(1, 4, 4), image(32, 32)),
    "transformers_encoder": built(
        transformers_vit, "vit", tokens(1, 4, 4), image(32, 32), output="last_hidden_state"
    ),
    "smp_unet": built(smp_unet, "decoder.blocks.1", FIRST, image(), argument="feature_map"),
    "monai_unet": built(monai_unet, "model.1.submodule.0", FIRST, torch.rand(1, 1, 32, 32, 32)),
}
