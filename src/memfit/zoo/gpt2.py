"""GPT-2, small by default. Shapes: B batch, T tokens, D width, H heads, K width per head, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CausalAttention(nn.Module):
    """Attention of every token to those up to itself, with one projection for queries, keys and values."""

    def __init__(self, width: int, *, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTD, k_BTD, v_BTD = self.qkv(x_BTD).chunk(3, dim=2)
        y_BHTK = F.scaled_dot_product_attention(
            self._by_head(q_BTD),
            self._by_head(k_BTD),
            self._by_head(v_BTD),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        out_BTD: Tensor = self.out(y_BHTK.transpose(1, 2).flatten(2))
        return out_BTD

    def _by_head(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:2], self.num_heads, -1).transpose(1, 2)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before, dropped out, and added to what came in."""

    def __init__(self, width: int, *, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, num_heads=num_heads, dropout=dropout)
        self.drop = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.drop(self.attention(self.norm1(x_BTD)))
        y_BTD: Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return y_BTD


class GPT2(nn.Module):
    """Token ids to next-token logits; the output layer and the token embedding are one Parameter.

    Any sequence of up to `context` tokens may be given.
    """

    def __init__(
        self,
        *,
        num_layers: int = 12,
        width: int = 768,
        num_heads: int = 12,
        vocab_size: int = 50257,
        context: int = 1024,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width {width} does not divide into {num_heads} heads")
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, num_heads=num_heads, dropout=dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self._init_weights(num_layers)

    def _init_weights(self, num_layers: int) -> None:
        """Draw weights as GPT-2 does: 0.02, less where a block adds to the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                adds_to_stream = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5 if adds_to_stream else 0.02)

    def forward(self, ids_BT: Tensor) -> Tensor:
        num_tokens = ids_BT.shape[1]
        if num_tokens > self.context:
            raise ValueError(
                f"this GPT-2 was built for at most {self.context} tokens, not {num_tokens}; "
                f"build it with context={num_tokens}"
            )
        places_T = torch.arange(num_tokens, device=ids_BT.device)
        x_BTD = self.drop(self.tokens(ids_BT) + self.positions(places_T))
        logits_BTV: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits_BTV
