"""The recommended backbones, as facts that need no network, and the choice of `--backbone auto`.

`engram backbones` lists them. docs/backbones.md says why
these, and its table is checked against this one. Parameters and download sizes follow from the
shapes. The licences are those of the model cards on the Hub.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from engram.errors import EngramError
from engram.util import hub
from engram.util.invocation import program
from engram.util.progress import Progress, silent
from engram.vit.vit import HeadConfig, ViT, ViTConfig

PICO = "pico"
AUTO = "auto"
#: Images of up to so many pixels are for pico, which was trained on 32 x 32. Enlarged to the 224 of
#: other backbones they would cost 50 times as much.
SMALL = 48
HUB_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
)


@dataclass(frozen=True)
class RecommendedBackbone:
    """A backbone of the Hub that can be chosen by a short name."""

    name: str
    repo: str  # the Hub id
    about: str
    config: ViTConfig
    licence: str = "Apache-2.0"
    image_size: int = 224  # of the pixels that it is given; position embeddings may be for more
    unused: int = 0  # numbers in its file that the backbone does not have
    #: Test accuracy of `auto` in per cent, the mean of nine datasets with 600 to 1,020 training
    #: images (benchmarks/results/backbones.md); None: never run here.
    accuracy: float | None = None

    @cached_property
    def parameters(self) -> int:
        """The number of its parameters, its own head included."""
        with torch.device("meta"):  # no memory and no random numbers
            return sum(parameter.numel() for parameter in ViT(self.config).parameters())

    @property
    def download(self) -> int:
        """The size of its file in bytes, without the header: the weights are fp32."""
        return 4 * (self.parameters + self.unused)

    @property
    def on_this_machine(self) -> bool:
        """Whether it can be loaded without a network."""
        return hub.is_cached(self.repo, ("config.json", "model.safetensors"))


def _shape(width: int, patch: int, grid: int, classes: int = 0, *, dino: bool = False) -> ViTConfig:
    return ViTConfig(
        image_size=(grid * patch, grid * patch),
        patch=patch,
        width=width,
        depth=12,
        heads=width // 64,
        mlp_width=4 * width,
        layer_scale=dino,
        head=HeadConfig(classes) if classes else None,
    )


#: The best first: where there is no network, the first that is on this machine is used.
RECOMMENDED = (
    RecommendedBackbone(
        "dinov2-small",
        "facebook/dinov2-small",
        "photographs of any kind; the default",
        _shape(384, 14, 37, dino=True),
        unused=384,  # the token of masked patches
        accuracy=90.4,
    ),
    RecommendedBackbone(
        "dinov2-base",
        "facebook/dinov2-base",
        "more accurate, if there is a GPU or patience",
        _shape(768, 14, 37, dino=True),
        unused=768,
    ),
    RecommendedBackbone(
        "vit-base",
        "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k",
        "knows ImageNet-1k",
        _shape(768, 16, 14, 1000),
    ),
    RecommendedBackbone(
        "vit-small",
        "timm/vit_small_patch16_224.augreg_in21k_ft_in1k",
        "smaller, knows ImageNet-1k",
        _shape(384, 16, 14, 1000),
    ),
    RecommendedBackbone(
        "vit-base-32",
        "google/vit-base-patch32-224-in21k",
        "the paper's own backbone; few, large patches",
        _shape(768, 32, 7),
        unused=768 * 769,  # the pooling layer
    ),
    RecommendedBackbone(
        "vit-tiny",
        "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        "the fastest, knows ImageNet-1k",
        _shape(192, 16, 14, 1000),
        accuracy=87.4,
    ),
)


def recommended(name: str) -> RecommendedBackbone | None:
    """The recommended backbone of this short name or Hub id."""
    return next((known for known in RECOMMENDED if name in (known.name, known.repo)), None)


# --backbone auto


@dataclass(frozen=True)
class BackboneChoice:
    """A backbone, and why it was chosen."""

    source: str  # as `load_backbone` takes it
    reason: str  # a sentence


def choose_backbone(
    side: float | None,
    image_size: int | None = None,
    *,
    announce: Callable[[str], object] = lambda sentence: None,
    progress: Progress = silent,
) -> BackboneChoice:
    """Choose the bundled backbone for small images, and for others the first recommended one.

    That one is downloaded if it is not in the cache of the Hub. Where it cannot be, another
    recommended one that is there is used, or else the bundled one. A download that broke off is an
    EngramError: the next attempt continues it. `side` is the longer side of the images in pixels,
    and `image_size` what they are resized to, if not to the backbone's own size.
    """
    pixels = image_size or side
    if pixels is None:
        return BackboneChoice(PICO, "No image could be read to see how large they are.")
    if pixels <= SMALL:
        return BackboneChoice(PICO, f"The images are small: {pixels:g} pixels.")
    large = f"The images are large ({pixels:g} pixels)"
    best, *others = _that_take(image_size)
    here = f"{large}, and it is recommended for photographs"
    if best.on_this_machine:
        return BackboneChoice(best.repo, f"{here}.")
    if _download(best, announce, progress):
        return BackboneChoice(best.repo, f"{here}: downloaded.")
    fetch = f"{program()} backbones get {best.name}"
    for other in (other for other in others if other.on_this_machine):
        announce(
            f"The backbone is {other.repo}, which is on this machine; {best.repo} is "
            f"recommended, but cannot be downloaded now. With a network, fetch it: {fetch}"
        )
        reason = f"{large}, and it is a recommended backbone that is on this machine."
        return BackboneChoice(other.repo, reason)
    announce(
        "No recommended ViT is on this machine, and the Hub cannot be reached. So the backbone is "
        "pico, the bundled one, which sees images of 32 x 32 pixels: expect far lower accuracy on "
        "photographs (37 breeds of pets: 19 % with pico, 88 % with a ViT-Ti). With a network, "
        f"fetch a real one: {fetch}"
    )
    return BackboneChoice(
        PICO, f"{large}, but no other backbone is here, and the Hub is out of reach."
    )


def _that_take(image_size: int | None) -> list[RecommendedBackbone]:
    """The recommended backbones that can cut images of this size into patches."""
    found = [known for known in RECOMMENDED if (image_size or 0) % known.config.patch == 0]
    if not found:
        patches = sorted({backbone.config.patch for backbone in RECOMMENDED})
        raise EngramError(
            f"No recommended backbone takes images of {image_size} pixels; give an --image-size "
            f"that is a multiple of {', '.join(map(str, patches[:-1]))} or {patches[-1]}, or name "
            "a backbone with --backbone."
        )
    return found


def _download(
    backbone: RecommendedBackbone, announce: Callable[[str], object], progress: Progress
) -> bool:
    """Fetch a backbone. False if the download did not begin: there is no network."""
    began = False

    def watched(what: str, done: int, total: int, note: str = "") -> None:
        nonlocal began
        if not began:
            announce(
                f"Downloading {backbone.repo} once, about {backbone.download / 1e6:.0f} MB, into "
                "the cache of the Hub."
            )
        began = True
        progress(what, done, total, note)

    try:
        hub.fetch(backbone.repo, HUB_FILES, may_be_path=False, progress=watched)
    except EngramError:
        if began:
            raise
        return False
    return True
