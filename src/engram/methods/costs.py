"""Multiply-accumulates (MACs) of a ViT's parts, counted from shapes alone.

Matrix products, the patch embedding and attention; norms, softmax and activations are left out, as
is usual. A layer costs a token its projections and its MLP (12 D^2 where the MLP is 4 D wide) and
2 D for every key it reads.
"""

from __future__ import annotations

from engram.backbones.shape import BackboneShape


def token_macs(backbone: BackboneShape) -> int:
    """One layer, for one token, without attention."""
    gates = 2 if backbone.activation == "swiglu" else 1
    return 4 * backbone.width**2 + (gates + 1) * backbone.width * backbone.mlp_width


def layers_macs(backbone: BackboneShape, tokens: int) -> int:
    """All layers, for tokens that all read each other."""
    return backbone.depth * (tokens * token_macs(backbone) + 2 * tokens**2 * backbone.width)


def keys_values_macs(backbone: BackboneShape, cells: int) -> int:
    """Keys and values of the cells of all layers."""
    return 2 * cells * backbone.width**2 * backbone.depth
