"""Vision Transformer, ViT-B/16 by default. Shapes: B batch, T tokens, D width, H heads, K width per head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SelfAttention(nn.Module):
    """Attention of every token to every token, with one projection for queries, keys and values."""

    def __init__(self, width: int, *, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.qkv.weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.out.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv_3BHTK = self.qkv(x_BTD).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q_BHTK, k_BHTK, v_BHTK = qkv_3BHTK.unbind(0)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK)
        out_BTD: Tensor = self.out(y_BHTK.transpose(1, 2).flatten(2))
        return out_BTD


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to what came in."""

    def __init__(self, width: int, *, num_heads: int, mlp_width: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = SelfAttention(width, num_heads=num_heads)
        self.drop = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(mlp_width, width),
            nn.Dropout(dropout),
        )
        for module in self.mlp:
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.normal_(module.bias, std=1e-6)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.drop(self.attention(self.norm1(x_BTD)))
        y_BTD: Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return y_BTD


class ViT(nn.Module):
    """Patches and a class token through a row of blocks; the class token's last state is classified.

    The learned position embedding fits one image side only, so another side must be given here, as `image`.
    Dropout is 0, as torchvision trains it; a p of 0 runs no op at all.
    """

    def __init__(
        self,
        *,
        image: int = 224,
        patch: int = 16,
        depth: int = 12,
        width: int = 768,
        num_heads: int = 12,
        mlp_width: int = 3072,
        num_classes: int = 1000,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"image side {image} does not divide into patches of {patch}")
        if width % num_heads:
            raise ValueError(f"width {width} does not divide into {num_heads} heads")
        self.image = image
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (image // patch) ** 2 + 1, width))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(width, num_heads=num_heads, mlp_width=mlp_width, dropout=dropout) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        nn.init.normal_(self.positions, std=0.02)
        nn.init.trunc_normal_(self.patches.weight, std=(3 * patch * patch) ** -0.5)
        nn.init.zeros_(self.patches.bias)  # type: ignore[arg-type]  # this convolution has one
        # Often zero, but then the first step would give every other weight a gradient of exactly zero.
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[2:]) != (self.image, self.image):
            raise ValueError(
                f"this ViT was built for images of {self.image}x{self.image}, not {images.shape[2]}x{images.shape[3]}; "
                f"build it with image={images.shape[2]}"
            )
        patches_BTD = self.patches(images).flatten(2).transpose(1, 2)
        x_BTD = torch.cat([self.class_token.expand(images.shape[0], -1, -1), patches_BTD], dim=1)
        x_BTD = self.norm(self.blocks(self.drop(x_BTD + self.positions)))
        logits: Tensor = self.head(x_BTD[:, 0])
        return logits
